"""What a setting may be: its type, its choices, the range of its number, the form of its text.

Each field of a config declares these beside its default, by `setting`. `check_setting` is the one place that refuses a
value, wherever it comes from: the command line, Python, or the file of a run. Options of commands that are no settings
of a run take ranges too (`cli_options.within`).
"""

import types
import typing
from dataclasses import Field, dataclass, field
from typing import Any

MANY = 10**9  # no count is larger: what is beyond would overflow somewhere, or never end


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`, both included; `low` itself is left out where `above` says so."""

    low: float
    high: float
    above: bool = False

    def __str__(self) -> str:
        return f"above {self.low:,} and at most {self.high:,}" if self.above else f"from {self.low:,} to {self.high:,}"

    def check(self, name: str, value: float) -> None:
        """Raise ValueError, naming `name`, for a number outside. nan is outside."""
        if not self.low <= value <= self.high or (self.above and value == self.low):
            raise ValueError(f"{name} must be {self}, not {shown(value)}.")


COUNT = Range(1, MANY)
COUNT_OR_NONE = Range(0, MANY)
SEED = Range(0, 2**31 - 1)
SHARE = Range(0, 1)
WEIGHT = Range(0, 1_000)
LIMIT = Range(0, MANY, above=True)
REWARD = Range(-1_000, 1_000)
TEMPERATURE = Range(0.01, 100)  # a sharper softmax overflows, a flatter one is uniform
TOP_P = Range(0, 1, above=True)
MEMORY_GB = Range(0.1, 1_000)


def setting(default, help: str, choices: tuple[str, ...] | None = None, within: Range | None = None):
    """A config field with the sentence that `rlcourse train --help` prints and, where it has them, its choices or its
    range. A number always has a range."""
    return field(default=default, metadata={"help": help, "choices": choices, "within": within})


def field_type(f: Field) -> type:
    """The plain type of a field: `str` for `str | None`."""
    if isinstance(f.type, types.UnionType):
        return next(t for t in typing.get_args(f.type) if t is not type(None))
    return f.type


def check_setting(f: Field, value: Any) -> Any:
    """The value as the field holds it: a whole number becomes a float where one is asked for.

    Raises ValueError with one sentence for another type, or a value that is no choice, out of range, or no text.
    """
    kind = field_type(f)
    if value is None and isinstance(f.type, types.UnionType):
        return None
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{f.name} must be {kind.__name__}, not {shown(value)}.")
    if f.metadata["choices"] and value not in f.metadata["choices"]:
        raise ValueError(f"{f.name} must be one of {', '.join(f.metadata['choices'])}, not {shown(value)}.")
    if f.metadata["within"] is not None:
        f.metadata["within"].check(f.name, value)
    if kind is str and not (value.strip() and value.isprintable()):
        raise ValueError(f"{f.name} must be a text that can be printed, not {shown(value)}.")
    return kind(value)


def check_name(name: str) -> None:
    """Raise ValueError for a name that leads out of the folder that it is meant for, or that no folder can have."""
    if name in (".", "..") or "/" in name or "\\" in name or len(name.encode()) > 200:
        raise ValueError(f"name must be that of a folder in --output, without / and \\, not {shown(name)}.")


def shown(value: Any) -> str:
    """The value in a sentence, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
