"""The model card of a run: what was trained, how good it is, how to use it and how to repeat the run."""

import math
import shlex
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, snapshot_download

from rlcourse import __version__
from rlcourse.adapters import base_of
from rlcourse.checkpoint import step_of
from rlcourse.cli_tables import measured
from rlcourse.config import TrainConfig, make_config
from rlcourse.hub import hub_or_cache
from rlcourse.model_files import is_adapter
from rlcourse.paths import EMBEDDED_MODELS, data_folder, model_folder
from rlcourse.settings import is_address
from rlcourse.sft.config import SFTConfig
from rlcourse.tasks import in_format

PRIVATE = ("output", "name", "log_to")  # settings that say where a run is and who watches it
SHARES = ("accuracy", "accuracy_lenient", "formatted")  # of problems that each count 0 or 1


@dataclass(frozen=True)
class Run:
    """A run's folder, settings and last checkpoint. summary: summary.json, empty if the run isn't finished."""

    path: Path
    config: TrainConfig | SFTConfig
    checkpoint: Path
    summary: dict[str, Any]

    @property
    def base(self) -> str:
        """The model that was trained. An adapter has its absolute path, the settings may have a relative one."""
        return base_of(self.checkpoint) if is_adapter(self.checkpoint) else self.config.model

    @property
    def steps(self) -> str:
        """Where the last checkpoint is, such as "step 20 of 30"."""
        return f"step {step_of(self.checkpoint)}" + (f" of {self.config.steps}" if self.config.steps else "")


def model_card(runs: list[Run], name: str, prompt: str, terms: dict[str, str]) -> ModelCard:
    """The card of the first run's model, called `name`: `model_card.md`, filled in. prompt: what the model continues.
    terms: of `license_of`."""
    run, adapter = runs[0], is_adapter(runs[0].checkpoint)
    data = ModelCardData(
        base_model=run.base if is_on_hub(run.base) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rlcourse", "reinforcement-learning" if run.config.command == "train" else "sft", *["lora"] * adapter],
        **terms,
    )
    libraries = [f"{library} {version(library)}" for library in ("torch", "transformers", "peft")]
    return ModelCard.from_template(
        data,
        Path(__file__).with_suffix(".md"),
        title=name.rpartition("/")[2],
        name=name,
        run=run,
        adapter=adapter,
        ships=run.base in EMBEDDED_MODELS,
        prompt=prompt,
        results=results(runs) if run.summary else [],
        seeds=[run.config.seed for run in runs],
        repeat_command=repeat_command(run),
        versions=[f"rlcourse {__version__}", *libraries],
        is_on_hub=is_on_hub,
        public=public,
        repr=repr,
    )


def results(runs: list[Run]) -> list[list[str]]:
    """Rows of a table: what the first run measured, with standard errors; with several runs, their mean and range,
    too."""
    summary, seeds = runs[0].summary, ", ".join(str(run.config.seed) for run in runs)
    problems = summary["after"].get("problems")
    rows = [[f"{problems:,} test problems" if problems else "measure", "before", "after"], ["---", "--:", "--:"]]
    if len(runs) > 1:
        rows = [rows[0] + [f"after, mean of seeds {seeds} (min–max)"], rows[1] + ["--:"]]
    for name, form in measured(summary).items():
        errors_of = problems if name in SHARES else None
        numbers = [with_error(summary[when][name], form, errors_of) for when in ("before", "after")]
        spread = mean_and_range([run.summary["after"][name] for run in runs], form)
        rows += [[name.replace("_", " "), *numbers, spread][: len(rows[0])]]
    return rows


def with_error(value: float | None, form: str, problems: int | None) -> str:
    """A number, and for a share of `problems` its standard error in percentage points, sqrt(p (1 - p) / n)."""
    text = in_format(value, form)
    if not problems or value in (None, 0, 1):  # at 0 and 1 the formula gives 0, which claims too much
        return text
    return f"{text} ± {100 * math.sqrt(value * (1 - value) / problems):.1f}"


def mean_and_range(values: list[float | None], form: str) -> str:
    if None in values:
        return "–"
    mean, low, high = (in_format(value, form) for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low}–{high})"


def repeat_command(run: Run) -> str:
    """A command line that gives the run's settings."""
    values, given, defaults = run.config.to_dict(), {}, type(run.config)()
    if run.config.command == "train":
        given = {name: values[name] for name in ("preset", "algorithm")}
        defaults = make_config(**given)
    given |= {name: v for name, v in values.items() if v != getattr(defaults, name) and name not in PRIVATE}
    words = ["rlcourse", run.config.command]
    for name, value in given.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(public(value))]
    return shlex.join(words)


def license_of(base: str) -> tuple[dict[str, str], Path | None]:
    """The license of a model as a card's metadata, empty if unknown, and the file with its text, if there is one."""
    folder = data_folder().parent if base in EMBEDDED_MODELS else model_folder(base)
    if folder is None:
        with suppress(Exception), hub_or_cache():  # there is no network, or no such model
            folder = Path(snapshot_download(base, allow_patterns=["README.md", "LICENSE"]))
    file = folder / "LICENSE" if folder and (folder / "LICENSE").is_file() else None
    if base in EMBEDDED_MODELS:
        return {"license": "mit"}, file
    with suppress(Exception):  # there is no card, or it can't be read
        data = ModelCard.load(folder / "README.md").data
        if data.license:
            return {key: data[key] for key in ("license", "license_name", "license_link") if data.get(key)}, file
    return {"license": "other", "license_name": "see LICENSE", "license_link": "LICENSE"} if file else {}, file


def is_on_hub(model: str) -> bool:
    return model_folder(model) is None and model.count("/") < 2  # not the path of a folder that is gone


def public(value: Any) -> Any:
    """A setting as strangers may see it: only the last part of a local path, nothing of an address."""
    if not isinstance(value, str) or value in EMBEDDED_MODELS:
        return value
    name, at, place = value.partition("@")
    if at:
        return f"{name}@{'ADDRESS' if is_address(place) else Path(place).name}"
    is_path = value.count("/") > 1 or model_folder(value) is not None
    return Path(value).expanduser().resolve().name if is_path else value
