"""The recorded runs of lesson 14, three seeds each: the kernel model trained by an honest judge; by one with a hole; by
the honest one again, from where the hole has led; by times measured on a GPU; from other starts, made with other random
numbers; from one that earns nothing; and in five other ways: `python -m tools.lessons.lesson14`.

Takes names of `RUNS`, or does them all. Writes the record `lesson14_<name>` of each. The runs themselves stay in
runs/lesson14: the one that closes a hole begins with the model that the open one has left there, and trains that first
if it has to. A run that is there is not trained again.
"""

import random
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rlcourse import checkpoint
from rlcourse.checkpoint import latest_checkpoint, step_of
from rlcourse.config import TrainConfig, make_config
from rlcourse.course.lessons.recorded import RETAUGHT_STEPS
from rlcourse.evaluation import answer_problems, evaluate, load_all, summarize
from rlcourse.files import read_json, read_lines
from rlcourse.policy import load_policy
from rlcourse.publish import save_model
from rlcourse.sampling import GREEDY
from rlcourse.tasks import load_task
from rlcourse.tasks.kernels.clock import fits_one_launch
from rlcourse.tasks.kernels.task import KernelProblem, KernelTask, load
from rlcourse.train import train
from tools.embedded import save_halved
from tools.embedded.computations import computations
from tools.embedded.kernels import Habits, Recipe, Stage, run_stage, sft
from tools.lessons.kernel_rewards import PartialTask, RootTask
from tools.lessons.recording import record_seeds

SEEDS = (0, 1, 2)
FOLDER = Path("runs/lesson14")
COMMON = {"eval_every": 20, "eval_validation": 264, "pass_k": 0, "save_every": 0}
BLOCK = 5  # steps of which the curves hold the mean
SHOWN = 4  # steps at the end whose samples are kept
HELD_OUT, REFUSED = 200, 0.6  # see `held_out`
SAMPLES = 4  # answers sampled to each held-out problem
FEWER, SLIGHTLY_FEWER = 0.4, 0.57  # shares of training problems in which one launch is refused
TASK, HERE = "rlcourse.tasks.kernels.task:", "tools.lessons.lesson14:"
CARELESS = "the kernel model after 40 supervised steps on demonstrations in which 3% of the lines are left out"
FRAGMENTS = "the kernel model after 60 supervised steps on demonstrations in which 90% of the lines are left out"
RETAUGHT = FRAGMENTS + f", and {RETAUGHT_STEPS} on eager programs"
ANOTHER = "the recipe of the kernel model with the seed 2 and the run's added"
SPOIL = Stage(60, 5e-4, 5, Habits(skip=0.9, unchecked=1.0))
MODELS: dict[str, tuple[str, tuple[Stage, ...]]] = {  # the folder of each, and what it learns after the kernel model
    # Of 3200 programs that the model that ships samples, 2 leave a line out and gain by stale memory: with 128 samples
    # a step it learns other tricks first. Of this one's, 66 do.
    CARELESS: ("careless", (Stage(40, 5e-4, 5, Habits(skip=0.03, unchecked=1.0)),)),
    FRAGMENTS: ("fragments", (SPOIL,)),
    RETAUGHT: ("retaught", (SPOIL, Stage(RETAUGHT_STEPS, 5e-4, 5, None))),
}
SHORTEST = 3  # lines of the problems that the runs from FRAGMENTS train on

# What differs from COMMON, which itself differs from the preset `kernels`.
RUNS: dict[str, dict[str, Any]] = {
    "honest": {},
    "starts": {"model": ANOTHER},
    "stale_open": {"task": TASK + "stale", "steps": 40, "model": CARELESS},
    "stale_closed": {"steps": 40},
    "stale_careful": {"task": TASK + "stale", "steps": 60},  # from the model that ships, as honest and side_open do
    "side_open": {"task": TASK + "side", "steps": 80},
    "side_closed": {"steps": 60},
    "plateau_sparse": {"task": HERE + "sparse", "steps": 80, "model": FRAGMENTS},
    "plateau_dense": {"task": HERE + "dense", "steps": 80, "model": FRAGMENTS},
    "plateau_sft": {"task": HERE + "sparse", "steps": 80, "model": RETAUGHT},
    # What was tried, for more right programs and a larger share of the optimum.
    "tried_centered": {"advantage": "group_centered"},
    "tried_fewer": {"task": HERE + "fewer_refused"},
    "tried_longer": {"steps": 480, "eval_every": 60},
    "tried_root": {"task": HERE + "by_root"},
    "tried_averaged": {
        "task": HERE + "slightly_fewer_refused",
        "steps": 480,
        "eval_every": 60,
        "save_every": 20,
    },
    "measured": {
        "task": "tools.measured:load",
        "steps": 120,
        "eval_every": 60,
        "eval_validation": 100,
    },
}
BEGINS_AFTER = {"stale_closed": "stale_open", "side_closed": "side_open"}
AVERAGED = ("tried_averaged",)  # what counts as their model after training is `averaged`

