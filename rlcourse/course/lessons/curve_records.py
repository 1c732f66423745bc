"""Learning curves as records: `data/curves/<device>/<name>.json`, with a row of results for each seed. `name` is that
of an algorithm, recorded by `tools.lessons.curves`; or `lessonNN_...`, recorded by `tools.lessons.lessonNN`; or that of
a module there, `OF_MODULES`."""

from typing import Any

from rlcourse.measure.records import load_record
from rlcourse.paths import data_folder

OF_MODULES = ("sampler_gap",)  # with a row for each variant and seed


def load_curve(name: str, device: str | None = None) -> dict[str, Any]:
    """The record called `name`; see `rlcourse.measure.records.load_record`."""
    return load_record(name, device, data_folder() / "curves", command_of(name))


def command_of(name: str) -> str:
    """What measures the record, in a clone of the repository."""
    lesson = name.split("_")[0]
    module = name if name in OF_MODULES else lesson if lesson.startswith("lesson") else "curves"
    return f"python -m tools.lessons.{module}"
