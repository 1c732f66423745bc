"""The model card of a run: what was trained, how good it became, how to use it and how to repeat it."""

import json
import math
import platform
import re
import shlex
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase

from rlcourse.checkpoint import step_of
from rlcourse.config import make_config
from rlcourse.lora import is_adapter
from rlcourse.origins import described, is_on_hub, lineage, public
from rlcourse.paths import EMBEDDED_MODELS
from rlcourse.policy import TEMPLATE
from rlcourse.presets import PRESETS
from rlcourse.tasks import in_format, load_task
from rlcourse.tasks.gsm8k import INSTRUCTION as GSM8K
from rlcourse.tasks.math import INSTRUCTION as MATH

if TYPE_CHECKING:
    from rlcourse.publish import Run

QUESTION = "Tom has 3 apples and buys 12 more. How many apples does Tom have?"
INSTRUCTIONS = {"gsm8k": GSM8K, "math": MATH}  # the system messages of their prompts
DATASETS = {"gsm8k": "openai/gsm8k", "math": "HuggingFaceH4/MATH-500", "kernelbench": "ScalingIntelligence/KernelBench"}
PRIVATE = ("output", "name", "log_to")  # settings that say where a run is kept
FREE = (*PRIVATE, "seed", "device", "save_every", "keep_checkpoints", "vllm_server")  # may differ between seeds
SHARES = ("accuracy", "accuracy_lenient", "formatted")  # of problems that each count 0 or 1
LABELS = {"accuracy": "accuracy, strict reading", "accuracy_lenient": "accuracy, lenient reading"}
LABELS |= {"loss": "loss on held-out examples", "tokens": "tokens per answer"}
COURSE = "a course on reinforcement learning for language models"
READINGS = "The strict reading wants the answer in the form asked for; the lenient one takes any form."
SAMPLES, LONGEST = 4, 1500  # characters of a text that is shown
USAGE = """\
## Use

`{name}` is {where}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
{load}
tokenizer = AutoTokenizer.from_pretrained("{name}")
messages = {messages}
text = {text}
prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
ids = model.generate(**prompt, do_sample=False, max_new_tokens={tokens})[0]
print(tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def model_card(runs: list["Run"], name: str, terms: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> ModelCard:
    """The card of the first run's model, called `name`; other runs are other seeds of it. terms: of `license_of`."""
    run, adapter = runs[0], is_adapter(runs[0].checkpoint)
    hub_base = next(filter(is_on_hub, lineage(run.base)), None)
    measured = eval_results(run) if run.summary else []
    data = ModelCardData(
        model_name=name if measured else None,
        base_model=hub_base if hub_base == run.base or not adapter else None,  # an adapter fits its own base alone
        datasets=DATASETS.get(run.task),
        eval_results=measured or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rlcourse", "reinforcement-learning" if run.command == "train" else "sft", *["lora"] * adapter],
        **terms,
    )
    parts = [f"# {name.rpartition('/')[2]}", introduction(run, adapter)]
    parts += [results(runs)] if run.summary else []
    parts += [usage(run, name, adapter, tokenizer.chat_template or "")]
    parts += [samples(run.summary["after"]["samples"])] if run.summary and run.command == "train" else []
    parts += [repetition(run), license_words(terms)]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def introduction(run: "Run", adapter: bool) -> str:
    config, models = run.config, lineage(run.base)
    how = f"reinforcement learning (`{config.algorithm}`)" if run.command == "train" else "supervised fine-tuning"
    what = run.task if run.command == "train" else public(config.data)
    kind = f"a LoRA adapter of rank {config.lora_rank} for " if adapter else ""
    count = step_of(run.checkpoint)
    trained = f"after {count:,} step{'' if count == 1 else 's'} of {how} on `{what}`"
    parts = [f"This is {kind}{described(models[0])}, {trained} with rlcourse, {COURSE}."]
    for model, origin in pairwise(models):
        parts[0] += f" `{public(model)}` was itself trained from {described(origin)}."
    if adapter:
        parts += ["The adapter is in float32, and works with that base alone."]
    else:
        parts += [f"The weights are in {config.dtype}, in which the run sampled and was evaluated."]
    if run.summary is None:
        parts += [f"**The run stopped at {run.steps}, before its final evaluation.** This is its last checkpoint."]
    return "\n\n".join(parts)


