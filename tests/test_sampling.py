"""The sampling distribution, against sets built by hand."""

import math

import pytest
import torch

from rlcourse.sampling import Sampling, sample_tokens, sampling_logits

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -3.0]])


@pytest.mark.parametrize(
    ("top_p", "count"), [(0.3, 1), (0.63, 1), (0.65, 2), (0.87, 2), (0.9, 3), (0.999, 5), (1.0, 5)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, count):
    probabilities = [math.exp(x) for x in LOGITS[0].tolist()]
    masses = [sum(probabilities[: i + 1]) / sum(probabilities) for i in range(5)]
    assert next(i + 1 for i, mass in enumerate(masses) if mass >= top_p - 1e-9) == count  # the table above is right
    assert int(sampling_logits(LOGITS, Sampling(top_p=top_p)).isfinite().sum()) == count


def test_a_token_that_was_sampled_stays_in_the_set():
    kept = sampling_logits(LOGITS, Sampling(top_k=1), keep=torch.tensor([4])).isfinite()
    assert kept.tolist() == [[True, False, False, False, True]]


def test_sample_tokens_returns_the_logprob_of_its_token_under_the_restricted_distribution():
    torch.manual_seed(0)
    tokens, logprobs = sample_tokens(LOGITS.expand(500, 5), Sampling(top_k=2))
    assert set(tokens.tolist()) == {0, 1}
    expected = torch.tensor([2.0, 1.0]).log_softmax(-1)[tokens]
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)
