"""A tiny run with a brute-force engine, for the tests of what a run does: its task, its settings, what it left, and
processes that are killed, which are forks of this one: they need no second to start."""

import os
from pathlib import Path

import pytest
import torch
from policies import BruteForce, make_policy
from ranks import fork  # noqa: F401
from transformers import AutoModelForCausalLM

from rlcourse import train as trainer
from rlcourse.checkpoint import latest_checkpoint, load_state
from rlcourse.config import make_config
from rlcourse.runs import RunFolder, read_lines
from rlcourse.tasks import MathTask, Problem
from rlcourse.tasks.verify import verify

TINY = {"num_prompts": 2, "num_generations": 3, "max_new_tokens": 4, "steps": 7, "lr": 1e-3, "warmup_steps": 2}
TINY |= {"save_every": 3, "eval_every": 2, "eval_validation": 2, "eval_problems": 3, "pass_k": 2}
TINY |= {"name": "run", "device": "cpu"}  # what a resumed run repeats to the last digit


class Toy(MathTask):
    """Right is a text whose characters add up to an even number; some of its prompts are long."""

    def verify(self, text, gold):
        return verify(f"#### {sum(map(ord, text)) % 2}", gold)


def problems(start: int, count: int) -> list[Problem]:
    return [Problem(f"{'Tom has ' * (n % 3)}{n}", "", "0", n % 2) for n in range(start, start + count)]


TOY = Toy("toy", "", problems(0, 9), problems(20, 4), problems(30, 5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model of which every third token ends a completion."""
    path, policy = tmp_path_factory.mktemp("toy"), make_policy()
    policy.model.generation_config.eos_token_id = list(range(0, 300, 3))
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return str(path)


def use_the_toy(patch) -> None:
    patch.setattr(trainer, "task_of", lambda config: TOY)
    patch.setattr(trainer, "make_engine", lambda policy, *_: BruteForce(policy))
    patch.setattr("rlcourse.chat.is_special", lambda *_: True)  # the ends of `folder` are ordinary text
    without_picture(patch)


def without_picture(patch) -> None:
    """A picture takes longer than such a run: tests/test_publish.py draws them."""
    patch.setattr(
        "rlcourse.measure.plots.plot_run", lambda metrics, evals, path, *_: path.write_text(str(len(metrics)))
    )


@pytest.fixture
def tiny(folder, tmp_path):
    """Settings of a tiny run in a folder of its own."""
    return TINY | {"model": folder, "output": str(tmp_path)}


@pytest.fixture(scope="module")
def whole_run(folder, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        use_the_toy(patch)
        trainer.train(make_config(**TINY | {"model": folder, "output": str(output)}))
    return output / "run"


def lines(run: Path) -> dict[str, list[dict]]:
    """All that a run has logged but its times."""
    logged = {name: read_lines(run / f"{name}.jsonl") for name in ("metrics", "evals", "samples")}
    for line in logged["metrics"]:
        del line["timing"]
    for line in logged["evals"]:
        line.pop("seconds", None)
    return logged


def weights(run: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(latest_checkpoint(run), dtype=torch.float32).state_dict()


def assert_same_run(run: Path, whole: Path) -> None:
    """All that was logged, the weights and the state of training, to the last bit."""
    assert lines(run) == lines(whole)
    ours, theirs = weights(run), weights(whole)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    ours, theirs = load_state(latest_checkpoint(run)), load_state(latest_checkpoint(whole))
    assert ours["sampled"] == theirs["sampled"] and ours["before"] == theirs["before"]
    assert torch.equal(ours["random"]["cpu"], theirs["random"]["cpu"])


def options(settings: dict) -> list[str]:
    """Settings as the command line has them."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def end_of(pid: int) -> int:
    """The exit code, or the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_step(step: int, event):
    """A `log_step` after whose line of `step` something happens."""
    original = RunFolder.log_step

    def log_step(self, metrics, completions):
        original(self, metrics, completions)
        if metrics["step"] == step:
            event()

    return log_step


class PowerCut(BaseException):
    pass


def power_cut():
    raise PowerCut