def eval_results(run: "Run") -> list[EvalResult]:
    """What a finished run measured after training, for the card's metadata."""
    after, where = run.summary["after"], {"dataset_type": DATASETS.get(run.task, run.task), "dataset_name": run.task}
    names = [name for name in after if name in run.summary["metrics"] or name.startswith("pass@")]
    return [
        EvalResult("text-generation", metric_type=name, metric_value=after[name], dataset_split=split_of(run), **where)
        for name in names
        if after[name] is not None
    ]


def split_of(run: "Run") -> str:
    return "test" if run.command == "train" else "validation"


def problems_of(run: "Run") -> int | None:
    """How many problems a finished run answered; None if that isn't known."""
    if run.command == "train":
        return run.summary["after"]["problems"]
    with suppress(Exception):  # there is no task, or it can't be loaded here
        return min(run.config.eval_problems, len(load_task(run.task, run.config.data_dir).problems("validation")))
    return None


def results(runs: list["Run"]) -> str:
    """A table of what the first run measured, with standard errors; of several runs their mean and range, too."""
    run, seeds, n = runs[0], [r.config.seed for r in runs], problems_of(runs[0])
    before, after = run.summary["before"], run.summary["after"]
    pass_k = [name for name in after if name.startswith("pass@")]
    asked = dict.fromkeys(SHARES, n) | {name: min(run.config.pass_k_problems, n) for name in pass_k}
    forms = {"loss": ".3f"} | run.summary["metrics"] | dict.fromkeys(pass_k, ".1%") | {"tokens": ".1f"}
    rows = [[f"{n:,} {split_of(run)} problems" if n else "measure", "before", "after"], ["---", "--:", "--:"]]
    for name in (name for name in forms if name in after):
        numbers = [with_error(when[name], forms[name], asked.get(name)) for when in (before, after)]
        rows += [[LABELS.get(name, name.replace("_", " ")), *numbers]]
    notes = [READINGS] if "accuracy_lenient" in after else []
    if n and "accuracy" in after:
        notes += [f"Accuracy is that of greedy answers; ± is one standard error, √(p(1 − p)/n) with n = {n:,}."]
    if pass_k:
        few = asked[pass_k[0]]
        drawn = f"{run.config.pass_k} samples at temperature {run.config.temperature:g} for each of {few:,} problems"
        notes += [f"pass@k comes from {drawn}: there n = {few:,}, and ± is an upper bound."]
    if len(runs) > 1:
        rows[0] += [f"after, mean of seeds {', '.join(map(str, seeds))} (min–max)"]
        rows[1] += ["--:"]
        shown = [name for name in forms if name in after]
        for name, row in zip(shown, rows[2:], strict=True):
            row += [mean_and_range([r.summary["after"][name] for r in runs], forms[name])]
        notes += [f"The weights, like the columns before it, are those of seed {seeds[0]}."]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## Results\n\n{table}\n\n{' '.join(notes)}\n\n![Learning curve](curve.png)"


def with_error(value: float | None, form: str, problems: int | None) -> str:
    """A number; behind a share of `problems` its standard error in points, unless it's 0 as the formula has it."""
    text = in_format(value, form)
    bare = problems is None or value in (None, 0, 1)
    return text if bare else f"{text} ± {100 * math.sqrt(value * (1 - value) / problems):.1f}"


def mean_and_range(values: list[float | None], form: str) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return "–"
    mean, low, high = (in_format(value, form) for value in (sum(found) / len(found), min(found), max(found)))
    return f"{mean} ({low}–{high})"


