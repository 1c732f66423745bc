"""The training pass in float32 against transformers and autograd, in Triton's interpreter; on a GPU see test_bits.py.
All its loops run: several chunks, tiles of the vocabulary and of SwiGLU's columns, tokens for each program, and a depth
of two or three shares."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import rollout_of
from small import small_policy
from thorough import thorough

from rlcourse.exact import head, layers
from rlcourse.exact import model as module
from rlcourse.exact.model import ExactPass
from rlcourse.logprobs import hidden_states, token_logprobs
from rlcourse.lora import add_adapter, base_parameters
from rlcourse.sampling import Sampling

PLAIN, WARM, TOP_K, TOP_P = Sampling(), Sampling(0.7), Sampling(top_k=5), Sampling(0.8, top_p=0.7)
CHUNK = 5  # of eleven tokens


def rollout_for(policy):
    """A prompt of one token, a completion of one, two of one prompt, and the id of the padding in either and as
    padding."""
    pad = policy.pad_id
    rows = [([5, pad, 40, 7], [11, pad, 13, 2]), ([11], [30, 31, 11, 60]), ([30, 31, 32, 33, 34, 35, 36, 37], [9])]
    return rollout_of([*rows, ([5, pad, 40, 7], [60, 11])], pad=pad)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "WIDTH", 2)
    monkeypatch.setattr(layers, "PROGRAMS", 2)
    monkeypatch.setattr(layers, "COLUMNS", 128)
    monkeypatch.setattr(head, "VOCABULARY_TILE", 128)


def gradients(policy, found, mask) -> dict[str, torch.Tensor]:
    """Of every parameter, of the same random sum of log-probs and hidden states."""
    logprobs, hidden = (x[mask] for x in found)
    policy.model.zero_grad()
    generator = torch.Generator().manual_seed(0)
    weights, others = (torch.randn(x.shape, generator=generator).to(x.device) for x in (logprobs, hidden))
    ((logprobs * weights).sum() + 0.1 * (hidden * others).sum()).backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.requires_grad}


CASES = [("qwen2", WARM), ("qwen3", PLAIN), ("llama", TOP_P), *map(thorough, [("qwen3", TOP_K), ("tied llama", WARM)])]


@pytest.mark.parametrize(("shape", "sampling"), CASES)
def test_logprobs_and_gradients_are_those_of_transformers(shape, sampling):
    policy = small_policy(shape)
    rollout = rollout_for(policy)
    expected = token_logprobs(policy.model, rollout, sampling, CHUNK)
    found = ExactPass(policy.model, torch.float32).token_logprobs(rollout, sampling, CHUNK)
    mask = rollout.completion_mask
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[mask], other[mask], atol=5e-5, rtol=0)
    assert found[0][~mask].eq(0).all()
    expected, found = gradients(policy, expected, mask), gradients(policy, found, mask)
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_an_adapter_learns_as_with_transformers_and_alone():
    policy = small_policy("qwen2")
    add_adapter(policy.model, "base", 3, 6.0, "all-linear")
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    rollout, mask = rollout_for(policy), rollout_for(policy).completion_mask
    expected = token_logprobs(policy.model, rollout, WARM, CHUNK)
    found = ExactPass(policy.model, torch.float32).token_logprobs(rollout, WARM, CHUNK)
    torch.testing.assert_close(found[0][mask], expected[0][mask], atol=5e-5, rtol=0)
    expected, found = gradients(policy, expected, mask), gradients(policy, found, mask)
    assert len(found) == 2 * 7
    for name, gradient in expected.items():
        assert gradient.norm() > 0 and (found[name] - gradient).norm() < 1e-4 * gradient.norm(), name
    assert all(p.grad is None for p in base_parameters(policy.model))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU only products of 16-bit numbers have one order")
def test_what_is_computed_again_has_the_same_bits():
    policy = small_policy("qwen2")
    rollout = rollout_for(policy)[torch.tensor([1])]
    kept, again = (
        ExactPass(policy.model, torch.float32, recompute).token_logprobs(rollout, WARM, CHUNK)
        for recompute in (False, True)
    )
    assert torch.equal(kept[0], again[0]) and torch.equal(kept[1], again[1])
    kept, again = (gradients(policy, found, rollout.completion_mask) for found in (kept, again))
    assert all(torch.equal(gradient, again[name]) for name, gradient in kept.items())


def test_weights_are_taken_over_again_when_they_have_changed_and_only_then():
    policy = small_policy("qwen2")
    rollout, exact = rollout_for(policy)[torch.tensor([1])], ExactPass(policy.model, torch.float32)
    before, syncs = exact.hidden_states(rollout), exact.weights.syncs
    # PyTorch does not count what a fused optimizer writes.
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.01, fused=True)
    exact.token_logprobs(rollout, WARM, CHUNK)[0].sum().backward()
    exact.hidden_states(rollout)
    assert exact.weights.syncs == syncs
    optimizer.step()
    after, mask = exact.hidden_states(rollout), rollout.completion_mask
    torch.testing.assert_close(after[mask], hidden_states(policy.model, rollout)[mask], atol=5e-5, rtol=0)
    assert exact.weights.syncs == syncs + 1 and exact.weights.same_as(policy.model) and not torch.equal(before, after)
