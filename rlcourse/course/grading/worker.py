"""The process in which a reader's cells run. It answers calls of their functions until its connection ends.

Started by `student.py`. It can neither import nor open `rlcourse`, where the solutions are, nor start or end other
processes. It is no sandbox: code that is hostile, not merely wrong, belongs in a container.
"""

import ast
import os
import pickle
import re
import resource
import socket
import sys
import types
from pathlib import Path

import torch

from rlcourse.course.checks import OutOfTime, gradient, time_limit, where
from rlcourse.course.grading.wire import encode, receive, send

PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
FILE_BYTES = 1 << 26  # that a reader's code may write to a file
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PROCESSES = {"subprocess.Popen", "os.system", "os.kill", "os.killpg"}  # audit events, as are those of the next line
PROCESSES |= {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}


def main(file_descriptor: int) -> None:
    """Answer requests, each a pickled list, until the grader is gone. The first is the arguments of `prepare`."""
    connection = socket.socket(fileno=file_descriptor)
    prepare(*pickle.loads(receive(connection)))
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    send(connection, encode("ready"))
    while True:
        try:
            request = receive(connection)
        except EOFError:
            return
        send(connection, answer(module.__dict__, request))


def prepare(seed: int, memory_bytes: int) -> None:
    """Seed, limit and guard this process. memory_bytes: what may be taken beyond what the libraries take."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    taken = Path("/proc/self/statm")
    if taken.exists():  # elsewhere the system does not keep the limit
        limit = int(taken.read_text().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name in [name for name in sys.modules if name.split(".")[0] == "rlcourse"]:
        del sys.modules[name]
    sys.addaudithook(guard)  # which nothing can remove


def guard(event: str, arguments: tuple) -> None:
    """Audit hook: raise where the reference is imported or opened, or another process started or ended."""
    if event == "import":
        refused = arguments[0].partition(".")[0] == "rlcourse"
    elif event == "open":
        path = arguments[0]
        refused = isinstance(path, str | bytes) and os.path.abspath(os.fsdecode(path)).startswith(PACKAGE)
    else:
        if event in PROCESSES:
            raise PermissionError(f"{event} is not allowed here")
        return
    if refused:
        raise ImportError("rlcourse cannot be imported here: write the function yourself")


def answer(namespace: dict, request: bytes) -> bytes:
    """Do what is asked for. {"value": ...}, {"error": [kind, message]}, or {"undefined": name}, encoded."""
    try:
        kind, *details = pickle.loads(request)
        if kind == "cell":
            return encode({"value": run_cell(*details, namespace)})
        name, arguments, options = details
        if not callable(namespace.get(name)):
            return encode({"undefined": name})
        if kind == "gradient":
            return encode({"value": gradient(namespace[name], *arguments, **options)})
        return encode({"value": namespace[name](*arguments, **options)})
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the reader's as well
        return encode({"error": [type(error).__name__, sentence(error)]})


def sentence(error: BaseException) -> str:
    """What an error says, and where it arose."""
    try:
        return str(error)[:500] + where(error)
    except BaseException:  # the reader's own class of error may say anything
        return ""


def run_cell(number: int, source: str, whole: bool, seconds: float, namespace: dict) -> str:
    """Run a cell, each statement by itself: one that fails does not take the next with it. The first error, or ''.

    whole: all of it; else imports, definitions and constants alone. seconds: how long one statement may take.
    """
    try:
        statements = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    first = ""
    for statement in statements if whole else filter(is_definition, statements):
        try:
            with time_limit(seconds):
                exec(compile(ast.Module([statement], []), f"<cell {number}>", "exec"), namespace)
        except OutOfTime:
            first = first or f"took longer than {seconds:g} seconds: is there a loop that never ends?"
        except BaseException as error:
            first = first or f"{type(error).__name__}: {sentence(error)}"
    return first


def parse(source: str) -> list[ast.stmt]:
    """The statements of a cell. Where it is no Python, lines of IPython's own (`%pip`, `!ls`) are left out."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return ast.parse(re.sub(r"^([ \t]*)[%!].*", r"\1pass", source, flags=re.MULTILINE)).body


def is_definition(node: ast.stmt) -> bool:
    """Whether a statement imports, defines, or names a number, a text or a list of those.

    Imports of `rlcourse`, which fails here, are not counted: every notebook has one, for its checks.
    """
    if isinstance(node, ast.Import):
        return not any(alias.name.split(".")[0] == "rlcourse" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] != "rlcourse"
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        try:
            ast.literal_eval(node.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            return False
        return True
    return isinstance(node, DEFINITIONS)
