"""Who computes with the training pass of `rlcourse.exact`, and who does not: learner, training step and engine."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import make_policy, rollout_of
from small import small_policy

from rlcourse import learner as module
from rlcourse import logprobs
from rlcourse.config import make_config
from rlcourse.dist import ALONE
from rlcourse.exact import model as exact_model
from rlcourse.exact import weights
from rlcourse.exact.model import ExactPass
from rlcourse.exact.weights import fused_weights, is_exact
from rlcourse.learner import Learner, compute_old_logprobs
from rlcourse.logprobs import token_logprobs
from rlcourse.rollout import gpu_engine, make_engine, triton_step
from rlcourse.rollout.gpu_engine import GPUEngine
from rlcourse.sampling import Sampling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Passes are in float32, in the interpreter")
ROLLOUT = rollout_of([([5, 9, 40], [12, 30]), ([11], [1]), ([7, 8], [60, 61, 62])], pad=2)
PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32]]


@pytest.fixture
def exact(monkeypatch) -> list:
    """Everything is exact, in float32; the list has (model, dtype, recompute) of each pass that is made."""
    made = []

    class InFloat32(ExactPass):
        def __init__(self, model, dtype, recompute):
            made.append((model, dtype, recompute))
            super().__init__(model, torch.float32, recompute)

    monkeypatch.setattr(exact_model, "ExactPass", InFloat32)
    monkeypatch.setattr(exact_model, "WIDTH", 2)
    monkeypatch.setattr(module, "may_be_exact", lambda device: True)
    for place in (module, gpu_engine):
        monkeypatch.setattr(place, "is_exact", lambda weights: True)
    return made


def config_for(dtype="bfloat16", **settings):
    """The config's device, which no learner looks at, allows bfloat16."""
    device = "cuda" if dtype == "bfloat16" else "cpu"
    return make_config(algorithm="ppo", dtype=dtype, device=device, kl_coef=0.1, temperature=0.7, **settings)


def learners_of(*configs) -> list[Learner]:
    """Learners of the same policy, reference and value head."""
    learners = [Learner(small_policy("qwen2"), config, small_policy("qwen2", seed=5).model) for config in configs]
    torch.manual_seed(1)
    for parameter in learners[0].value_head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for other in learners[1:]:
        other.value_head.load_state_dict(learners[0].value_head.state_dict())
    return learners


def test_nothing_is_exact_on_a_cpu():
    policy = small_policy("qwen2")
    learner = Learner(policy, config_for())
    assert not learner.exact and not learner.reference_pass.exact
    assert policy.model not in weights._MADE  # nor takes memory
    assert not is_exact(fused_weights(policy.model, torch.bfloat16))
    assert not make_engine(policy, "fast", torch.float32).exact


def test_in_float32_and_for_other_models_nothing_is_exact(exact):
    assert not Learner(small_policy("qwen2"), config_for("float32")).exact
    assert not Learner(make_policy(use_sliding_window=True), config_for()).exact
    assert not exact


def test_a_learner_computes_everything_by_the_exact_pass(exact, monkeypatch):
    sizes = {"micro_batch_tokens": 10, "logprob_chunk": 4}
    one, plain = learners_of(config_for(gradient_checkpointing=True, **sizes), config_for("float32", **sizes))
    expected = [*plain.logprobs_and_values(ROLLOUT), plain.values(ROLLOUT), plain.reference_logprobs(ROLLOUT)]
    assert exact == [(m, torch.bfloat16, True) for m in (one.policy.model, one.reference)]
    monkeypatch.delattr(logprobs, "token_logprobs")
    monkeypatch.delattr(logprobs, "hidden_states")
    found = [*one.logprobs_and_values(ROLLOUT), one.values(ROLLOUT), one.reference_logprobs(ROLLOUT)]
    mask = ROLLOUT.completion_mask
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[mask], y[mask], atol=5e-5, rtol=0)
    assert all(x[~mask].eq(0).all() for x in (found[0], found[2], found[3]))
    assert found[0].requires_grad and found[1].requires_grad and not found[2].requires_grad
    assert not torch.allclose(found[0], found[3], atol=0.1)  # the reference is another model


@pytest.mark.parametrize(("engine", "learner"), [(True, True), (True, False), (False, True)])
def test_the_old_policy_is_the_samplers_where_both_are_exact(engine, learner):
    rollout = copy.copy(ROLLOUT)
    own = torch.full_like(rollout.logprobs, -2.0)
    one = SimpleNamespace(
        exact=learner,
        config=SimpleNamespace(minibatches=1),
        world=ALONE,
        logprobs_and_values=lambda part: (own[: len(part.finished), : part.logprobs.shape[1]], None),
    )
    minibatches = [SimpleNamespace(micro_batches=[torch.tensor([0, 1]), torch.tensor([2])])] * 2
    arguments = one, SimpleNamespace(exact=engine), SimpleNamespace(rollout=rollout)
    found = compute_old_logprobs(*arguments, minibatches)
    assert found is rollout.logprobs if engine and learner else found.eq(-2).sum() == 2 * 2 + 3
    assert compute_old_logprobs(*arguments, minibatches[:1]) is None


@pytest.mark.parametrize("sampling", [Sampling(0.6), Sampling(0.8, top_k=7, top_p=0.8)])
def test_first_tokens_and_their_logprobs_come_from_the_exact_head(sampling, exact, monkeypatch):
    monkeypatch.setattr(gpu_engine, "PREFILL_TOKENS", 8)  # two prompts
    monkeypatch.setattr(triton_step, "SAMPLED_AT_ONCE", 2)
    policy = small_policy("qwen3", intermediate_size=256)
    torch.manual_seed(0)
    engine = GPUEngine(policy, torch.float32)
    found = engine.generate(PROMPTS, 3, 1, sampling)
    expected, _ = token_logprobs(policy.model, found, sampling, 100)
    assert engine.exact
    torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)
