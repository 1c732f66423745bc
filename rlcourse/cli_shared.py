"""What all commands share: an option for each setting of a run, and one sentence on stderr for whatever goes wrong."""

import inspect
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from rlcourse.config import TrainConfig
from rlcourse.files import reason
from rlcourse.interrupts import STOPS, Terminated, raise_terminated
from rlcourse.settings import Settings, field_type

LESS_MEMORY = "Lower --micro-batch-tokens, --num-prompts or --max-new-tokens, or add --gradient-checkpointing."
SHOW_WHERE = "(RLCOURSE_TRACEBACK=1 shows where.)"


def setting_options(kind: type[Settings], names: Sequence[str]) -> list[inspect.Parameter]:
    """One keyword parameter for each field of `kind`, None by default so that preset and algorithm can fill it. Those
    that aren't in `names` are hidden."""
    options, panel = [], ""
    for f in fields(kind):
        panel, field, name = kind.panels.get(f.name, panel), field_type(f), f.name.replace("_", "-")
        text = f.metadata["help"] + (": " + ", ".join(f.metadata["choices"]) if f.metadata["choices"] else "")
        if f.default is not None:
            text += f" (default: {('off', 'on')[f.default] if field is bool else f.default})"
        flag = f"--{name}/--no-{name}" if field is bool else f"--{name}"
        option = typer.Option(flag, help=text, show_default=False, rich_help_panel=panel, hidden=f.name not in names)
        annotation = Annotated[field | None, option]
        options.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return options


def takes_settings(command, kind: type[Settings] = TrainConfig, names: Sequence[str] = ()):
    """Give a command `command(settings, ...)` an option for every field of `kind`; `settings` holds those that were
    set. The command's other parameters stay options of their own. names: the fields that matter to the command, if not
    all do; the others are refused."""
    every = [f.name for f in fields(kind)]

    @wraps(command)
    def with_options(**values):
        settings = {name: value for name in every if (value := values.pop(name)) is not None}
        if idle := [name for name in settings if name not in (names or every)]:
            raise ValueError(f"--{idle[0].replace('_', '-')} has no effect here: leave it out.")
        command(settings, **values)

    own = list(inspect.signature(command).parameters.values())[1:]
    parameters = setting_options(kind, names or every) + [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_options.__signature__ = inspect.Signature(parameters)
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


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
        if hasattr(error, "format_message"):  # typer has click's errors, or copies of them
            raise
        refuse(sentence(error), 2 if isinstance(error, ValueError | FileNotFoundError) else 1)


class Group(TyperGroup):
    """Commands that run within `user_errors`, and that refuse wrong options in one sentence, without typer's box."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        for command in self.commands.values():  # typer keeps line breaks
            command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help)

    def invoke(self, context: typer.Context) -> Any:
        with user_errors():
            return super().invoke(context)

    def main(self, *arguments: Any, **options: Any) -> None:
        try:
            code = super().main(*arguments, **options | {"standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            if message := error.format_message():  # `rlcourse` alone has printed its help
                print_error(message if message.endswith((".", "?")) else f"{message}.")
            code = error.exit_code
        sys.exit(code)


def sentence(error: Exception) -> str:
    """What went wrong, and what to do."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    match error:
        case _ if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be imported
            return f"{first} {LESS_MEMORY}"
        case _ if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            return f"There is not enough memory. {LESS_MEMORY}"
        case OSError() if error.errno is not None:
            return f"{reason(error)}: {error.filename}." if error.filename else f"{reason(error)}."
        case ImportError():
            return f"{first.rstrip('.')}: install it, or see `rlcourse doctor` for what is missing."
        case RuntimeError():
            return f"{first} {SHOW_WHERE}"
        case ValueError() | OSError():
            return first
    return f"{type(error).__name__}: {first} {SHOW_WHERE}"


def print_error(sentence: str) -> None:
    Console(stderr=True).print(f"[red]{escape(sentence)}[/red]", soft_wrap=True, highlight=False)


def refuse(sentence: str, code: int = 2) -> None:
    """Print the sentence in red on stderr and end the command."""
    print_error(sentence)
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
        with warnings.catch_warnings(action="ignore"):
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
