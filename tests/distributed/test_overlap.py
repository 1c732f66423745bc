"""Runs whose ranks overlap against one process that samples with weights as old, on the tiny model of
tests/test_trainer.py: what they compute, how they end, and how they go on."""
# ruff: noqa: F811 (fixtures of test_trainer)

import copy
import os
import re
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from policies import BruteForce
from ranks import Ranks, wait_for
from test_trainer import TINY, TOY, assert_same_run, folder, lines, use_the_toy, weights  # noqa: F401
from thorough import thorough

from rlcourse import cli, trainer
from rlcourse.checkpoint import latest_checkpoint, load_state
from rlcourse.collect import staleness
from rlcourse.config import make_config
from rlcourse.learner import Learner
from rlcourse.policy import load_policy
from rlcourse.runs import read_lines
from rlcourse.step import train_step
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.trainer import train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are forks, which cannot use a GPU")

LATE = TINY | {"overlap": True, "sampler_correction": "token", "lr": 3e-3, "pass_k": 0, "steps": 6}
CASES = {
    "one update": {},
    "three updates, by sequence, sampled dynamically": {
        "algorithm": "dapo", "minibatches": 3, "sampler_correction": "sequence",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_the_toy(monkeypatch)


def options(settings: dict) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in named.items()]


def start(settings: dict, folder: str, tmp_path: Path, prepare=lambda rank: None, more=(), size=2) -> Ranks:
    """`rlcourse train` on two ranks. prepare: called on each before it begins."""
    arguments = ["train", *options(settings | {"model": folder, "output": str(tmp_path)}), *more]

    def work(rank: int) -> None:
        prepare(rank)
        sys.argv = ["rlcourse", *arguments]
        cli.app(arguments)

    return Ranks(size, work, tmp_path / "ranks")


def before_sampling(event):
    """For `prepare`: on the second rank `event(rollout)` is called as it begins with a rollout, numbered from 0; on the
    first `event(step)` as it begins with a step."""

    def prepare(rank: int) -> None:
        generate, step, begun = BruteForce.generate, trainer.train_step, []

        def generated(self, *arguments):
            begun.append(0)
            event(1, len(begun) - 1)
            return generate(self, *arguments)

        def stepped(*arguments):
            event(0, arguments[-1])
            return step(*arguments)

        if rank == 1:
            BruteForce.generate = generated
        else:
            trainer.train_step = stepped

    return prepare


class OneBehind:
    """In one process: each rollout is sampled with the weights, and the seed, of the call before it."""

    exact = False

    def __init__(self, policy):
        self.policy, self.before, self.version, self.versions = policy, None, 0, []

    def generate(self, *arguments):
        def now():
            return int(torch.randint(2**62, ())), self.version, copy.deepcopy(self.policy)

        seed, version, older = self.before or now()
        self.before = now()
        self.versions.append(version)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return BruteForce(older).generate(*arguments)


def in_turn(settings: dict, folder: str) -> tuple[list[dict], list[list[int]], dict]:
    """What `overlap` has to compute: metrics and versions of the weights of each step, and the weights in the end."""
    config = make_config(**settings | {"model": folder})
    torch.manual_seed(config.seed)
    policy = load_policy(folder, torch.device("cpu"))
    learner, engine = Learner(policy, config), OneBehind(policy)
    prompts, metrics, versions = PromptSampler(TOY.problems("train"), config.seed), [], []
    for step in range(config.steps):
        engine.version, engine.versions = step, []
        metrics.append(train_step(learner, engine, TOY, prompts, step)[0])
        del metrics[-1]["timing"]
        versions.append(engine.versions)
    return metrics, versions, policy.model.state_dict()


@pytest.fixture(scope="module")
def run_of(folder, tmp_path_factory):
    """Settings, the folder of an uninterrupted run, and all that it printed."""

    @cache
    def run(name: str) -> tuple[dict, Path, str]:
        settings, output = LATE | CASES[name], tmp_path_factory.mktemp("overlap")
        with pytest.MonkeyPatch.context() as patch:
            use_the_toy(patch)
            ranks = start(settings, folder, output).end()
        assert ranks.codes == [0, 0], ranks.printed
        return settings, output / "run", ranks.printed

    return run


@pytest.fixture(params=["one update", *map(thorough, list(CASES)[1:])])
def together(request, run_of) -> tuple[dict, Path, str]:
    return run_of(request.param)


@pytest.fixture
def whole(run_of) -> Path:
    return run_of("one update")[1]


def test_ranks_that_overlap_compute_what_one_process_does_with_weights_as_old(together, folder):
    settings, run, printed = together
    metrics, versions, expected = in_turn(settings, folder)
    found = lines(run)["metrics"]
    for line, of_step in zip(found, versions, strict=True):
        step = line["step"] - 1
        late = [step - version for version in of_step]
        assert min(late) <= line["staleness_mean"] <= line["staleness_max"] <= max(late)
        if len(of_step) == 1:
            assert line["staleness_mean"] == (step > 0) == late[0]
        del line["staleness_mean"], line["staleness_max"]
    assert found == metrics
    ours = weights(run)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    assert sum(line["grad_norm"] > 0 for line in found[1:]) >= 2
    learned = [line for line in found[1:] if line["sampler_ratio_max"] is not None]
    assert max(abs(line["sampler_ratio_max"] - 1) for line in learned) > 0.01  # else it shows nothing
    assert printed.count("6 steps in") == 1 and "Traceback" not in printed
    for line in read_lines(run / "metrics.jsonl"):
        timing = line["timing"]
        assert timing["sampling_s"] > 0 and timing["tokens_per_s"] > 0 and timing["rollout_s"] > 0
        rows = timing["tokens_per_s"] * timing["sampling_s"] / line["length"]
        assert rows == pytest.approx(6) or settings.get("algorithm") == "dapo"  # which draws again


def test_one_rank_samples_while_the_other_trains(folder, tmp_path):
    """Each waits for the other in the middle of what it does."""

    def both(rank: int) -> None:
        def meet():
            (tmp_path / f"{rank}").touch()
            wait_for((tmp_path / f"{1 - rank}").exists)

        generate, update, begun = BruteForce.generate, Learner.update, []

        def generated(self, *arguments):
            begun.append(0)
            if rank == 1 and len(begun) == 4:
                meet()
            return generate(self, *arguments)

        def updated(self, step):
            if step == 2:
                meet()
            return update(self, step)

        BruteForce.generate, Learner.update = generated, updated

    ranks = start(LATE | {"eval_every": 0}, folder, tmp_path, both).end()
    assert ranks.codes == [0, 0], ranks.printed


# How it ends


def assert_same_overlapped_run(run: Path, whole: Path) -> None:
    assert_same_run(run, whole)
    ours, theirs = (load_state(latest_checkpoint(path))["ahead"]["rollout"] for path in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("stopped", [thorough(0), 1])
def test_ctrl_c_saves_what_was_sampled_ahead_and_the_run_goes_on_with_it(stopped, whole, folder, tmp_path):
    def interrupt(rank, number):
        if (rank, number) == (stopped, 3):
            os.kill(os.getpid(), signal.SIGINT)

    ranks = start(LATE, folder, tmp_path, before_sampling(interrupt)).end()
    assert ranks.codes == [130, 130], ranks.printed
    [step] = re.findall(
        r"Stopped at step (\d)\. Go on with: torchrun --nproc-per-node 2 -m rlcourse train .*--resume\n", ranks.printed
    )
    assert step == "4"
    assert "Another" not in ranks.printed and "Traceback" not in ranks.printed
    assert latest_checkpoint(tmp_path / "run").name == f"step-00000{step}"
    ranks = start({"name": "run"}, folder, tmp_path, more=["--resume"]).end()
    assert ranks.codes == [0, 0], ranks.printed
    assert_same_overlapped_run(tmp_path / "run", whole)


@pytest.mark.parametrize("killed", [thorough(0), 1])
def test_a_rank_that_is_killed_ends_the_other_with_a_sentence_and_nothing_is_lost(killed, whole, folder, tmp_path):
    def kill(rank, number):
        if (rank, number) == (killed, 5):
            os.kill(os.getpid(), signal.SIGKILL)

    ranks = start(LATE, folder, tmp_path, before_sampling(kill)).end()
    assert ranks.codes == [1 if rank != killed else -signal.SIGKILL for rank in range(2)], ranks.printed
    assert ranks.printed.count("Another process of this run has ended") == 1 and "Traceback" not in ranks.printed
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"
    ranks = start({"name": "run"}, folder, tmp_path, more=["--resume"]).end()
    assert ranks.codes == [0, 0], ranks.printed
    assert_same_overlapped_run(tmp_path / "run", whole)


# What cannot work


def test_it_takes_two_processes_and_a_correction(folder, tmp_path):
    with pytest.raises(ValueError, match="older weights have sampled: add --sampler-correction token"):
        make_config(overlap=True)
    with pytest.raises(ValueError, match=r"^overlap takes two processes: start it with torchrun --nproc-per-node 2\.$"):
        train(make_config(**LATE | {"model": folder, "output": str(tmp_path)}))
    assert not (tmp_path / "run").exists()


def test_staleness_counts_the_tokens_of_completions_alone():
    from policies import rollout_of

    rollout = rollout_of([([1, 2], [5, 6, 7]), ([3], [8])])
    assert staleness(rollout, 4) == {}
    versions = torch.tensor([[1, 4, 3], [2, 0, 0]], device=rollout.ids.device)
    late = staleness(type(rollout)(**rollout.tensors, versions=versions), 4)
    assert late == {"staleness_mean": (3 + 0 + 1 + 2) / 4, "staleness_max": 3}
