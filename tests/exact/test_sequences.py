"""Sequences without padding that share their beginnings, and the way to padded ones and back."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, rollout_of
from thorough import thorough

from rlcourse.exact import layers
from rlcourse.exact import model as module
from rlcourse.exact.sequences import Sequences

LENGTHS, SHARED = [5, 4, 3, 0, 1, 6, 6], [0, 3, 3, 0, 0, 0, 2]
TOKENS = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3], [], [7], [8, 9, 10, 11, 12, 13], [8, 9, 14, 15, 16, 17]]


def sequences_of(lengths, shared, length, device=DEVICE) -> Sequences:
    return Sequences.of(torch.tensor(lengths), torch.tensor(shared), length, torch.device(device))


def test_each_token_stands_in_its_sequence_or_in_the_one_that_it_shares_it_with():
    found = sequences_of(LENGTHS, SHARED, 8)
    assert len(found) == 7 and found.table.dtype == found.copies.dtype == torch.int32
    for row, tokens in enumerate(TOKENS):
        at = found.find(torch.full((len(tokens),), row, device=DEVICE), torch.arange(len(tokens), device=DEVICE))
        assert (at + 1).tolist() == tokens  # numbered as they stand
    assert found.places.tolist() == [0, 1, 2, 3, 4, 11, 32, 40, 41, 42, 43, 44, 45, 50, 51, 52, 53]
    assert found.positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert found.copies.tolist() == [2, 2, 2, 0, 0, 0, 0, 1, 1, *[0] * 8]


def test_of_a_rollout_no_padding_is_left_but_what_makes_a_multiple_and_each_prompt_once():
    long = (list(range(30, 60)), list(range(40)))
    rollout = rollout_of([([5, 9], [7, 8, 3]), long, ([5, 9], [6]), ([4], [6]), ([5, 9], [7, 8])])
    ids, sequences, before = module.pack(rollout)
    assert len(ids) == 2 * module.WIDTH == 128 and sequences.length == 128
    tokens = [5, 9, 7, 8, 3, 6, 7, 8, *range(30, 60), *range(40), 4, 6]  # rows 0, 2, 4, then 1, then 3
    assert ids[: len(tokens)].tolist() == tokens
    assert sequences.table[:, 0].tolist() == [5, 3, 4, 70, 2, 48]
    assert sequences.copies.tolist() == [2, 2, *[0] * 126]
    places = [1, 2, 3, 37, *range(38, 77), 1, 78, 1, 6]  # of the token before: row 0, row 1, row 2, row 3, row 4
    assert before.tolist() == places
    ids, sequences, _ = module.pack(rollout_of([([5, 9], [7]), ([5], [9, 7]), ([5, 9, 7], [1])]))  # begin alike
    assert ids[:10].tolist() == [5, 9, 7, 5, 9, 7, 5, 9, 7, 1] and not sequences.copies.any()


def test_padding_behind_many_short_sequences_is_no_longer_than_they_are():
    rollout = rollout_of([([5], list(range(40)))] * 198 + [([6], list(range(60)))])
    tokens = 1 + 198 * 40 + 61
    assert tokens == 7982 and module.size_step(tokens) == 4096 // 32 == 128
    ids, sequences, before = module.pack(rollout)
    assert len(ids) == 63 * 128 == 8064 and sequences.length == 64
    assert sequences.table[198:, 0].tolist() == [61, 64, 18]  # the rest of 128, of up to 64 each
    assert ids[:81].tolist() == [5, *range(40), *range(40)] and ids[7921:7982].tolist() == [6, *range(60)]
    assert before[[0, 1, 40, 41, 7920]].tolist() == [0, 1, 0, 41, 7921]


@pytest.mark.parametrize(
    ("shared", "size"), [([0, 69, 69, 0, 128], 32), thorough(([0, 64, 70, 0, 130], 128)), thorough(([0] * 5, 64))]
)
def test_attention_and_its_gradients_are_those_of_each_sequence_by_itself(shared, size):
    """Blocks of queries and tiles of keys begin, end or change the sequence within them. Gradients of keys and values
    that sequences share are added up by who calls; what a sequence shares has no query there."""
    heads, kv_heads, lengths = 4, 2, [70, 70, 200, 130, 131]
    sequences = sequences_of(lengths, shared, 256)
    torch.manual_seed(0)
    count = sum(lengths) - sum(shared)
    q, k, v = (torch.randn(count, number, size, device=DEVICE) for number in (heads, kv_heads, kv_heads))
    out, lse = layers.attention(q, k, v, sequences)
    gradient = torch.randn_like(out)
    dq, *of_sequences = layers.attention_backward(gradient, q, k, v, out, lse, sequences)
    exact_q = torch.zeros_like(dq, dtype=torch.float64)
    found, exact = ([torch.zeros_like(k, dtype=torch.float64) for _ in of_sequences] for _ in range(2))
    for row, length in enumerate(lengths):
        at = sequences.find(torch.full((length,), row, device=DEVICE), torch.arange(length, device=DEVICE))
        parts = [x[at].double().transpose(0, 1).requires_grad_() for x in (q, k, v)]
        through = gradient[at].double().transpose(0, 1).clone()
        through[:, : shared[row]] = 0.0
        result = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        found_out = out[at].double().transpose(0, 1)[:, shared[row] :]
        near = 1e-2 if q.is_cuda else 5e-6
        torch.testing.assert_close(found_out, result[:, shared[row] :].detach(), atol=near, rtol=0)
        assert lse[row, :, length:].eq(0).all() and lse[row, :, : shared[row]].eq(0).all()
        assert lse[row, :, shared[row] : length].ne(0).all()
        of_q, *others = (part.transpose(0, 1) for part in torch.autograd.grad(result, parts, through))
        exact_q[at[shared[row] :]] = of_q[shared[row] :]
        for total, part, mine, own in zip(exact, others, found, of_sequences, strict=True):
            total.index_add_(0, at, part)
            mine.index_add_(0, at, own[row, :length].double())
    for mine, other in zip([dq.double(), *found], [exact_q, *exact], strict=True):
        assert (mine - other).norm() < 1e-5 * other.norm() and other.norm() > 0