CURVES = (
    "reward",
    "compiled",
    "correct",
    "speedup",
    "share_of_optimum",
    "launches",
    "refused_correct",
    "counted_correct",  # this and the next two: with a hole alone
    "counted_speedup",
    "hacked",
    "measured_speedup",  # where programs are timed on a GPU
    "stated",  # with partial credit
    "entropy",
)
TIMED = ("measured_fast_1.5", "measured_fast_2")
MEASURED = (*CURVES[1:-1], "optimal", "fast_1", "fast_1.5", "fast_2", "refused_fast_1", *TIMED)
OF_LONG = ("long_correct", "long_fast_1", "long_share_of_optimum")


def record(name: str) -> None:
    """Train the run called `name` with each seed and write its record."""
    settings = COMMON | RUNS[name]
    shared = {"preset": "kernels"} | settings | {"block": BLOCK, "held_out": HELD_OUT, "held_out_refused": REFUSED}
    if name in BEGINS_AFTER:
        shared["model"] = f"what the run {BEGINS_AFTER[name]} of the same seed has left"
    if name in AVERAGED:
        shared["after"] = "the mean weights of the checkpoints from half of the steps on"
    record_seeds(f"lesson14_{name}", [name], shared, SEEDS, lambda seed: one_run(name, seed))


