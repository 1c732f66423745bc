"""What values a setting takes: its type, its choices, the range of a number, the form of a text. Each field of a config
declares them beside its default, with `setting`; `check_setting` refuses a value, wherever it comes from."""

import types
import typing
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

MANY = 10**9  # no count is larger: what is beyond would overflow somewhere, or never end


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included; without `low` itself if `above`."""

    low: float
    high: float
    above: bool = False

    def __str__(self) -> str:
        return f"above {self.low:,} and at most {self.high:,}" if self.above else f"from {self.low:,} to {self.high:,}"

    def check(self, name: str, value: float) -> None:
        """Raise ValueError for a number outside the range, or nan."""
        if not self.low <= value <= self.high or (self.above and value == self.low):
            raise ValueError(f"{name} must be {self}, not {shown(value)}.")


COUNT = Range(1, MANY)
COUNT_OR_NONE = Range(0, MANY)
SEED = Range(0, 2**31 - 1)
SHARE = Range(0, 1)
WEIGHT = Range(0, 1_000)
REWARD = Range(-1_000, 1_000)
TEMPERATURE = Range(0.01, 100)  # a sharper softmax overflows, a flatter one is uniform
TOP_P = Range(0, 1, above=True)
MEMORY_GB = Range(0.1, 1_000)
RANK = Range(0, 4096)  # of an adapter


def setting(default, help: str, choices: tuple[str, ...] | None = None, within: Range | None = None):
    """A config field: its default, its line in `--help`, and its choices or range. Every number has a range."""
    return field(default=default, metadata={"help": help, "choices": choices, "within": within})


def field_type(f: Field) -> type:
    """The plain type of a field: `str` for `str | None`."""
    if isinstance(f.type, types.UnionType):
        return next(t for t in typing.get_args(f.type) if t is not type(None))
    return f.type


def check_setting(f: Field, value: Any) -> Any:
    """The value in the field's own type: a whole number becomes a float if the field is one. Raises ValueError for
    another type, what isn't among the choices or in range, or a text that's blank or can't be printed."""
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


class Settings:
    """What configs share: they are dataclasses of `setting`s, the options of the command `command`."""

    command: ClassVar[str]
    panels: ClassVar[dict[str, str]]  # the groups of its `--help`: each begins at this field

    @classmethod
    def check_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings, each checked by itself and in its field's type. Raises ValueError for an unknown one, too."""
        known = {f.name: f for f in fields(cls)}
        for name in settings:
            if name not in known:
                raise ValueError(f"Unknown setting {shown(name)}: `rlcourse {cls.command} --help` lists them all.")
        checked = {name: check_setting(known[name], value) for name, value in settings.items()}
        name = checked.get("name") or ""
        if name in (".", "..") or "/" in name or "\\" in name or len(name.encode()) > 200:
            raise ValueError(f"name must be that of a folder in --output, without / and \\, not {shown(name)}.")
        return checked

    def check(self) -> None:
        """Check each setting, and bring it into its field's type. Raises ValueError, too, for some that don't go
        together."""
        vars(self).update(self.check_settings(vars(self)))
        if self.dtype == "bfloat16" and self.device == "cpu":
            raise ValueError("dtype bfloat16 is for a GPU: use --dtype float32 on a CPU.")

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def model_and_address(text: str) -> tuple[str, str]:
    """The two parts of MODEL@ADDRESS; the address is empty for a model alone."""
    model, at, rest = text.partition("@http")
    return model, at[1:] + rest


def shown(value: Any) -> str:
    """The value as a sentence quotes it, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
