"""Decode attention as PyTorch and the engines call it: operations, caches as they come, the choice of a kernel."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from decode_cases import assert_near
from hypothesis import given
from hypothesis import strategies as st
from launching import DEVICE

from rlcourse.kernels.decode_common import decode_attention_reference
from rlcourse.kernels.decode_new_token import fused_decode_attention_reference
from rlcourse.kernels.decode_ops import MOST_PIECES, choose_splits, decode_attention, fused_decode_attention
from rlcourse.kernels.toolchain import interpreted

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def anywhere():
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        yield


def inputs(rows: int = 3, slots: int = 130, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of the fused operation by name, at rows of differing lengths."""
    torch.manual_seed(0)
    shapes = {"q": (rows, 4, 64), "k": (rows, 2, 64), "v": (rows, 2, 64)}
    shapes |= dict.fromkeys(("k_cache", "v_cache"), (rows, 2, slots, 64))
    tensors = {name: torch.randn(shape).to(BF16) for name, shape in shapes.items()}
    tensors |= {"cos": torch.rand(rows, 32), "sin": torch.rand(rows, 32), "position": torch.arange(rows) * 40 + 3}
    return {name: tensor.to(DEVICE) for name, tensor in (tensors | others).items()}


def plain(tensors: dict) -> dict:
    return {name: tensors[name] for name in ("q", "k_cache", "v_cache", "position", "start") if name in tensors}


def test_operations_are_what_they_say():
    torch.library.opcheck(fused_decode_attention, (), inputs())
    torch.library.opcheck(decode_attention, (), plain(inputs()))
    none = inputs(rows=0)
    assert decode_attention(**plain(none)).shape == fused_decode_attention(**none).shape == (0, 4, 64)


def test_one_position_and_a_start_for_each_row():
    tensors = inputs(position=torch.tensor([100]), start=torch.tensor([0, 7, 99]))
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    assert_near(decode_attention(**plain(tensors)), decode_attention_reference(**plain(expected)).double())
    assert_near(fused_decode_attention(**tensors), fused_decode_attention_reference(**expected).double())
    for cache in ("k_cache", "v_cache"):
        torch.testing.assert_close(tensors[cache], expected[cache], rtol=2.0**-7, atol=1e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="about CUDA graphs")
def test_a_graph_replays_at_the_positions_it_finds():
    tensors = inputs(rows=2, slots=512)
    fused_decode_attention(**tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused_decode_attention(**tensors)
    for step in (0, 30, 200):
        tensors["position"] += step
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        graph.replay()
        assert_near(found, fused_decode_attention_reference(**expected).double())


@given(st.integers(1, 2000), st.integers(1, 40000), st.integers(1, 200))
def test_splits_fit_the_workspace_and_leave_each_block_work(pairs, slots, multiprocessors):
    splits = choose_splits(pairs, slots, multiprocessors)
    assert splits in (1, 2, 4, 8, 16)
    if splits > 1:
        assert pairs * splits <= min(MOST_PIECES, 2 * multiprocessors) and slots // splits >= 512
