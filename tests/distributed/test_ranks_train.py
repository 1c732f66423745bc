"""Runs of several ranks against runs of one process, on the tiny model of tests/toy.py: what they leave
behind, how they end, and how they go on with another number of ranks."""
# ruff: noqa: F811 (fixtures of toy.py)

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import KeyedByPrompt, Ranks, near, wait_for
from thorough import thorough
from toy import TINY, assert_same_run, folder, lines, options, use_the_toy, weights  # noqa: F401

from rlcourse import cli
from rlcourse import train as trainer
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.config import make_config
from rlcourse.runs import read_lines
from rlcourse.train import resume, train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are forks, which cannot use a GPU")

# Two rows in each optimizer step, each a micro-batch of its own: two ranks add up what one process does, and a + b is
# b + a to the last bit.
PAIRS = TINY | {"minibatches": 3, "micro_batch_tokens": 1, "pass_k": 0, "steps": 5}
THREE = TINY | {"num_prompts": 4, "algorithm": "ppo", "kl_coef": 0.1, "steps": 5}


def use_keyed_samples(patch) -> None:
    use_the_toy(patch)
    patch.setattr(trainer, "make_engine", lambda policy, *_: KeyedByPrompt(policy))


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_keyed_samples(monkeypatch)


def whole_run_of(settings: dict, folder: str, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        use_keyed_samples(patch)
        train(make_config(**settings | {"model": folder, "output": str(output)}))
    return output / "run"


@pytest.fixture(scope="module")
def pairs(folder, tmp_path_factory) -> Path:
    """An uninterrupted run of one process."""
    return whole_run_of(PAIRS, folder, tmp_path_factory)


def start(
    size: int, settings: dict, folder: str, tmp_path: Path, before_step=lambda rank, step: None, more=()
) -> Ranks:
    """`rlcourse train` on so many ranks. before_step: called at the beginning of a training step, numbered from 0."""
    settings = settings | {"model": folder, "output": str(tmp_path)}
    arguments = ["train", *options(settings), *more]

    def work(rank: int) -> None:
        step = trainer.train_step

        def stepped(*arguments):
            before_step(rank, arguments[-1])
            return step(*arguments)

        trainer.train_step, sys.argv = stepped, ["rlcourse", *arguments]
        cli.app(arguments)

    return Ranks(size, work, tmp_path / "ranks")


def assert_nearly_same_run(run: Path, whole: Path) -> None:
    """All that was logged and the weights, within rounding."""
    ours, theirs = lines(run), lines(whole)
    assert ours["samples"] == theirs["samples"]
    for name in ("metrics", "evals"):
        assert len(ours[name]) == len(theirs[name])
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert mine == near(other, rel=1e-3, abs=1e-5)
    ours, theirs = weights(run), weights(whole)
    for name, value in theirs.items():
        if not name.endswith("k_proj.bias"):  # the model does not depend on it: its gradient is rounding alone
            torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=0, msg=name)


# A whole run


def test_two_ranks_train_what_one_process_does_to_the_last_bit(pairs, folder, tmp_path):
    ranks = start(2, PAIRS, folder, tmp_path).end()
    assert ranks.codes == [0, 0], ranks.printed
    assert ranks.printed.count("5 steps in") == 1 and "Traceback" not in ranks.printed
    found, expected = (json.loads((path / "summary.json").read_text()) for path in (tmp_path / "run", pairs))
    assert found["steps"] == 5 and found["before"] == expected["before"] and found["after"] == expected["after"]
    ours, theirs = lines(tmp_path / "run"), lines(pairs)
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine == near(other, rel=1e-12)  # means of float64 parts
        assert mine["grad_norm"] == other["grad_norm"] and mine["reward"] == other["reward"]
    shutil.copy(pairs / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
    assert_same_run(tmp_path / "run", pairs)
    assert sum(line["grad_norm"] > 0 for line in theirs["metrics"]) >= 3  # there was something to learn


# How it ends


@pytest.mark.parametrize("stopped", [[1], thorough([0, 1])])
def test_ctrl_c_saves_after_the_step_of_all_ranks_and_one_process_goes_on(stopped, pairs, folder, tmp_path):
    def interrupt(rank, step):
        if step == 3 and rank in stopped:
            os.kill(os.getpid(), signal.SIGINT)

    ranks = start(2, PAIRS, folder, tmp_path, interrupt).end()
    assert ranks.codes == [130, 130], ranks.printed
    again = r"Stopped at step 4\. Go on with: torchrun --nproc-per-node 2 -m rlcourse train .*--resume\n"
    assert len(re.findall(again, ranks.printed)) == 1
    assert "Another" not in ranks.printed and "Traceback" not in ranks.printed
    assert latest_checkpoint(tmp_path / "run").name == "step-000004"
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 4
    resume(name="run", output=str(tmp_path))
    shutil.copy(pairs / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
    assert_same_run(tmp_path / "run", pairs)


@pytest.mark.parametrize("killed", [thorough(0), 1])
def test_a_rank_that_is_killed_ends_the_others_with_a_sentence_and_nothing_is_lost(killed, pairs, folder, tmp_path):
    def kill(rank, step):
        if (rank, step) == (killed, 4):
            os.kill(os.getpid(), signal.SIGKILL)

    ranks = start(2, PAIRS, folder, tmp_path, kill).end()
    assert ranks.codes == [1 if rank != killed else -signal.SIGKILL for rank in range(2)], ranks.printed
    assert ranks.printed.count("Another process of this run has ended") == 1 and "Traceback" not in ranks.printed
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"
    ranks = start(2, {"name": "run"}, folder, tmp_path, more=["--resume"]).end()
    assert ranks.codes == [0, 0], ranks.printed
    shutil.copy(pairs / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
    assert_same_run(tmp_path / "run", pairs)


def test_a_rank_that_fails_says_why_and_the_others_say_nothing(folder, tmp_path):
    def fail(rank, step):
        if (rank, step) == (1, 3):
            raise OSError("The scales are broken.")

    ranks = start(2, PAIRS, folder, tmp_path, fail).end()
    assert ranks.codes == [1, 1], ranks.printed
    assert ranks.printed.count("The scales are broken.") == 1
    assert "Another" not in ranks.printed and "Traceback" not in ranks.printed
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"


def test_what_cannot_work_is_said_once(folder, tmp_path):
    ranks = start(3, PAIRS, folder, tmp_path).end()
    assert ranks.codes == [2, 2, 2]
    assert ranks.printed.count("num_prompts 2 are fewer than 3 processes: raise it.") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_torchrun_trains_the_embedded_model_and_ctrl_c_saves_it(tmp_path):
    settings = TINY | {"steps": 200, "num_generations": 4, "max_new_tokens": 20, "save_every": 0, "eval_every": 0}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "rlcourse", "train", *options(settings), f"--output={tmp_path}"]
    run = tmp_path / "run"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: process.poll() is not None or len(read_lines(run / "metrics.jsonl")) >= 2)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    [step] = re.findall(r"Stopped at step (\d+)\. Go on with: torchrun --nproc-per-node 2", said)
    assert latest_checkpoint(run).name == f"step-{int(step):06d}", errors
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, int(step) + 1))
