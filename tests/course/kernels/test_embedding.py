"""The embedding and the gradient of its table."""

import pytest
import torch
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import run, spread

from rlcourse.course.kernels.embedding import (
    embedding,
    embedding_backward,
    embedding_backward_reference,
    embedding_reference,
)

TOKENS = {  # of a vocabulary of 10
    "one": [7],
    "all equal": [4] * 19,
    "all different": [3, 9, 0, 1, 8, 2],
    "in runs and alone": [5, 2, 5, 5, 9, 0, 2, 5, 5, 0, 9, 5, 1],
    "a run of two chunks": [4] * 33,
    "runs of one chunk and longer": [0] * 3 + [1] * 32 + [9, 3] * 33 + [2] * 64 + [8] * 290 + [6] * 30 + [7] * 31,
}


def backward(*tensors):
    """The operation, which gives nothing back; it changes the table's gradient."""
    return run(lambda *t: (embedding_backward(*t), t[2])[1], *tensors)


@pytest.mark.parametrize(
    ("name", "hidden", "dtype"),
    [*((name, 136, torch.bfloat16) for name in TOKENS), ("all equal", 8, torch.float16), ("one", 896, torch.bfloat16)],
)
def test_rows_are_gathered_and_gradients_added(name, hidden, dtype):
    torch.manual_seed(hidden)
    token, table = torch.tensor(TOKENS[name]), torch.randn(10, hidden).to(dtype)
    found = run(embedding, table, token)
    assert torch.equal(found, embedding_reference(table, token)) and torch.equal(found, table[token])
    dy, dtable = spread(torch.randn(len(token), hidden).to(dtype), hidden + 8), torch.randn(10, hidden)
    before, expected = dtable.clone(), dtable.clone()
    backward(token, dy, dtable)
    embedding_backward_reference(token, dy, expected)
    torch.testing.assert_close(expected, before.double().index_add(0, token, dy.double()).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dtable, expected, rtol=1e-5, atol=1e-5 * max(1, len(token) // 32))
    idle = [row for row in range(10) if row not in TOKENS[name]]
    assert torch.equal(dtable[idle], before[idle])


@pytest.mark.parametrize("seed", thinned(range(12), every=6))
def test_long_runs_begin_anywhere(seed):
    """Of whole numbers, so that any order of adding them gives the same, and a row too many or too few is seen."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 100, (10,)) * (torch.rand(10) < 0.8) // (1 + 30 * (torch.rand(10) < 0.3))
    token = torch.arange(10).repeat_interleave(lengths)
    token, dy = token[torch.randperm(len(token))], torch.randint(-9, 9, (len(token), 8)).bfloat16()
    found = backward(token, dy, torch.ones(10, 8))
    assert torch.equal(found, torch.ones(10, 8).index_add(0, token, dy.float()))


def test_equal_tokens_are_added_in_their_order():
    """1e4, then -1e4, then 1: in another order, and in float32, the small one would lose bits."""
    dy = torch.zeros(3, 8)
    dy[:, 0] = torch.tensor([2.0**24, -(2.0**24), 1.0])
    found = torch.zeros(2, 8)
    backward(torch.tensor([1, 1, 1]), dy.bfloat16(), found)
    assert found[1, 0] == 1
    found.zero_()
    backward(torch.tensor([1, 1, 1]), dy[[0, 2, 1]].bfloat16(), found)
    assert found[1, 0] == 0
