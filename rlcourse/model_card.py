"""The model card of a run: what was trained, how good it is, how to use it and how to repeat the run."""

import math
import shlex
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, snapshot_download

from rlcourse import __version__
from rlcourse.adapters import base_of
from rlcourse.checkpoint import step_of
from rlcourse.config import TrainConfig, make_config
from rlcourse.hub import hub_or_cache
from rlcourse.model_files import is_adapter
from rlcourse.paths import EMBEDDED_MODELS, data_folder, model_folder
from rlcourse.presets import PRESETS
from rlcourse.settings import is_address
from rlcourse.sft.config import SFTConfig
from rlcourse.tasks import in_format

PRIVATE = ("output", "name", "log_to")  # settings that say where a run is and who watches it
SHARES = ("accuracy", "accuracy_lenient", "formatted")  # of problems that each count 0 or 1
TRAINED = """\
The model was trained with this prompt, special tokens included. It asks the first test problem: to ask something else,
replace the last question in it."""
GENERIC = "The prompt is a question in the tokenizer's chat template, if it has one."
USAGE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
{load}
tokenizer = AutoTokenizer.from_pretrained("{name}")
text = (
{literal}
)
prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
ids = model.generate(**prompt, do_sample=False, max_new_tokens={tokens})[0]
print(tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```

{about}"""


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
    """The card of the first run's model, called `name`. prompt: what the model continues. terms: of `license_of`."""
    run, adapter = runs[0], is_adapter(runs[0].checkpoint)
    data = ModelCardData(
        base_model=run.base if is_on_hub(run.base) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rlcourse", "reinforcement-learning" if run.config.command == "train" else "sft", *["lora"] * adapter],
        **terms,
    )
    parts = [f"# {name.rpartition('/')[2]}", introduction(run), usage(run, name, prompt)]
    if run.summary:
        parts += [results(runs), *samples(run.summary["after"].get("samples", []))]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    parts += [f"## Repeat it\n\n```bash\n{repeat_command(run)}\n```"]
    parts += [f"Published with rlcourse {__version__}, {versions}."]  # as installed here
    license = terms.get("license_name", terms.get("license", "unknown"))
    parts += [f"## License\n\nThe base model's license also covers these weights: {license}."]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def introduction(run: Run) -> str:
    """What was trained from which base, how long that took, and the run's warnings."""
    config = run.config
    base = f"[`{run.base}`](https://huggingface.co/{run.base})" if is_on_hub(run.base) else f"`{public(run.base)}`"
    base += ", which ships with rlcourse" if run.base in EMBEDDED_MODELS else ""
    kind = f"A LoRA adapter of rank {config.lora_rank} for {base}" if is_adapter(run.checkpoint) else base
    if config.command == "train":
        how, data = f"reinforcement learning (`{config.algorithm}`)", config.task
    else:
        how, data = "supervised fine-tuning", public(config.data)
    lines = [f"{kind}, trained with rlcourse by {how} on `{data}`: {run.steps}."]
    if not run.summary:
        return f"{lines[0]} **The run stopped before its final evaluation.**"
    seconds = run.summary.get("seconds", {}) | {"total": run.summary["wall_seconds"]}
    lines += [f"Minutes: {', '.join(f'{part} {took / 60:.1f}' for part, took in seconds.items())}."]
    lines += [f"**Warning:** {' '.join(text.split())}" for text in run.summary.get("warnings", {}).values()]
    return "\n\n".join(lines)


def usage(run: Run, name: str, prompt: str) -> str:
    """Python that loads the model and continues the prompt."""
    load = f'\nmodel = AutoModelForCausalLM.from_pretrained("{name}")'
    if is_adapter(run.checkpoint):
        base, more = f'"{public(run.base)}"', ""
        if run.base in EMBEDDED_MODELS:
            base, more = f"model_folder({base})", "from rlcourse.paths import model_folder\n"
        load = f"from peft import PeftModel\n{more}\n"
        load += f'base = AutoModelForCausalLM.from_pretrained({base}, dtype="float32")\n'
        load += f'model = PeftModel.from_pretrained(base, "{name}")'
    literal = "\n".join(f"    {line!r}" for line in prompt.splitlines(keepends=True))
    about = TRAINED if run.summary.get("prompt") else GENERIC
    return USAGE.format(name=name, load=load, literal=literal, tokens=run.config.max_new_tokens, about=about)


def results(runs: list[Run]) -> str:
    """A table of what the first run measured, with standard errors; with several runs, their mean and range, too."""
    before, after, metrics = (runs[0].summary[key] for key in ("before", "after", "metrics"))
    forms = {"loss": ".3f"} | metrics | {name: ".1%" for name in after if name.startswith("pass@")} | {"tokens": ".1f"}
    problems, seeds = after.get("problems"), [str(run.config.seed) for run in runs]
    header = [f"{problems:,} test problems" if problems else "measure", "before", "after"]
    notes = "The first accuracy is the one that counts. Answers are greedy, except for pass@k; ± is one standard error."
    if len(runs) > 1:
        header += [f"after, mean of seeds {', '.join(seeds)} (min–max)"]
        notes += f" The weights are those of seed {seeds[0]}."
    rows = [header, ["---", *["--:"] * (len(header) - 1)]]
    for name, form in forms.items():
        if name in after:
            numbers = [with_error(when[name], form, name in SHARES and problems) for when in (before, after)]
            spread = mean_and_range([run.summary["after"][name] for run in runs], form)
            rows += [[name.replace("_", " "), *numbers, spread][: len(header)]]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## Results\n\n{table}\n\n{notes}\n\n![Learning curve](curve.png)"


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


def samples(found: list[dict[str, Any]]) -> list[str]:
    parts = ["## Samples", "Test problems and the model's greedy answers, up to 1,500 characters of each:"]
    for sample in found[:4]:
        question, answer = (textwrap.indent(sample[key][:1500], "    ", bool) for key in ("question", "text"))
        parts += [question, f"**{'Right' if sample['right'] else 'Wrong'}:**", answer]
    return parts if found else []


def repeat_command(run: Run) -> str:
    """The shortest command line that gives the run's settings."""
    values, given, defaults = run.config.to_dict(), {}, type(run.config)()
    if run.config.command == "train":
        of_preset = PRESETS[values["preset"]].get("algorithm", defaults.algorithm)
        usual = {"preset": defaults.preset, "algorithm": of_preset}
        given = {name: values[name] for name in usual if values[name] != usual[name]}
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
