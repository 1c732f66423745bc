"""Sequences without padding, and the way back to padded ones."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, rollout_of

from rlcourse.exact import layers
from rlcourse.exact import model as module
from rlcourse.exact.sequences import Sequences

LENGTHS = [3, 0, 5, 1]


def test_places_are_those_of_padded_sequences_one_after_the_other():
    found = Sequences.of(torch.tensor(LENGTHS), 6)
    assert len(found) == 4 and found.bounds.tolist() == [0, 3, 3, 8, 9] and found.bounds.dtype == torch.int32
    assert found.places.tolist() == [0, 1, 2, 12, 13, 14, 15, 16, 18]
    assert found.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]


def test_padded_tensors_are_rows_with_zeros_behind():
    sequences = Sequences.of(torch.tensor(LENGTHS, device=DEVICE), 6)
    wide, narrow = torch.randn(3, 9, 3, 4, device=DEVICE), torch.randn(2, 9, 1, 4, device=DEVICE)
    tensors = [wide[0], wide[1], *narrow, wide[2]]
    for found, tensor in zip(layers.padded(*tensors, sequences), tensors, strict=True):
        assert found.shape == (4, tensor.shape[1], 6, 4)
        for row, (first, length) in enumerate(zip([0, 3, 3, 8], LENGTHS, strict=True)):
            assert torch.equal(found[row, :, :length], tensor[first : first + length].transpose(0, 1))
            assert found[row, :, length:].eq(0).all()


def test_equal_ones_are_a_case_of_any():
    found, expected = Sequences.equal(3, 4, torch.device("cpu")), Sequences.of(torch.tensor([4, 4, 4]), 4)
    assert torch.equal(found.bounds, expected.bounds) and torch.equal(found.places, expected.places)
    assert found.length == expected.length and found.bounds.dtype == expected.bounds.dtype


def test_of_a_rollout_no_padding_is_left_but_what_makes_a_multiple():
    rollout = rollout_of([([5, 9], [7, 8, 3]), ([4], [6]), (list(range(30, 60)), list(range(40)))])
    ids, sequences = module.pack(rollout)
    assert len(ids) == 2 * module.WIDTH == 128 > 5 + 2 + 70 and sequences.length == 128
    assert sequences.bounds.tolist() == [0, 5, 7, 77, 128]
    assert ids[:7].tolist() == [5, 9, 7, 8, 3, 4, 6] and ids[7:77].tolist() == [*range(30, 60), *range(40)]


def test_attention_sees_its_own_sequence_alone():
    heads, kv_heads, size = 4, 2, 32
    lengths = torch.tensor([70, 0, 1, 130], device=DEVICE)
    sequences = Sequences.of(lengths, 192)
    torch.manual_seed(0)
    q, k, v = (torch.randn(201, count, size, device=DEVICE) for count in (heads, kv_heads, kv_heads))
    out, lse = layers.attention(q, k, v, sequences)
    for row, (first, length) in enumerate(zip([0, 70, 70, 71], lengths.tolist(), strict=True)):
        at = slice(first, first + length)
        parts = [x[at].double().transpose(0, 1) for x in (q, k, v)]
        if length:
            exact = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            torch.testing.assert_close(
                out[at].double(), exact.transpose(0, 1), atol=1e-2 if q.is_cuda else 5e-6, rtol=0
            )
        assert lse[row, :, length:].eq(0).all()
