"""The process in which a reader's cells run. It answers calls of their functions until its input ends.

Started by `rlcourse.grading.Worker`. It is kept from importing `rlcourse`, where the solutions are. It is no sandbox:
code that is hostile, not merely wrong, belongs in a container.
"""

import ast
import builtins
import json
import os
import pickle
import signal
import sys

import numpy as np  # noqa: F401  loaded before the memory is limited, as is torch
import torch  # noqa: F401

from rlcourse.checks import gradient
from rlcourse.grading.wire import encode, frame, read_frame

CELL_SECONDS = 10
FILE_BYTES = 1 << 26  # that a reader's code may write to a file


class NoCourse:
    """An import hook that refuses `rlcourse`."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "rlcourse":
            raise ImportError("rlcourse cannot be imported here: write the function yourself")
        return None


def main(source: int, sink: int, memory_bytes: int) -> None:
    """Read cells from file descriptor `source`, run them, then answer calls to `sink`."""
    reader, writer = os.fdopen(source, "rb"), os.fdopen(sink, "wb")
    cells, skip = pickle.loads(read_frame(reader.read))
    limit(memory_bytes)
    for name in [name for name in sys.modules if name.split(".")[0] == "rlcourse"]:
        del sys.modules[name]
    sys.meta_path.insert(0, NoCourse())

    def send(data: bytes) -> None:
        writer.write(frame(data))
        writer.flush()

    namespace = {"__name__": "__main__", "__builtins__": builtins}
    errors = {}
    for number, source_code in enumerate(cells):
        if number in skip:
            continue
        send(json.dumps({"running": number}).encode())
        error = run_cell(source_code, namespace)
        if error:
            errors[number] = error
    names = [name for name, value in namespace.items() if callable(value)]
    send(json.dumps({"ready": True, "errors": errors, "names": names}).encode())
    while (request := read_frame(reader.read)) is not None:
        send(answer(namespace, *pickle.loads(request)))


def limit(memory_bytes: int) -> None:
    """Limit memory and the size of files, where the system knows how."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))


def run_cell(source: str, namespace: dict) -> str:
    """Run a cell, each statement by itself: one that fails does not take the next with it. The first error, or ''."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    first = ""
    for statement in statements:
        try:
            with_time_limit(compile(ast.Module([statement], []), "<cell>", "exec"), namespace)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are theirs as well
            first = first or f"{type(error).__name__}: {error}"[:300]
    return first


def with_time_limit(code, namespace: dict) -> None:
    def stop(*_):
        raise TimeoutError(f"took longer than {CELL_SECONDS} seconds: is there a loop that never ends?")

    if not hasattr(signal, "SIGALRM"):
        exec(code, namespace)
        return
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(CELL_SECONDS)
    try:
        exec(code, namespace)
    finally:
        signal.alarm(0)


def answer(namespace: dict, name: str, arguments: tuple, options: dict, wrt: int | None) -> bytes:
    """Call a function, or take its gradient with respect to argument `wrt`. One byte says which: V value, E error."""
    try:
        function = namespace[name]
        if wrt is None:
            return b"V" + encode(function(*arguments, **options))
        return b"V" + encode(gradient(function, *arguments, wrt=wrt, **options))
    except BaseException as error:
        return b"E" + json.dumps([type(error).__name__, str(error)[:2000]]).encode()
