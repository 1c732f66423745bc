"""The records behind the lessons' figures: `data/curves/lessonNN_<names>.json`, several seeds each, made by
`python -m rlcourse.course.lessons.lessonNN <names>`."""

import datetime
from typing import Any

from rlcourse.measure.records import device_name
from rlcourse.paths import data_folder
from rlcourse.runs import read_json, write_json


def save(lesson: str, names: list[str], settings: dict[str, Any], seeds: list[dict[str, Any]]) -> None:
    """Write a record. lesson: "lesson02"; names: what the command is told; seeds: what each measured."""
    head = {
        "names": names,
        "settings": settings,
        "device": device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m", f"rlcourse.bench.{lesson}", *names]),
    }
    path = data_folder() / "curves" / f"{'_'.join([lesson, *names])}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, head | {"seeds": short(seeds)})


def load(lesson: str, names: list[str]) -> dict[str, Any]:
    """A record. Raises FileNotFoundError in one sentence if it has not been made."""
    path = data_folder() / "curves" / f"{'_'.join([lesson, *names])}.json"
    if not path.exists():
        command = " ".join(["python -m", f"rlcourse.bench.{lesson}", *names])
        raise FileNotFoundError(f"{path.name} is missing: make it with `{command}`.")
    return read_json(path)


def short(value: Any) -> Any:
    """The same value with its numbers to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [short(v) for v in value]
    return {k: short(v) for k, v in value.items()} if isinstance(value, dict) else value
