"""Ranks that have a part of the model each, against one process: a step, what a rank holds, engines, a run that goes on
with other numbers of ranks, sharded or not."""
# ruff: noqa: F811 (fixtures of other tests)

import os
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from policies import make_policy, rollout_of, rows_of
from ranks import KeyedByPrompt, on_ranks
from test_ranks_train import PAIRS, THREE, assert_nearly_same_run, start, use_keyed_samples, whole_run_of
from test_world import CASES, CPU, alone, assert_same_step, step_of  # noqa: F401
from thorough import thorough
from toy import assert_same_run, folder  # noqa: F401

from rlcourse import train as trainer
from rlcourse.batch import Rollout
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.config import make_config
from rlcourse.dist import full_tensor, is_sharded, local_tensor
from rlcourse.distributed import start_world
from rlcourse.distributed.sharded import ShardedPass, ShardedWorld
from rlcourse.learner import Learner
from rlcourse.logprobs import PlainPass
from rlcourse.lora import copy_merged
from rlcourse.policy import empty_copy
from rlcourse.rollout import make_engine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.train import resume, train, update
from rlcourse.trial import checkpoint_activations

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are forks, which cannot use a GPU")
SHARDED = make_config(shard=True, num_prompts=3, max_new_tokens=6, warmup_steps=0)


class KeyedCopy(KeyedByPrompt):
    """`KeyedByPrompt` on a copy of its own, as a sharded policy needs."""

    def __init__(self, policy):
        self.source = policy.model
        super().__init__(replace(policy, model=empty_copy(policy.model, torch.float32, CPU)))

    def generate(self, *arguments):
        with torch.no_grad():
            copy_merged(list(self.policy.model.parameters()), list(self.source.parameters()), self.source)
        return super().generate(*arguments)


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_keyed_samples(monkeypatch)
    monkeypatch.setattr(
        trainer, "make_engine", lambda policy, *_: (KeyedCopy if is_sharded(policy.model) else KeyedByPrompt)(policy)
    )


@contextmanager
def sharded_world(config=SHARDED):
    with start_world() as world:
        world = ShardedWorld(world.rank, world.size)
        world.setup(CPU, config)
        yield world


# A step

SHARDED_CASES = ("a row at a time", "fewer rows than ranks", "values, whitened over the batch")
SHARDED_CASES += ("a reference, and two epochs in other orders",)


def every_step(rank: int) -> dict[str, dict]:
    with start_world() as world:
        return {name: step_of(name, world, shard=True) for name in SHARDED_CASES}


