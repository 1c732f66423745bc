"""What keeps a notebook's code from the answers where no namespaces do: simple ways are refused, no more.

Code that means harm gets past it, since it runs in the same process. That is why `isolation.py` uses it last.
"""

import gc
import os
import sys
import types
from collections.abc import Iterable

import torch

# Audit events that start or end other processes, or leave Python.
REFUSED = {"subprocess.Popen", "os.system", "os.kill", "os.killpg", "os.exec", "os.fork", "os.forkpty"}
REFUSED |= {"os.posix_spawn", "os.spawn", "resource.prlimit", "signal.pthread_kill", "pty.spawn", "os.startfile"}
REFUSED |= {"ctypes.dlopen", "ctypes.dlsym", "ctypes.call_function", "ctypes.cdata", "socket.connect", "socket.bind"}
WRITTEN = {"os.rename", "os.remove", "os.truncate", "os.link", "os.symlink", "os.chmod", "os.rmdir", "shutil.rmtree"}


def close(kept: Iterable[tuple[int, int]]) -> None:
    """From now on refuse to open, replace or link the files of `kept`, (device, inode) of each, and what REFUSED says.

    An audit hook cannot be removed. A file is known by its inode, whatever path or link leads to it.
    """
    hook = make_hook(frozenset(kept), os.stat, os.O_CREAT)
    for module, name in (("_posixsubprocess", "fork_exec"), ("signal", "pidfd_send_signal"), ("os", "pidfd_open")):
        if hasattr(sys.modules.get(module) or __import__(module), name):
            delattr(sys.modules[module], name)
    torch.from_file = torch.UntypedStorage.from_file = torch.UntypedStorage._new_shared_filename_cpu = refuse
    sys.addaudithook(hook)


def refuse(*_, **__):
    raise PermissionError("not allowed while grading")


def make_hook(kept: frozenset, stat, create: int):
    """The hook. All that it uses is bound here, where a later patch of `os` does not reach."""
    refused, written = frozenset(REFUSED), frozenset(WRITTEN)

    def inode(path):
        try:
            if isinstance(path, str):
                path = str.encode(path, "utf-8", "surrogateescape")  # a subclass's own methods are not asked
            found = stat(path if type(path) is int else bytes.__getitem__(path, slice(None)))
            return found.st_dev, found.st_ino
        except (OSError, ValueError, TypeError):
            return None

    def hook(event: str, arguments: tuple) -> None:
        if event in refused:
            raise PermissionError(f"{event} is not allowed while grading")
        if event == "open":
            path, _, flags = arguments
            found = inode(path)
            if found in kept or (found is None and not flags & create):  # it may be there from another folder on
                raise FileNotFoundError(f"{path!r} is not there while grading")
        elif event in written and any(inode(part) in kept for part in arguments):
            raise FileNotFoundError("this is not there while grading")

    return hook


def digest(code: types.CodeType) -> tuple:
    """What a piece of code does, without where it came from: equal for two texts that differ in comments alone."""
    constants = [digest(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts]
    return code.co_name, code.co_code, tuple(constants), code.co_names, code.co_varnames


def running(known: set[tuple]) -> list[str]:
    """Names of the functions in this process whose code has a digest in `known`, those of libraries left out."""
    names, libraries = {entry[0] for entry in known}, tuple(sys.path[1:])
    codes = [item.__code__ for item in gc.get_objects() if type(item) is types.FunctionType]
    codes = [code for code in codes if code.co_name in names and not code.co_filename.startswith(libraries)]
    return sorted({code.co_name for code in codes if digest(code) in known})
