"""A token's log-prob and its gradient against float64, autograd and finite differences."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, launch, run, slopes, spread

from rlcourse.course.kernels.token_logprob import TokenLogprob, token_logprob, token_logprob_reference
from rlcourse.course.kernels.token_logprob_backward import (
    TokenLogprobBackward,
    token_logprob_backward,
    token_logprob_backward_reference,
)


def case(rows, vocabulary, dtype=torch.bfloat16):
    """Logits whose rows lie apart, with nan between them, targets that include the last token, and gradients."""
    torch.manual_seed(rows * vocabulary)
    logits = spread((4 * torch.randn(rows, vocabulary)).to(dtype), -(-vocabulary // 8) * 8 + 8)
    target = torch.randint(vocabulary, (rows,))
    target[-1] = vocabulary - 1
    return logits, target, torch.randn(rows)


def both(logits, target, grad, **order):
    """Log-prob, log of the sum and gradient by the kernels."""
    dtype = str(logits.dtype).removeprefix("torch.")
    logprob, log_sum = torch.full((len(target),), torch.nan), torch.full((len(target),), torch.nan)
    launch(TokenLogprob(dtype), logits, target, logprob, log_sum, **order)
    step = logits.stride(0)
    changed = spread(logits, step)
    launch(TokenLogprobBackward(dtype), changed, target, log_sum, grad, **order)
    between = changed.as_strided((len(logits), step - logits.shape[1]), (step, 1), logits.shape[1])
    assert between.isnan().all(), "it wrote between the rows"
    return logprob, log_sum, changed


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype", "order"),
    [
        (1, 1, torch.bfloat16, "lockstep"),
        (3, 8, torch.float16, "warp"),
        (2, 2049, torch.bfloat16, "random"),
        (2, 4103, torch.float16, "lockstep"),
    ],
)
def test_logprobs_and_gradients_are_those_of_float64(rows, vocabulary, dtype, order):
    logits, target, grad = case(rows, vocabulary, dtype)
    logprob, log_sum, found = both(logits, target, grad, order=order)
    expected, expected_sum = token_logprob_reference(logits, target)
    torch.testing.assert_close(expected.double(), -F.cross_entropy(logits.double(), target, reduction="none"))
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_sum, expected_sum, rtol=1e-5, atol=1e-5)
    right = token_logprob_backward_reference(logits, target, grad)
    # Near the target grad * (1 - p) may be a small difference, and a float16 below 6e-5 has few bits.
    torch.testing.assert_close(found, right, rtol=2**-7, atol=2e-6)


def test_the_gradient_is_that_of_finite_differences():
    logits, target, grad = case(1, 11)
    log_sum = run(token_logprob, logits, target)[1]
    found = logits.clone()
    run(lambda *t: (token_logprob_backward(*t), t[0])[1], found, target, log_sum, grad)
    expected = slopes(lambda x: ((x[:, target[0]] - x.exp().sum(-1).log()) * grad.double()).sum(), logits, 1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-6)


def test_rows_that_do_not_count_and_targets_that_are_not_there():
    logits, target, grad = case(4, 24)
    target[1], target[2], grad[2] = -100, 24, 0.0
    logprob, _, found = both(logits, target, grad)
    assert logprob[1] == 0 and not found[1].any() and logprob[2].isnan()
    expected, _ = token_logprob_reference(logits, target)
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    right = token_logprob_backward_reference(logits, target.clamp(max=23), grad)
    torch.testing.assert_close(found, right, rtol=2**-7, atol=2e-6)


def test_logits_far_away_and_tokens_that_cannot_come():
    logits, target, grad = case(3, 600)
    logits[0] += 3e4  # where a sum of powers without the largest taken off would be infinite
    logits[1] -= 3e4
    logits[2, 7:] = -torch.inf  # whole threads without a token that can come
    target[2] = 3
    logprob, _, found = both(logits, target, grad)
    torch.testing.assert_close(logprob, token_logprob_reference(logits, target)[0], rtol=1e-5, atol=5e-3)
    assert_close(found[2], token_logprob_backward_reference(logits, target, grad)[2])
    assert not found[2, 7:].any() and found.isfinite().all()
