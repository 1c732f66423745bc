"""How a reader's function is called, by the card in a notebook and by the grader's worker alike."""

import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

CELL = re.compile(r"ipykernel_|ipython-input|<cell")  # in the file names that Jupyter, Colab and others give to cells


class OutOfTime(BaseException):
    """A case took too long. No Exception, which a loop that never ends may catch and go on."""


@contextmanager
def time_limit(seconds: float):
    """Raise OutOfTime after `seconds`; a limit around this one goes on. There is none without SIGALRM: on Windows, or
    in another thread."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    outer, start = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, max(min(seconds, outer or seconds), 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), 1e-3))


def gradient(function: Callable, *arguments, wrt: int = 0, **options) -> Tensor:
    """Gradient of the sum of `function`'s result with respect to argument number `wrt`. Raises AssertionError where
    there is no result, or no gradient flows."""
    arguments = list(arguments)
    arguments[wrt] = arguments[wrt].detach().clone().requires_grad_()
    with torch.enable_grad():
        result = function(*arguments, **options)
        if result is None:
            raise AssertionError("the result is None: is there a `return`?")
        result = torch.as_tensor(result).sum()
    if not result.requires_grad:
        raise AssertionError("no gradient flows through the result: did you detach it, or leave torch with .item()?")
    (found,) = torch.autograd.grad(result, arguments[wrt], allow_unused=True)
    return torch.zeros_like(arguments[wrt]) if found is None else found


def pieces(function: Callable, *arguments) -> list[list[str]]:
    """The graphs into which Dynamo cuts one call, in the order in which they run: the targets of each one's operations.
    What runs outside of any graph is in none of them."""
    ran: list[list[str]] = []

    def backend(graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        return lambda *arguments: ran.append(targets) or graph(*arguments)

    torch._dynamo.reset()
    disabled, logger = os.environ.get("TORCHDYNAMO_DISABLE", "0"), logging.getLogger("torch._dynamo")
    level, os.environ["TORCHDYNAMO_DISABLE"] = logger.level, "0"  # a grader's worker has it off
    logger.setLevel(logging.CRITICAL)  # breaks are what is asked for
    try:
        with torch._dynamo.config.patch(disable=False):
            torch.compile(function, backend=backend)(*arguments)
    finally:
        os.environ["TORCHDYNAMO_DISABLE"] = disabled
        logger.setLevel(level)
    return ran


def where(error: BaseException) -> str:
    """The line of the reader's function in which an error arose, in brackets; nothing if it arose elsewhere."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]  # opens no source file
    found = [(code, line) for code, line in frames if CELL.search(code.co_filename)]
    return f" (line {found[-1][1]} of the cell, in {found[-1][0].co_name})" if found else ""
