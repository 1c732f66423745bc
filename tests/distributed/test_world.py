"""A step of several ranks against that of one process, whose gradients tests/papers.py has by the papers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from papers import REWARDS, Run, config_for
from policies import FixedEngine
from ranks import near, on_ranks
from thorough import thorough

from rlcourse.batch import concatenate
from rlcourse.dist import ALONE, full_tensor
from rlcourse.distributed import start_world
from rlcourse.distributed.sharded import ShardedWorld
from rlcourse.distributed.world import RankLost, lost_ranks
from rlcourse.tasks import Attempt, MathTask, Problem

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are forks, which cannot use a GPU")
CPU = torch.device("cpu")

# Rows are of 1 to 7 tokens; the third group's rewards are all equal, and with three ranks that is one rank's group.
CASES = {
    "a row at a time": config_for("dr_grpo", micro_batch_tokens=1),
    "fewer rows than ranks": config_for("grpo", minibatches=6, leave_out="truncated"),
    "values, whitened over the batch": config_for(
        "ppo", inner_epochs=2, minibatches=2, micro_batch_tokens=25, kl_coef=0.1
    ),
    "tokens that train": config_for("dapo", micro_batch_tokens=60, sampler_correction="token"),
    "dynamic sampling": config_for("dapo", leave_out="both"),
    "a reference, and two epochs in other orders": config_for(
        "gspo", inner_epochs=2, kl_coef=0.1, micro_batch_tokens=40
    ),
    "nothing to learn": config_for("dr_grpo", reward_parser="lenient"),
}


class OneNumber(FixedEngine):
    """Takes what `SharedEngine` takes of the global random state."""

    def generate(self, *arguments):
        torch.randint(2**62, ())
        return super().generate(*arguments)


def step_of(name: str, world, shard: bool = False) -> dict:
    """All that can be seen of the step: gradients of each optimizer step, metrics, rewards, weights."""
    config, engine_class = replace(CASES[name], shard=shard), OneNumber if world is ALONE else FixedEngine
    if shard:
        world = ShardedWorld(world.rank, world.size)
        world.setup(CPU, config)
    rewards = [1.0] * len(REWARDS) if name == "nothing to learn" else REWARDS
    run = Run(config, 0.1, rewards, engine_class=engine_class, world=world)
    del run.metrics["timing"]
    return {
        "gradients": [gradient for _, gradient in run.steps],
        "metrics": run.metrics,
        "rewards": run.completions.rewards,
        "weights": [full_tensor(p.detach()) for p in run.learner.parameters],
        "state": torch.get_rng_state(),
    }


def every_step(rank: int) -> dict[str, dict]:
    with start_world() as world:
        assert world.rank == rank
        return {name: step_of(name, world) for name in CASES}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    return {name: step_of(name, ALONE) for name in CASES}


@pytest.fixture(scope="module", params=[2, thorough(3)])
def together(request, tmp_path_factory) -> list[dict[str, dict]]:
    return on_ranks(request.param, every_step, tmp_path_factory.mktemp("steps"))


def assert_same_step(name: str, expected: dict, together: list[dict[str, dict]]) -> None:
    assert len(expected["gradients"]) == CASES[name].inner_epochs * CASES[name].minibatches
    learned = [g for of_step in expected["gradients"] for g in of_step.values() if g.any()]
    assert bool(learned) == (name != "nothing to learn")
    for of_rank in together:
        found = of_rank[name]
        assert torch.equal(found["rewards"], expected["rewards"])
        assert torch.equal(found["state"], expected["state"])
        assert found["metrics"] == near(expected["metrics"], rel=2e-4, abs=1e-6)
        for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
            scale = max((g.abs().max().item() for g in theirs.values()), default=0.0)
            assert ours.keys() == theirs.keys()
            for parameter, gradient in theirs.items():
                torch.testing.assert_close(ours[parameter], gradient, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_step_of_several_ranks_is_that_of_one_process_and_all_have_the_same_bits(name, alone, together):
    assert_same_step(name, alone[name], together)
    first, *others = (of_rank[name] for of_rank in together)
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert all(map(torch.equal, other["weights"], first["weights"]))


# Who does what


class Groups(MathTask):
    """Its verdict is how many attempts at the problem it was shown."""

    def judge(self, attempts, training):
        assert attempts
        return [sum(other.problem.gold == a.problem.gold for other in attempts) for a in attempts]


def shared_work(rank: int) -> dict:
    with start_world() as world:
        engine = FixedEngine({(7,): [([50, 1], [-1.0, -2.0], True)]})
        engine, task = world.shared(engine, Groups("groups", "", [], [], []))
        attempts = [Attempt(p, "", 1, True) for p in [Problem(str(n), "", str(n)) for n in range(4)] for _ in range(3)]
        with pytest.raises(ValueError, match=r"^only the first$"):
            world.open_run(lambda: int(1 / rank) if rank else (_ for _ in ()).throw(ValueError("only the first")))
        return {
            "name": task.name,
            "verdicts": [task.judge(attempts, True), task.judge(attempts[:1], True)],
            "one": engine.generate([[7]], 1, 2, None).ids,
        }


def test_a_group_is_judged_together_and_a_rank_may_have_nothing_to_do(tmp_path):
    for found in on_ranks(3, shared_work, tmp_path):
        assert found["name"] == "groups" and found["verdicts"] == [[3] * 12, [1]]
        assert found["one"].tolist() == [[7, 50, 1]]


def sampled(rank: int) -> list[list[int]]:
    class Dice:
        exact = False

        def generate(self, prompts, *_):
            rows = {tuple(p): [(torch.randint(50, 200, (6,)).tolist(), [0.0] * 6, True)] for p in prompts}
            return FixedEngine(rows).generate(prompts, 1, 6, None)

    with start_world() as world:
        torch.manual_seed(0)
        (engine,) = world.shared(Dice())
        return [concatenate([engine.generate([[7], [8]], 1, 6, None)]).completion_ids.tolist() for _ in range(2)]


def test_ranks_draw_other_numbers_than_each_other_and_than_before(tmp_path):
    first, second = on_ranks(2, sampled, tmp_path)
    assert first == second
    assert len({tuple(row) for rollout in first for row in rollout}) == 4


# Ranks that come apart


def weights_that_differ(rank: int) -> str:
    with start_world() as world:
        weight = torch.nn.Parameter(torch.ones(3))
        policy = SimpleNamespace(model=torch.nn.ParameterList([weight]))
        assert world.gather_state(policy, {"step": 1}) == (policy, {"step": 1})
        weight.data[1] += rank * 1e-6
        with pytest.raises(RuntimeError) as caught:
            world.gather_state(policy, {})
        return str(caught.value)


def test_weights_that_differ_are_noticed(tmp_path):
    assert "differ from rank to rank" in on_ranks(2, weights_that_differ, tmp_path)[1]


def test_a_rank_that_is_lost_is_noticed_whatever_the_wire_says():
    with pytest.raises(RankLost, match="go on from the last one with --resume"), lost_ranks():
        raise RuntimeError("a message that no release before had")