@pytest.fixture(scope="module", params=[2, thorough(3)])
def sharded(request, tmp_path_factory) -> list[dict[str, dict]]:
    return on_ranks(request.param, every_step, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("name", SHARDED_CASES)
def test_the_step_of_sharded_ranks_is_that_of_one_process(name, alone, sharded):
    assert_same_step(name, alone[name], sharded)
    near = 2.1 * CASES[name].lr * len(alone[name]["gradients"])
    for of_rank in sharded:
        for ours, theirs in zip(of_rank[name]["weights"], alone[name]["weights"], strict=True):
            assert ours.shape == theirs.shape and (ours - theirs).abs().max() < near


# What a rank holds


def _whole(model: torch.nn.Module) -> list[str]:
    """The weights that all ranks have put together and not dropped again."""
    return [name for name, p in model.named_parameters() if not hasattr(p, "to_local")]


def held(rank: int) -> dict:
    """Bytes of weights, gradients and moments on this rank in a step."""
    config = replace(SHARDED, algorithm="ppo", advantage="gae")
    with sharded_world(config) as world:
        learner = Learner(world.load(lambda _: make_policy(), CPU), config, None, world)
        rollout = rollout_of([([5, 6], [7, 8, 9]), ([4], [3])])
        parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            learner.logprobs_and_values(rollout)
        unsharded = _whole(learner.policy.model)
        logprobs, values = learner.logprobs_and_values(rollout)
        (logprobs.sum() + values.sum()).backward()
        gradients = sum(local_tensor(p.grad).nbytes for p in parameters)
        update(learner.optimizer, config, 0)
        moments = [m for of_one in learner.optimizer.state.values() for m in of_one.values() if m.dim()]
        return {
            "weights": sum(local_tensor(p).nbytes for p in parameters),
            "gradients": gradients,
            "moments": sum(local_tensor(m).nbytes for m in moments),
            "dtypes": {t.dtype for t in (*parameters, *moments)},
            "whole": unsharded + _whole(learner.policy.model),
        }


def test_a_rank_holds_its_part_of_weights_gradients_and_moments(tmp_path):
    size, learner = 3, Learner(make_policy(), replace(SHARDED, shard=False, advantage="gae"))
    parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
    total, rows = sum(p.nbytes for p in parameters), sum(p[0].nbytes for p in parameters)
    ranks = on_ranks(size, held, tmp_path)
    for name, times in (("weights", 1), ("gradients", 1), ("moments", 2)):
        assert sum(rank[name] for rank in ranks) == times * total
        assert max(rank[name] for rank in ranks) <= times * (total / size + rows)  # one row more of each, at most
    assert max(rank["weights"] for rank in ranks) < 1.1 * total / size
    assert all(rank["dtypes"] == {torch.float32} and rank["whole"] == [] for rank in ranks)


# Precision and recomputed activations

SAMPLING = Sampling(temperature=0.7)


def rows_of_two() -> Rollout:
    return rollout_of([([5, 6], [7, 8, 9, 20, 31]), ([4], [3, 50, 60]), ([9, 8], [1])])


def passed(one_pass: PlainPass, rollout: Rollout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs, and the gradient of their sum by every weight."""
    logprobs, hidden = one_pass.token_logprobs(rollout, SAMPLING, 2)
    assert hidden.dtype == torch.float32  # the residual stream
    logprobs.sum().backward()
    return logprobs.detach(), [full_tensor(p.grad) for p in one_pass.model.parameters()]


def sharded_passes(rank: int) -> dict[str, tuple]:
    found, own = {}, rows_of_two()[[[0, 2], [1]][rank]]
    with start_world() as alone:
        for name in ("recomputed", "bfloat16"):
            config = replace(SHARDED, dtype="bfloat16" if name == "bfloat16" else "float32", device="cpu")
            world = ShardedWorld(alone.rank, alone.size)
            world.setup(CPU, config)
            model = world.load(lambda _: make_policy(), CPU).model
            if name == "recomputed":
                checkpoint_activations(model)
            found[name] = passed(ShardedPass(model, config.dtype), own)
            assert {p.dtype for p in model.parameters()} == {torch.float32}
    return found


def test_passes_and_gradients_are_those_of_the_whole_model(tmp_path):
    logprobs, gradients = passed(PlainPass(make_policy().model, "float32"), rows_of_two())
    rounded_logprobs, rounded = passed(PlainPass(make_policy().model, "bfloat16"), rows_of_two())
    ranks = on_ranks(2, sharded_passes, tmp_path)
    found = {name: torch.zeros_like(logprobs) for name in ranks[0]}
    for name, by_row in found.items():
        by_row[[0, 2]], by_row[1, :3] = ranks[0][name][0], ranks[1][name][0][0]
    torch.testing.assert_close(found["recomputed"], logprobs, atol=1e-5, rtol=0)
    for of_rank in ranks:
        for ours, theirs in zip(of_rank["recomputed"][1], gradients, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 * max(g.abs().max() for g in gradients), rtol=0)

    def error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
        return sum((a - b).square().sum() for a, b in zip(ours, theirs, strict=True)).sqrt().item()

    # As far from float32 as under autocast, and not more.
    assert 0 < error([found["bfloat16"]], [logprobs]) < 2 * error([rounded_logprobs], [logprobs])
    for of_rank in ranks:
        assert {g.dtype for g in of_rank["bfloat16"][1]} == {torch.float32}
        assert 0 < error(of_rank["bfloat16"][1], gradients) < 2 * error(rounded, gradients)


# Engines

PROMPTS = [[5, 6, 7], [9, 8]]
ENGINES = {  # and a model for each
    "hf-dynamic": {},
    "hf-static": {"architecture": "qwen3", "tied": False},
    "fast": {"architecture": "llama", "tied": False},
}


def answers_of(policy, name: str, engine_of=lambda engine: engine) -> list:
    engine = engine_of(make_engine(policy, name, torch.float32))
    with torch.no_grad():
        before = engine.generate(PROMPTS, 2, 5, GREEDY)
        for p in policy.model.parameters():
            local_tensor(p).mul_(1.2)  # an update
        return [rows_of(rollout) for rollout in (before, engine.generate(PROMPTS, 2, 5, GREEDY))]


def sharded_answers(rank: int) -> dict[str, list]:
    with sharded_world() as world:
        return {
            name: answers_of(
                world.load(lambda _, kind=kind: make_policy(**kind), CPU), name, lambda one: world.shared(one)[0]
            )
            for name, kind in ENGINES.items()
        }


def test_engines_sample_from_the_weights_of_all_ranks_as_they_are_now(tmp_path):
    ranks = on_ranks(3, sharded_answers, tmp_path)  # one of them without a prompt
    for name, kind in ENGINES.items():
        expected = answers_of(make_policy(**kind), name)
        assert expected[0] != expected[1]
        for of_rank in ranks:
            for ours, theirs in zip(of_rank[name], expected, strict=True):
                for (*mine, logprobs, _), (*other, their_logprobs, _) in zip(ours, theirs, strict=True):
                    assert mine == other and logprobs == pytest.approx(their_logprobs, abs=1e-5)


# Whole runs


def die_in_a_pass(rank: int, step: int) -> None:
    """The others then wait for it in the middle of a pass."""
    if (rank, step) == (1, 4):
        Learner.logprobs_and_values = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def interrupt(rank: int, step: int) -> None:
    if (rank, step) == (1, 3):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.thorough
def test_a_run_goes_on_whole_and_sharded_by_turns(folder, tmp_path, tmp_path_factory):
    expected, run = whole_run_of(THREE, folder, tmp_path_factory), tmp_path / "run"
    shutil.copytree(whole_run_of(THREE | {"steps": 2}, folder, tmp_path_factory), run)
    ranks = start(3, {"name": "run", "steps": 5}, folder, tmp_path, die_in_a_pass, ["--resume", "--shard"]).end()
    assert ranks.codes == [1, -signal.SIGKILL, 1], ranks.printed
    assert ranks.printed.count("Another process of this run has ended") == 1 and "Traceback" not in ranks.printed
    assert latest_checkpoint(run).name == "step-000003"
    ranks = start(2, {"name": "run"}, folder, tmp_path, interrupt, ["--resume", "--shard"]).end()
    assert ranks.codes == [130, 130], ranks.printed
    assert latest_checkpoint(run).name == "step-000004"
    resume(name="run", output=str(tmp_path), shard=False)
    assert_nearly_same_run(run, expected)
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in expected.iterdir())


# What cannot be


def test_one_process_has_nothing_to_shard(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    refused = r"^--shard splits the model between processes: start them with `torchrun .*, or add --no-shard\.$"
    with pytest.raises(ValueError, match=refused):
        train(make_config(**PAIRS, model=folder, output=str(tmp_path), shard=True))
    with pytest.raises(ValueError, match=r"^--shard splits weights that learn"):
        make_config(shard=True, lora_rank=2)
