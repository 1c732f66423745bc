"""What learns: its passes over a rollout, whose numbers test_step.py has by the papers, and its optimizer step."""

import math

import pytest
import torch
from policies import DEVICE, make_policy, rollout_of

from rlcourse import head
from rlcourse import train as training
from rlcourse.config import make_config
from rlcourse.learner import Learner

ROWS = [([5, 9, 40, 7], [12, 30, 31, 44, 9]), ([11], [1]), (list(range(30, 50)), [7, 8])]
ROWS += [([3, 4], [60, 61, 62, 63, 64, 65, 66]), ([90, 91, 92], [5])]
ROLLOUT = rollout_of(ROWS, finished=[True, True, True, False, True], pad=2)


def learner(algorithm="ppo", **settings) -> Learner:
    """With a value head at a random point, if it has one."""
    result = Learner(make_policy(), make_config(algorithm=algorithm, warmup_steps=0, **settings))
    if result.value_head is not None:
        torch.manual_seed(1)
        torch.nn.init.normal_(result.value_head.output.weight, std=0.5)
        torch.nn.init.normal_(result.value_head.output.bias)
    return result


def test_both_passes_take_logits_by_the_configs_chunk(monkeypatch):
    """What a chunk keeps out of memory: `test_logprobs.py`."""
    chunks, original = [], head.chunked_logprobs
    monkeypatch.setattr(head, "chunked_logprobs", lambda *a: chunks.append(a[4]) or original(*a))
    one = learner(kl_coef=0.1, logprob_chunk=3)
    one.logprobs_and_values(ROLLOUT), one.reference_logprobs(ROLLOUT)
    assert chunks == [3, 3]


def test_without_a_start_the_reference_is_the_policy_as_it_was():
    one = learner("grpo", kl_coef=0)
    before = one.logprobs_and_values(ROLLOUT)[0].detach()
    with torch.no_grad():
        one.policy.model.get_input_embeddings().weight.add_(torch.randn(32, device=DEVICE))
    found = one.reference_logprobs(ROLLOUT)
    torch.testing.assert_close(found, before)
    assert not found.requires_grad and not any(p.requires_grad for p in one.reference.parameters())


NEEDS = [({}, False, False), ({"algorithm": "ppo"}, False, True)]
NEEDS += [({"kl_coef": 0.1}, True, False), ({"kl_coef": 0}, True, False)]


@pytest.mark.parametrize(("settings", "reference", "head"), NEEDS)
def test_only_what_the_algorithm_needs_is_made(settings, reference, head):
    one = Learner(make_policy(), make_config(**settings))
    assert (one.reference is not None, one.value_head is not None) == (reference, head)
    assert one.value_head is None or one.values(ROLLOUT).eq(0).all()  # a new head starts at zero
    parameters = sum(len(group["params"]) for group in one.optimizer.param_groups)
    assert parameters == len(list(one.policy.model.parameters())) + 4 * head


def test_bfloat16_rounds_every_pass_a_little():
    """By autocast: weights stay float32."""
    exact, rounded = (learner(dtype=dtype, kl_coef=0.1, device="auto") for dtype in ("float32", "bfloat16"))
    found = [
        (one.logprobs_and_values(ROLLOUT)[0], one.values(ROLLOUT), one.reference_logprobs(ROLLOUT))
        for one in (exact, rounded)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert 1e-4 < (ours - theirs).abs().max().item() < 0.5
    assert {p.dtype for p in rounded.policy.model.parameters()} == {torch.float32}


def test_compile_is_for_the_passes_that_train_alone(monkeypatch):
    sevens = lambda hidden, head, targets, _: torch.full(targets.shape, 7.0, device=DEVICE)  # noqa: E731
    monkeypatch.setattr(head, "_compiled", lambda: sevens)
    one = learner("grpo", kl_coef=0.1, compile=True)
    mask = ROLLOUT.completion_mask
    assert one.reference_logprobs(ROLLOUT)[mask].ne(7).all() and one.logprobs_and_values(ROLLOUT)[0][mask].eq(7).all()


def set_gradients(one: Learner, seed: int) -> list[torch.Tensor]:
    """Random gradients of every parameter; returns them in float64, in the order of `parameters`."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters(one):
        p.grad = torch.randn(p.shape, generator=generator).to(p)
    return [p.grad.double() for p in parameters(one)]


def parameters(one: Learner) -> list[torch.nn.Parameter]:
    return [*one.policy.model.parameters(), *(one.value_head.parameters() if one.value_head else [])]


def test_the_value_head_learns_at_a_rate_of_its_own():
    """That an update is AdamW's, its gradients clipped together: sft/test_fine_tuning.py."""
    one = learner("ppo", lr=2e-3, steps=8, schedule="linear")
    gradients = set_gradients(one, 0)
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    assert training.update(one.optimizer, one.config, 2) == pytest.approx(norm, rel=1e-5)  # before it was clipped
    policy, head = one.optimizer.param_groups
    assert (policy["lr"], head["lr"]) == pytest.approx((2e-3 * 0.75, 1e-3 * 0.75))
    assert {id(p) for p in head["params"]} == {id(p) for p in one.value_head.parameters()}
    assert all(p.grad is None for p in parameters(one)) and {p.dtype for p in parameters(one)} == {torch.float32}


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    one = learner()
    set_gradients(one, 0)
    training.update(one.optimizer, one.config, 0)  # so that there are moments that could move the weights
    before = [p.detach().clone() for p in parameters(one)]
    set_gradients(one, 1)
    parameters(one)[-1].grad.view(-1)[0] = float("nan")
    with pytest.raises(RuntimeError, match=r"^The gradient is not finite, so the weights were left alone: try a lower"):
        training.update(one.optimizer, one.config, 1)
    assert all(torch.equal(p, b) for p, b in zip(parameters(one), before, strict=True))
    assert all(p.grad is None for p in parameters(one))  # nothing for a caller to add to who goes on


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule, expected):
    config = make_config(steps=10, warmup_steps=4, schedule=schedule)
    assert [training.lr_factor(step, config) for step in range(10)] == pytest.approx(expected)
