"""How a command fails: with one sentence on stderr, whatever went wrong, and nothing that libraries print."""

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from rlcourse.files import reason
from rlcourse.interrupts import Terminated, raise_terminated

LESS_MEMORY = "Lower --micro-batch-tokens, --num-prompts or --max-new-tokens, or add --gradient-checkpointing."
SHOW_WHERE = "(RLCOURSE_TRACEBACK=1 shows where.)"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error into one red sentence and an exit code: 2 for wrong input, 130 after Ctrl-C, 143 after SIGTERM, 1
    otherwise. Logs and warnings of libraries are suppressed.

    RLCOURSE_TRACEBACK=1 lets the error and the warnings through.
    """
    if os.environ.get("RLCOURSE_TRACEBACK"):
        yield
        return
    try:
        with silence():
            yield
    except (typer.Exit, typer.Abort):  # RuntimeErrors, but typer's own
        raise
    except KeyboardInterrupt as stop:
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    except SystemExit as error:  # of code that a command runs: not its verdict
        refuse(f"The code that was run ended the process by sys.exit({error.code!r}).", 1)
    except Exception as error:
        refuse(sentence(error), 2 if isinstance(error, ValueError | FileNotFoundError) else 1)


def sentence(error: Exception) -> str:
    """What went wrong, and what to do."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":
        return f"{first} {LESS_MEMORY}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return f"There is not enough memory. {LESS_MEMORY}"
    if isinstance(error, OSError) and error.errno is not None:
        place = f": {error.filename}" if error.filename else ""
        return f"{reason(error)}{place}."
    if isinstance(error, ImportError):
        return f"{first} `rlcourse doctor` says what is missing."
    if isinstance(error, RuntimeError):
        return f"{first} {SHOW_WHERE}"
    if isinstance(error, ValueError | OSError):
        return first
    return f"{type(error).__name__}: {first} {SHOW_WHERE}"


def refuse(sentence: str, code: int = 2) -> None:
    """Print the sentence in red on stderr and end the command."""
    Console(stderr=True).print(f"[red]{escape(sentence)}[/red]", soft_wrap=True, highlight=False)
    raise typer.Exit(code) from None


@contextmanager
def silence() -> Iterator[None]:
    """Suppress the logs and warnings of libraries; what matters is raised. SIGTERM then stops what runs, like
    Ctrl-C."""
    before, terminate = logging.root.manager.disable, signal.getsignal(signal.SIGTERM)
    logging.disable(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        if terminate is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, raise_terminated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if terminate is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, terminate)
