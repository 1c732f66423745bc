"""Packed rows against each example alone in float64, by transformers' own loss where it has one."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies import DEVICE, make_policy
from transformers import GPT2Config, GPT2LMHeadModel

from rlcourse.sft.data import Example
from rlcourse.sft.packing import check_packing, pack, plan_rows, summed_loss
from rlcourse.trial import checkpoint_activations


def example(prompt: int, answer: int, seed: int = 0, vocabulary: int = 300) -> Example:
    chance = random.Random(f"{prompt} {answer} {seed}")
    ids = [chance.randrange(3, vocabulary) for _ in range(prompt + answer)]
    return Example(torch.tensor(ids, dtype=torch.int32), torch.tensor([False] * prompt + [True] * answer))


def dialogue() -> Example:
    """Two answers in one conversation."""
    one = example(17, 6)
    learned = torch.tensor([False] * 4 + [True] * 5 + [False] * 8 + [True] * 6)
    return Example(one.ids, learned)


EXAMPLES = [example(5, 9), example(1, 1), example(20, 3), dialogue(), example(2, 30), example(7, 1)]


def loss_alone(model, one: Example) -> torch.Tensor:
    """transformers' own loss of one example: a mean, times what it is a mean of."""
    ids = one.ids.long()[None].to(DEVICE)
    labels = ids.masked_fill(~one.learned[None].to(DEVICE), -100)
    return model(input_ids=ids, labels=labels).loss * int(one.learned.sum())


def packed(rows):
    return pack(rows, 0, torch.device(DEVICE))


@pytest.mark.parametrize(
    ("architecture", "width", "chunk", "checkpointing"),
    [("qwen2", 40, 7, True), ("qwen2", 0, 4096, False), ("qwen3", 64, 7, False), ("llama", 1000, 4096, True)],
)
def test_loss_and_gradient_are_those_of_each_example_alone(architecture, width, chunk, checkpointing):
    policy = make_policy(architecture=architecture, tied=False)
    exact = copy.deepcopy(policy.model).double()
    expected = sum(loss_alone(exact, one) for one in EXAMPLES)
    expected.backward()
    if checkpointing:
        checkpoint_activations(policy.model)
    rows = plan_rows(EXAMPLES, width)
    assert len(rows) == {0: 6, 40: 3, 64: 2, 1000: 1}[width]
    loss = summed_loss(policy.model, packed(rows), chunk)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, ours), theirs in zip(policy.model.named_parameters(), exact.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=2e-5 * scale, msg=name)


def test_positions_count_anew_in_each_example():
    """GPT-2 adds positions to its input, so it shows a shift that relative positions hide."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=200, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval().to(DEVICE)
    check_packing(model)
    with torch.no_grad():
        expected = sum(loss_alone(model, one) for one in EXAMPLES)
        loss = summed_loss(model, packed([EXAMPLES]), 4096)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@given(st.lists(st.integers(2, 30), min_size=1, max_size=40), st.integers(30, 90))
def test_every_example_is_in_one_row_and_no_row_is_too_wide(lengths, width):
    examples = [example(n - 1, 1, i) for i, n in enumerate(lengths)]
    rows = plan_rows(examples, width)
    assert sorted(id(e) for row in rows for e in row) == sorted(map(id, examples))
    used = [sum(len(e.ids) for e in row) for row in rows]
    assert max(used) <= width and sum(2 * n <= width for n in used) <= 1  # two half empty rows would be one


def test_a_model_that_mixes_what_is_packed_is_refused(policy):
    check_packing(policy.model)

    class Mean(torch.nn.Module):
        """Every token sees the mean of all before it, whatever its position says."""

        def forward(self, input_ids, position_ids, use_cache):
            x = input_ids.float().cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)
            return SimpleNamespace(logits=x[..., None])

    mixing = Mean()
    mixing.device, mixing.config = torch.device("cpu"), SimpleNamespace(model_type="averaging")
    with pytest.raises(ValueError, match="averaging architecture does not keep packed examples apart"):
        check_packing(mixing)
