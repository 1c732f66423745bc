"""The gap that a benchmark puts back: who compares with whom, and that float16's gradients are the same ones."""

import pytest
import torch
from policies import make_policy, rollout_of

from rlcourse.bench import gap
from rlcourse.config import make_config
from rlcourse.logprobs import PlainPass
from rlcourse.runs import new_run
from rlcourse.sampling import Sampling
from rlcourse.step import old_logprobs
from rlcourse.trainer import Trainer

ROWS = [([5, 6, 7], [8, 9]), ([5], [4, 3, 2])]  # prompt, completion


@pytest.fixture
def trainer(tmp_path):
    """One that is taken for exact, as on a GPU where it is."""
    config = make_config(output=str(tmp_path), num_prompts=2, num_generations=2, max_new_tokens=4)
    trainer = Trainer(new_run(config), torch.device("cpu"))
    trainer.engine.exact, trainer.learner.policy_pass.exact = True, True
    return trainer


@pytest.mark.parametrize(("way", "own"), [(gap.ONE, False), (gap.OWN, True), (gap.TWO, False)])
def test_the_ratio_is_against_the_sampler_or_the_trainer_itself(trainer, way, own):
    before = trainer.learner.policy_pass
    gap.put_back(trainer, way)
    assert (trainer.learner.policy_pass is before) == (way == gap.ONE)
    rollout = rollout_of(ROWS)
    batch = type("Batch", (), {"rollout": rollout, "__getitem__": lambda self, rows: self})()
    plan = [type("M", (), {"micro_batches": [torch.arange(len(rollout.ids))]})] * 2
    old = old_logprobs(trainer.learner, trainer.engine, batch, plan)
    assert (old is not rollout.logprobs) == own


def test_scaled_gradients_are_those_that_are_not(monkeypatch):
    """In float32, where a power of two changes no bit; that the layers see them scaled is what a hook in them says."""
    monkeypatch.setattr(torch, "float16", torch.bfloat16)  # CPUs: autocast in what they have
    seen, found = {}, {}
    for way in ("bfloat16", "float16"):
        policy = make_policy()
        policy_pass = PlainPass(policy.model, way) if way == "bfloat16" else gap.ApartPass(policy.model, way, True)
        policy.model.model.norm.register_full_backward_hook(lambda *a, way=way: seen.update({way: a[2][0].double()}))
        logprobs, _ = policy_pass.token_logprobs(rollout_of(ROWS), Sampling(), 16)
        logprobs.sum().backward()
        found[way] = [p.grad for p in policy.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
    assert torch.equal(seen["float16"], seen["bfloat16"] * gap.LOSS_SCALE)
