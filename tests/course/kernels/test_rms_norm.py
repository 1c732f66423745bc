"""RMSNorm against float32, with and without the addition to the residual stream."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, launch, run, spread

from rlcourse.course.kernels.rms_norm import RMSNorm, add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from rlcourse.kernels import KernelError

EPS = 1e-6
SHAPES = [(5, 1024), (1, 896), (9, 896), (2, 3584), (2, 8), (3, 64)]


def case(rows, hidden, dtype, scale=1.0):
    torch.manual_seed(rows * hidden)
    x, residual = (scale * torch.randn(rows, hidden)).to(dtype), (2 * torch.randn(rows, hidden)).to(dtype)
    return x, residual, (1 + 0.3 * torch.randn(hidden)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "hidden"), thinned(SHAPES, every=2))
def test_rows_are_divided_by_their_root_mean_square(rows, hidden, dtype):
    x, _, weight = case(rows, hidden, dtype)
    y = torch.full_like(x, torch.nan)
    launch(RMSNorm(hidden, str(dtype).removeprefix("torch."), EPS), x, None, weight, y)
    assert_close(y, rms_norm_reference(x, weight, EPS))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(rows=st.integers(1, 20), hidden=st.sampled_from([24, 64, 160, 448, 768, 896]), gap=st.integers(0, 3))
def test_the_sum_goes_to_the_residual_stream_and_its_norm_is_taken(rows, hidden, gap):
    x, residual, weight = case(rows, hidden, torch.bfloat16)
    x, residual = spread(x, hidden + 8 * gap), spread(residual, hidden + 16 * gap)
    y, expected = torch.full((rows, hidden), torch.nan, dtype=x.dtype), residual.clone()
    launch(RMSNorm(hidden, "bfloat16", EPS, add=True), x, residual, weight, y)
    assert_close(y, add_rms_norm_reference(x, expected, weight, EPS))
    assert torch.equal(residual, expected)
    assert residual._base[:, hidden:].isnan().all(), "written between the rows"


def test_statistics_are_float32():
    x, _, weight = case(3, 896, torch.bfloat16, scale=300.0)  # squares that 16 bits cannot add up
    assert_close(run(rms_norm, x, weight, EPS), rms_norm_reference(x, weight, EPS))
    tiny = torch.full((1, 896), 1e-4, dtype=torch.float16)  # squares that 16 bits cannot hold; eps counts
    assert_close(run(rms_norm, tiny, weight.half(), EPS), rms_norm_reference(tiny, weight.half(), EPS))
    assert not run(rms_norm, torch.zeros_like(x), weight, EPS).any()


def test_operations_change_the_residual_stream_alone():
    x, residual, weight = case(4, 128, torch.bfloat16)
    before, expected = x.clone(), residual.clone()
    y = run(add_rms_norm, x, residual, weight, EPS)
    assert_close(y, add_rms_norm_reference(x, expected, weight, EPS))
    assert torch.equal(residual, expected) and torch.equal(x, before)
    assert run(rms_norm, x[:0], weight, EPS).shape == (0, 128)


@pytest.mark.parametrize("hidden", [100, 8 * 23, 8192])
def test_rows_that_cannot_be_cut_are_refused(hidden):
    with pytest.raises(KernelError, match=f"cannot cut rows of {hidden}"):
        RMSNorm(hidden, "bfloat16")


def test_layouts_that_it_cannot_read_are_refused():
    x, _, weight = case(4, 128, torch.bfloat16)
    y = torch.empty_like(x)
    kernel = RMSNorm(128, "bfloat16", EPS)
    with pytest.raises(KernelError, match="x of RMSNorm must have stride 1 in dimension 1 and has 4"):
        launch(kernel, x.T.contiguous().T, None, weight, y)
    with pytest.raises(KernelError, match="x of RMSNorm has stride 129 in dimension 0, which 16-byte loads"):
        launch(kernel, spread(x, 129), None, weight, y)
    with pytest.raises(KernelError, match="begins at an address that 16 does not divide"):
        launch(kernel, spread(x, 136)._base[:, 1:129], None, weight, y)
    with pytest.raises(KernelError, match=r"must have shape \[4, 128\] and has \[3, 128\]"):
        launch(kernel, x, None, weight, y[:3])
    with pytest.raises(KernelError, match="must be bfloat16 and is float16"):
        launch(kernel, x.half(), None, weight, y)
