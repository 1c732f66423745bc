"""The options of the commands: one for each setting of a run, and ranges for the others."""

import inspect
import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from rlcourse.cli_errors import refuse
from rlcourse.config import TrainConfig
from rlcourse.settings import Range, Settings, field_type


def setting_options(kind: type[Settings]) -> list[inspect.Parameter]:
    """One keyword parameter for each field of `kind`, None by default so that preset and algorithm can fill it."""
    options, panel = [], ""
    for f in fields(kind):
        panel = kind.panels.get(f.name, panel)
        annotation = Annotated[field_type(f) | None, _option(f, panel)]
        options.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return options


def _option(f: Field, panel: str):
    flag = "--" + f.name.replace("_", "-")
    if field_type(f) is bool:
        flag += "/--no-" + f.name.replace("_", "-")
    text = f.metadata["help"] + (": " + ", ".join(f.metadata["choices"]) if f.metadata["choices"] else "")
    if f.default is not None:
        default = {True: "on", False: "off"}[f.default] if field_type(f) is bool else f.default
        text += f" (default: {default})"
    return typer.Option(flag, help=text, show_default=False, rich_help_panel=panel)


def takes_settings(command, kind: type[Settings] = TrainConfig):
    """Give a command `command(settings, ...)` an option for every field of `kind`, collected in `settings`.

    `settings` holds the options that were set. The command's other parameters stay options of their own.
    """

    def with_options(**values):
        names = {f.name for f in fields(kind)}
        settings = {name: value for name, value in values.items() if name in names and value is not None}
        command(settings, **{name: value for name, value in values.items() if name not in names})

    own = list(inspect.signature(command).parameters.values())[1:]
    parameters = setting_options(kind) + [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_options.__signature__ = inspect.Signature(parameters)
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    with_options.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command))  # typer keeps line breaks
    with_options.__name__ = command.__name__
    return with_options


def within(numbers: Range) -> Callable:
    """A callback for an option that is not a setting of a run: a number outside the range ends the command with one
    sentence. Unlike typer's `min` and `max`, it refuses nan."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        try:
            if value is not None:
                numbers.check(parameter.opts[0], value)
        except ValueError as error:
            refuse(str(error))
        return value

    return check


def parse_rows(text: str) -> list[int]:
    """The numbers of `--rows`. Raises ValueError unless each is a multiple of the group of 8."""
    numbers = [int(part) if re.fullmatch(r"\s*[0-9]{1,6}\s*", part) else 0 for part in text.split(",")]
    if any(number < 8 or number % 8 for number in numbers):
        raise ValueError(f"--rows takes multiples of 8, the group, set apart by commas, not {text[:80]!r}.")
    return numbers
