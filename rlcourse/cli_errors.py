"""How a command fails: with one sentence on stderr, whatever went wrong, and nothing that libraries print."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from rlcourse.files import reason
from rlcourse.interrupts import STOPS, Terminated, raise_terminated

LESS_MEMORY = "Lower --micro-batch-tokens, --num-prompts or --max-new-tokens, or add --gradient-checkpointing."
SHOW_WHERE = "(RLCOURSE_TRACEBACK=1 shows where.)"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error into one red sentence and an exit code: 2 for wrong input, 128 plus the number after a signal (130
    after Ctrl-C, 141 after a closed pipe), 1 otherwise. Logs and warnings of libraries are suppressed.

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
        raise typer.Exit(128 + (stop.args[0] if isinstance(stop, Terminated) else signal.SIGINT)) from None
    except BrokenPipeError:  # `| head` has read enough
        raise typer.Exit(141) from None
    except SystemExit as error:  # of code that a command runs: not its verdict
        if isinstance(error.__context__, BrokenPipeError):  # rich's way to end
            raise typer.Exit(141) from None
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
    """Suppress the logs and warnings of libraries; what matters is raised. STOPS then stop what runs, like Ctrl-C."""
    before = logging.root.manager.disable
    stops = [number for number in STOPS if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    logging.disable(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        for number in stops:
            signal.signal(number, raise_terminated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        for number in stops:
            signal.signal(number, signal.SIG_DFL)


def drop_output() -> None:
    """Drop what's left to print where nobody reads it any more, or Python would complain of that at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