def one_run(name: str, seed: int, **overrides: Any) -> dict[str, Any]:
    """What one seed leaves behind.

    curves: `steps` and, for each name in `CURVES` that the run has, the mean of the `BLOCK` steps that end there, over
    sampled answers to problems of training. evals: greedy answers to the validation problems. test: greedy answers to
    the test problems, before and after. held_out: greedy and sampled answers to `held_out`, before and after; of a run
    that closes a hole they also say what a judge that still had it would count; of one paid by measured times they are
    counted, which the thousands of programs would take long to be otherwise. Of a run in `AVERAGED`, after is the
    averaged model in both, and last the last checkpoint. samples: answers of the last steps. seconds,
    peak_memory_bytes: of the training.
    """
    config = run_config(name, seed, **overrides)
    run = trained(config)
    summary, lines = read_json(run / "summary.json", "delete the folder"), read_lines(run / "metrics.jsonl")
    models = {"before": config.model, "after": str(latest_checkpoint(run))}
    tests = {when: summary[when] for when in models}
    if name in AVERAGED:
        models |= {"last": models["after"], "after": str(averaged(run, config.steps // 2))}
        tests |= {"last": tests["after"], "after": evaluate(replace(config, model=models["after"]))}
    task = "kernels" if name == "measured" else RUNS[BEGINS_AFTER.get(name, name)].get("task", "kernels")
    return {
        "curves": block_means(lines),
        "evals": [{"step": line["step"]} | only(line, MEASURED) for line in read_lines(run / "evals.jsonl")],
        "test": {when: only(metrics, (*MEASURED, *OF_LONG)) for when, metrics in tests.items()},
        "held_out": {when: on_held_out(model, task) for when, model in models.items()},
        "samples": [s for s in read_lines(run / "samples.jsonl") if s["step"] > config.steps - SHOWN],
        "seconds": summary["wall_seconds"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
    }


def run_config(name: str, seed: int, **overrides: Any) -> TrainConfig:
    """The config of a run; where it begins with what another run leaves, that has been trained."""
    settings = COMMON | RUNS[name] | overrides
    if name in BEGINS_AFTER:
        settings["model"] = str(latest_checkpoint(trained(run_config(BEGINS_AFTER[name], seed, **overrides))))
    elif settings.get("model") == ANOTHER:
        settings["model"] = str(made_start(2 + seed))
    elif settings.get("model") in MODELS:
        settings["model"] = str(made_model(settings["model"]))
    return make_config("kernels", **settings, seed=seed, output=str(FOLDER), name=f"{name}-{seed}")


def made_model(description: str) -> Path:
    """The folder of one of `MODELS`, which is made unless it is there."""
    name, stages = MODELS[description]
    folder = FOLDER / name
    if not folder.exists():
        policy, rng = load_policy("embedded-kernels"), random.Random(14)
        problems = [problem.computation for problem in load_task("kernels").problems("train")]
        for stage in stages:
            run_stage(policy, stage, problems, 32, rng)
        save_halved(policy, folder)
    return folder


def made_start(seed: int) -> Path:
    """The folder of a kernel model that the recipe makes with this seed, which is made unless it is there. The model
    that ships has seed 1."""
    folder = FOLDER / f"start-{seed}"
    if not folder.exists():
        save_halved(sft(replace(Recipe(), seed=seed)), folder)
    return folder


def sparse(data_dir: str | None = None) -> KernelTask:
    """The task without the short problems of training."""
    return without_short(load(data_dir))


def dense(data_dir: str | None = None) -> KernelTask:
    """The same with partial credit."""
    return PartialTask(**vars(without_short(load(data_dir))))


def without_short(task: KernelTask) -> KernelTask:
    """The task with only those of its training problems that have `SHORTEST` lines or more."""
    return replace(task, train=[problem for problem in task.train if (problem.level or 0) >= SHORTEST])


def fewer_refused(data_dir: str | None = None) -> KernelTask:
    """The task with one launch refused in a share of `FEWER` of its training problems."""
    return with_refused(load(data_dir), FEWER)


def slightly_fewer_refused(data_dir: str | None = None) -> KernelTask:
    """The task with one launch refused in a share of `SLIGHTLY_FEWER` of its training problems."""
    return with_refused(load(data_dir), SLIGHTLY_FEWER)


def with_refused(task: KernelTask, share: float) -> KernelTask:
    """The task with so few of its training problems that one launch is refused in this share of them, which is smaller
    than it was."""
    fits = [problem for problem in task.train if fits_one_launch(problem.computation)]
    refused = [problem for problem in task.train if not fits_one_launch(problem.computation)]
    return replace(task, train=fits + refused[: round(len(fits) * share / (1 - share))])


def by_root(data_dir: str | None = None) -> KernelTask:
    """The task as a `RootTask`."""
    return RootTask(**vars(load(data_dir)))


def trained(config: TrainConfig) -> Path:
    """The folder of the config's run, which is trained unless it has been. Raises ValueError for one that was trained
    with other settings."""
    run = Path(config.output) / config.run_name
    if not (run / "summary.json").exists():
        with mock.patch.object(checkpoint, "KEPT", config.steps):  # `averaged` needs them
            train(config)
    if read_json(run / "config.json", "delete the folder") != config.to_dict():
        raise ValueError(f"{run} was trained with other settings: delete it.")
    return run


def averaged(run: Path, since: int) -> Path:
    """The folder of the model whose weights are the means of those of the run's checkpoints from the step `since` on,
    which is made unless it is there."""
    folder = run / "averaged"
    if not folder.exists():
        checkpoints = [path for path in (run / "checkpoints").glob("step-??????") if step_of(path) >= since]
        policy, *others = [load_policy(str(path)) for path in sorted(checkpoints)]
        with torch.no_grad():
            for mean, *rest in zip(*(p.model.parameters() for p in (policy, *others)), strict=True):
                mean.copy_(torch.stack([mean, *rest]).mean(0))
        save_model(policy, folder)
    return folder


def block_means(lines: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """The curves; None where no answer of a block has the metric."""
    blocks = [lines[i : i + BLOCK] for i in range(0, len(lines), BLOCK)]
    curves: dict[str, list[float | None]] = {"steps": [block[-1]["step"] for block in blocks]}
    for name in CURVES:
        if name in lines[0]:
            values = [[line[name] for line in block if line[name] is not None] for block in blocks]
            curves[name] = [sum(v) / len(v) if v else None for v in values]
    return curves


def only(metrics: dict[str, Any], names: tuple[str, ...]) -> dict[str, float | None]:
    """Those of the metrics that are called so."""
    return {name: metrics[name] for name in names if name in metrics}


@lru_cache
def held_out() -> list[KernelProblem]:
    """Problems that nothing was trained on, drawn as those of training: in so many, one launch is refused."""
    return [KernelProblem(c) for c in computations(HELD_OUT, "test", 14, (2, 5), REFUSED)]


def on_held_out(model: str, task_name: str) -> dict[str, dict[str, float | None]]:
    """What a model's greedy and sampled answers to `held_out` say, by a task."""
    config = make_config("kernels", model=model, task=task_name)
    policy, engine, task = load_all(config)
    found = {}
    for decoding, sampling, count in (("greedy", GREEDY, 1), ("sampled", config.sampling, SAMPLES)):
        answers = answer_problems(policy, engine, task, held_out(), config.max_new_tokens, sampling, count)
        found[decoding] = only(summarize(answers), MEASURED)
    return found


if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        record(name)
