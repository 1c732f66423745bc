"""The losses against float64 loops over their definitions, in value and in gradient with respect to the log-probs."""

import itertools

import pytest
import torch

from rlcourse import losses

NAN = float("nan")
LENGTHS = [7, 1, 3, 0, 2, 6]  # full, one token, empty, padded
ROWS, T = len(LENGTHS), 7
MASK = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
EVERY = torch.tensor(True)


def batch(noise=0.3, seed=1):
    """logprobs, old_logprobs, ref_logprobs, values, old_values [rows, length] float64, with nan where masked."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(ROWS, T, generator=generator, dtype=torch.float64) for _ in range(5)]
    logprobs = -1 - normal[0].abs()
    tensors = logprobs, logprobs + noise * normal[1], logprobs + 0.4 * normal[2], normal[3], normal[3] + 0.3 * normal[4]
    return [x.masked_fill(~MASK, NAN) for x in tensors]


def test_the_sequence_ratio_keeps_the_advantages_of_tokens_apart():
    """GSPO-token, equation 14: only the token with an advantage is moved."""
    logprobs, old, *_ = batch(0.01)
    logprobs.requires_grad_()
    advantages = torch.zeros(ROWS, T, dtype=torch.float64)
    advantages[0, 2] = 1.0
    switches = {"surrogate": "clip", "ratio": "sequence", "clip_low": 0.2, "clip_high": 0.2}
    losses.token_loss(logprobs, old, advantages, MASK, **switches)[0].sum().backward()
    assert logprobs.grad.nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("surrogate", "advantages", "expected"),
    [
        ("clip", 1.0, [False, False, False, True, True]),
        ("clip", -1.0, [True, False, False, False, False]),
        ("clip", 0.0, [False] * 5),  # there is no gradient that the clip could take away
        ("cispo", 1.0, [False, False, False, True, True]),
        ("cispo", 0.0, [False, False, False, True, True]),  # the weight is capped whatever it weighs
    ],
)
def test_a_token_is_clipped_beyond_the_bound_and_not_on_it(surrogate, advantages, expected):
    ratios = torch.tensor([[0.25, 0.5, 1.0, 1.75, 4.0]], dtype=torch.float64)
    switches = {"surrogate": surrogate, "ratio": "token", "clip_low": 0.5, "clip_high": 0.5}
    everywhere, zero = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.float64)
    _, clipped = losses.token_loss(ratios.log(), zero, torch.tensor([advantages]), everywhere, **switches)
    assert clipped.tolist() == [expected]
    nothing = switches | {"clip_low": 0.0, "clip_high": 0.0}
    assert not losses.token_loss(zero, zero, torch.tensor([advantages]), everywhere, **nothing)[1].any()


SWITCHES = itertools.product(("reinforce", "clip", "cispo"), ("token", "sequence"))
MASKED = {  # of logprobs, old_logprobs, constants, values and old_values: the loss of each token, and which are clipped
    f"{surrogate}, {ratio}": lambda x, s=surrogate, r=ratio: losses.token_loss(
        *x[:3], MASK, surrogate=s, ratio=r, clip_low=0.2, clip_high=0.2
    )
    for surrogate, ratio in SWITCHES
}
MASKED["values"] = lambda x: (losses.value_loss(x[3], x[4], x[2], MASK, 0.2), MASK & False)
MASKED["kl"] = lambda x: (losses.kl_estimate(x[0], x[2], MASK), MASK & False)


@pytest.mark.parametrize("garbage", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("what", MASKED)
def test_masked_tokens_get_no_loss_and_no_gradient(what, garbage):
    results = []
    for fill in (0.0, garbage):
        tensors = [x.masked_fill(~MASK, fill) for x in batch()]
        learned = tensors[3 if what == "values" else 0].requires_grad_()
        loss, clipped = MASKED[what](tensors)
        loss.sum().backward()
        assert loss[~MASK].eq(0).all() and not clipped[~MASK].any() and learned.grad[~MASK].eq(0).all()
        assert learned.grad[MASK].ne(0).any()
        results.append((loss, learned.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
def test_aggregate_ignores_what_is_masked_and_survives_an_empty_batch(how):
    x = torch.ones(ROWS, T).masked_fill(~MASK, NAN).requires_grad_()
    kwargs = {"rows": ROWS, "tokens": int(MASK.sum()), "max_new_tokens": 10}
    total = losses.aggregate(x, MASK, how, **kwargs)
    total.backward()
    # 5 of 6 rows have tokens; 19 tokens; 6 x 10 would fit
    assert total.item() == pytest.approx({"sequence_mean": 5 / 6, "token_mean": 1.0, "constant": 19 / 60}[how])
    assert x.grad[~MASK].eq(0).all() and x.grad[MASK].gt(0).all()
    assert losses.aggregate(x, torch.zeros_like(MASK), how, rows=ROWS, tokens=0, max_new_tokens=10).item() == 0


def test_k3_of_a_policy_close_to_its_reference_does_not_round_away():
    """exp(-d) - 1 + d is exact to a float of 1, and all of k3 is about as large at d = 0.001."""
    d = torch.tensor([1e-3, -1e-3, 3e-3])
    found = losses.kl_estimate(d, torch.zeros(3), EVERY)
    torch.testing.assert_close(found.double(), (-d.double()).exp() - 1 + d.double(), rtol=1e-3, atol=0)
