"""Layers as captured graphs have the bits of the layers themselves. Here a graph is the function that it would record,
with the same fixed memory; that real graphs keep the bits too is looked at on a GPU in test_bits.py."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import rollout_of
from small import small_policy
from test_pass import gradients
from thorough import thorough

from rlcourse.exact import captured, layers
from rlcourse.exact import model as module
from rlcourse.exact.captured import CapturedLayers
from rlcourse.exact.model import ExactPass
from rlcourse.lora import add_adapter
from rlcourse.sampling import Sampling

CHUNK = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "WIDTH", 2)
    monkeypatch.setattr(layers, "PROGRAMS", 2)
    monkeypatch.setattr(layers, "COLUMNS", 128)


def passes(layers: int = 1, shape: str = "qwen2", adapter: bool = False):
    """A policy, its pass and the same with captured layers."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    policy = small_policy(shape, num_hidden_layers=layers, vocab_size=64, intermediate_size=128, **heads)
    if adapter:
        add_adapter(policy.model, "base", 2, 2.0, "all-linear")
        for name, parameter in policy.model.named_parameters():
            parameter.data += 0.1 if ".lora_" in name else 0.0
    plain, other = (ExactPass(policy.model, torch.float32) for _ in range(2))
    other.captured = CapturedLayers(policy.model, other.weights)
    other.captured.step = 2
    return policy, plain, other


def batch(seed: int, pad: int):
    """Two prompts, the first with two answers: per seed other tokens and another order of rows, in as many places."""
    draw = torch.randint(3, 60, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [(draw[:2], draw[2:4]), (draw[:2], draw[4:5]), (draw[5:6], draw[6:])]
    return rollout_of(rows[seed % 3 :] + rows[: seed % 3], pad=pad)


def same(policy, plain, other, rollout) -> None:
    """Both passes give equal bits, gradients included; the plain one with the sizes that the captured one takes."""
    mask = rollout.completion_mask
    found = other.token_logprobs(rollout, Sampling(), CHUNK)
    found = found, gradients(policy, found, mask)
    plain.captured = other.captured  # by which sizes are chosen
    ready, other.captured.ready = other.captured.ready, lambda *_: False
    expected = plain.token_logprobs(rollout, Sampling(), CHUNK)
    expected = expected, gradients(policy, expected, mask)
    other.captured.ready = ready
    for one, another in zip(found[0], expected[0], strict=True):
        assert torch.equal(one[mask], another[mask])
    for name, gradient in expected[1].items():
        assert gradient.norm() > 0 and torch.equal(gradient, found[1][name]), name


@pytest.mark.parametrize(
    ("shape", "adapter"), [("qwen2", False), thorough(("qwen2", True)), thorough(("qwen3", False))]
)
def test_captured_layers_have_the_bits_of_the_layers_as_tokens_weights_and_sizes_change(shape, adapter, monkeypatch):
    """Room is for one size: the one that was used longest ago goes first."""
    monkeypatch.setattr(captured, "PAIRS", 1)
    policy, plain, other = passes(2 if shape == "qwen3" else 1, shape, adapter)
    rollouts = [batch(seed, policy.pad_id) for seed in range(3)]
    if shape == "qwen3":
        other_size = rollout_of([([5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16])], pad=policy.pad_id)
        rollouts = [rollouts[0], other_size, rollouts[1], other_size, rollouts[2]]
    for rollout in rollouts:  # the first of a size is not captured
        same(policy, plain, other, rollout)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    assert len(other.captured.pairs) == 1 and len(other.captured.seen) == (2 if shape == "qwen3" else 1)


def test_the_first_batch_of_a_size_is_not_captured_and_two_forward_passes_in_a_row_are_refused():
    policy, _, other = passes()
    rollout = batch(0, policy.pad_id)
    for pairs in (0, 1, 1):
        other.token_logprobs(rollout, Sampling(), CHUNK)[0].sum().backward()
        assert len(other.captured.pairs) == pairs
    with torch.no_grad():
        other.token_logprobs(rollout, Sampling(), CHUNK)
    assert other.captured.calls == 4  # a forward and a backward pass of the last two batches
    first, _ = other.token_logprobs(rollout, Sampling(), CHUNK)
    other.token_logprobs(rollout, Sampling(), CHUNK)
    with pytest.raises(RuntimeError, match="go backward before that"):
        first.sum().backward()


@pytest.mark.thorough
def test_gradients_of_several_batches_are_added_up_and_are_nobody_elses_memory():
    policy, _, other = passes()
    parameters = [p for p in policy.model.parameters() if any(p is q for q in other.captured.parameters)]
    own, together = [], []
    for seed in range(3):
        policy.model.zero_grad()
        other.token_logprobs(batch(seed, policy.pad_id), Sampling(), CHUNK)[0].sum().backward()
        own.append([p.grad.clone() for p in parameters])
    policy.model.zero_grad()
    for seed in range(3):
        other.token_logprobs(batch(seed, policy.pad_id), Sampling(), CHUNK)[0].sum().backward()
        together = [p.grad for p in parameters]
    for parts, summed in zip(zip(*own, strict=True), together, strict=True):
        torch.testing.assert_close(summed, sum(parts))
    held = [w.untyped_storage() for layer in other.captured.gradients for w in layer if w is not None]
    held = {storage.data_ptr() for storage in held}
    assert len(held) == 7 and not held & {p.grad.untyped_storage().data_ptr() for p in parameters}


@pytest.mark.thorough
def test_a_large_batch_ends_capturing():
    policy, plain, other = passes()
    long = rollout_of([([5, 6, 7, 8, 9, 10, 11], list(range(12, 30)))], pad=policy.pad_id)
    other.captured.tokens = 8  # those of `batch`, padded
    for rollout in (batch(0, policy.pad_id), batch(1, policy.pad_id)):
        same(policy, plain, other, rollout)
    assert other.captured.pairs
    for rollout in (long, batch(0, policy.pad_id), batch(0, policy.pad_id)):
        other.token_logprobs(rollout, Sampling(), CHUNK)[0].sum().backward()
        held = other.captured
        assert not held.pairs and held.tokens == 0 and held.x is None and not held.gradients


def test_how_many_tokens_are_captured(monkeypatch):
    policy, _, other = passes()
    token = 8 * (128 + 4) + 4 * 2 + 2 * (2 * (2 + 1) * 32 + 2 * 128)  # bytes
    gradients = 4 * sum(p.numel() for p in policy.model.model.layers.parameters())
    made = CapturedLayers(policy.model, other.weights)
    assert made.tokens == captured.MOST_TOKENS and made.step == int(captured.CAPTURED_BYTES - gradients) // token // 512
    monkeypatch.setattr(captured, "CAPTURED_BYTES", gradients + 1000 * token)
    assert CapturedLayers(policy.model, other.weights).tokens == 1000
    monkeypatch.setattr(captured, "CAPTURED_BYTES", gradients - 1)
    assert CapturedLayers(policy.model, other.weights).tokens == 0