def usage(run: "Run", name: str, adapter: bool, template: str) -> str:
    """Python that loads the model and answers one question, prompted as in the run."""
    instruction = INSTRUCTIONS.get(run.task)
    system = [{"role": "system", "content": instruction}] if instruction else []
    options = "".join(f", {key}={value!r}" for key, value in TEMPLATE.items() if key in template)
    load = f'\nmodel = AutoModelForCausalLM.from_pretrained("{name}")'
    if adapter:
        extra, base = "", repr(public(run.base))
        if run.base in EMBEDDED_MODELS:
            extra, base = "from rlcourse.paths import model_folder\n", f"model_folder({base})"
        load = (
            f"from peft import PeftModel\n{extra}\nbase = AutoModelForCausalLM.from_pretrained({base}, dtype='float32')"
        )
        load += f'\nmodel = PeftModel.from_pretrained(base, "{name}")'
    return USAGE.format(
        name=name,
        where="a repository on the hub" if "/" in name else "this folder's path",
        load=load,
        messages=json.dumps([*system, {"role": "user", "content": QUESTION}]),
        text="tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True" + options + ")"
        if template
        else 'messages[-1]["content"]',
        tokens=run.config.max_new_tokens,
    )


def samples(found: list[dict[str, Any]]) -> str:
    """The first answers of the test after training."""
    parts = ["## Samples", "The first test problems with the model's greedy answers:"]
    for number, sample in enumerate(found[:SAMPLES], start=1):
        gold = str(sample["gold"])
        wrong = f"wrong, {gold} is right" if len(gold) < 80 and gold.isprintable() else "wrong"
        parts += [f"**Question {number}**", fenced(sample["question"])]
        parts += [f"**Answer {number}: {'right' if sample['right'] else wrong}**", fenced(sample["text"])]
    return "\n\n".join(parts)


def fenced(text: str) -> str:
    """A text as a block of code, whatever is in it."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def repetition(run: "Run") -> str:
    """The command that repeats the run, the settings that aren't defaults, and the versions of the libraries."""
    changed = {f.name: value for f in fields(run.config) if (value := getattr(run.config, f.name)) != f.default}
    rows = [f"| {name} | `{public(value, name)}` |" for name, value in changed.items() if name not in PRIVATE]
    table = ["Settings that differ from the defaults:", "\n".join(["| setting | value |", "|---|---|", *rows])]
    versions = [f"{name} {version(name)}" for name in ("rlcourse", "torch", "transformers", "peft", "safetensors")]
    said = f"Published with Python {platform.python_version()}, {', '.join(versions)}."
    return "\n\n".join(["## How to repeat it", f"```bash\n{repeat_command(run)}\n```", *(table if rows else []), said])


def repeat_command(run: "Run") -> str:
    """The command line that gives the run's settings. Folders lose their path, addresses their host."""
    values, given, defaults = run.config.to_dict(), {}, type(run.config)()
    if run.command == "train":
        of_preset = PRESETS[values["preset"]].get("algorithm", defaults.algorithm)
        given = {"preset": values["preset"]} if values["preset"] != defaults.preset else {}
        given |= {"algorithm": values["algorithm"]} if values["algorithm"] != of_preset else {}
        defaults = make_config(**given)
    given |= {name: v for name, v in values.items() if v != getattr(defaults, name) and name not in PRIVATE}
    words = ["rlcourse", run.command]
    if values.get("shard") or values.get("overlap"):
        words = ["torchrun", "--nproc-per-node", "2" if values["overlap"] else "N", "-m", *words]
    for name, value in given.items():
        flag = name.replace("_", "-")
        switch = [f"--{flag}" if value else f"--no-{flag}"]
        words += switch if isinstance(value, bool) else [f"--{flag}", str(public(value, name))]
    return shlex.join(words)


def license_words(terms: dict[str, str]) -> str:
    if not terms:
        return (
            "## License\n\nThe license of the base applies to these weights, too. Which one that is, is unknown here."
        )
    return f"## License\n\nThe license of the base, `{terms.get('license_name', terms['license'])}`, applies here, too."
