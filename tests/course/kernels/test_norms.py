"""RMSNorm alone, in the residual stream and in training, with gradients, against float32 and finite differences."""

import pytest
import torch
from thorough import thorough

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, launch, run, slopes, spread

from rlcourse.course.kernels.column_sum import ColumnSum, column_sum
from rlcourse.course.kernels.residual_norm import ResidualNorm, residual_norm, residual_norm_reference
from rlcourse.course.kernels.residual_norm_backward import ResidualNormBackward, residual_norm_backward_reference
from rlcourse.course.kernels.rms_norm import RMSNorm, add_rms_norm_reference, rms_norm, rms_norm_reference
from rlcourse.course.kernels.rms_norm_backward import RMSNormBackward, rms_norm_backward, rms_norm_backward_reference
from rlcourse.kernels.toolchain import compiled

EPS = 1e-6


def case(rows, hidden, dtype="bfloat16", count=4):
    """Tensors [rows, hidden] whose rows lie apart, and a weight; in the first row eps counts."""
    torch.manual_seed(rows * hidden)
    found = [spread(torch.randn(rows, hidden).to(getattr(torch, dtype)), hidden + 8 * i) for i in range(count)]
    found[0][0] *= 1e-3
    found[1][0] *= 1e-3
    return *found, (1 + 0.3 * torch.randn(hidden)).to(getattr(torch, dtype))


def norm(x, weight):
    """By the formula, in float64."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [
        (5, 1024, "bfloat16"),
        (9, 896, "float16"),
        (2, 8, "bfloat16"),
        (18, 24, "bfloat16"),
        thorough((2, 3584, "float16")),
    ],
)
def test_rows_are_divided_by_their_root_mean_square(rows, hidden, dtype):
    x, residual, weight = case(rows, hidden, dtype, count=2)
    y = torch.full((rows, hidden), torch.nan, dtype=x.dtype)
    launch(RMSNorm(hidden, dtype, EPS), x, None, weight, y)
    assert_close(y, rms_norm_reference(x, weight, EPS))
    assert_close(y, norm(x.double(), weight).to(x.dtype))
    expected = residual.clone()
    launch(RMSNorm(hidden, dtype, EPS, add=True), x, residual, weight, y)
    assert_close(y, add_rms_norm_reference(x, expected, weight, EPS))
    assert torch.equal(residual, expected), "the sum goes to the residual stream"
    assert residual._base[:, hidden:].isnan().all(), "written between the rows"


def test_statistics_are_float32():
    *_, weight = case(3, 896)
    x = (300 * torch.randn(3, 896)).bfloat16()  # squares that 16 bits cannot add up
    assert_close(run(rms_norm, x, weight, EPS), rms_norm_reference(x, weight, EPS))
    tiny = torch.full((1, 896), 1e-4, dtype=torch.float16)  # squares that 16 bits cannot hold; eps counts
    assert_close(run(rms_norm, tiny, weight.half(), EPS), rms_norm_reference(tiny, weight.half(), EPS))
    assert not run(rms_norm, torch.zeros_like(x), weight, EPS).any()


@pytest.mark.parametrize(
    ("rows", "hidden", "programs", "order"),
    [(1, 128, 1, "lockstep"), (5, 896, 2, "random"), (3, 256, 4, "lockstep"), (6, 128, 3, "random")],
)
def test_gradients_of_the_norm_are_those_of_the_reference(rows, hidden, programs, order):
    torch.manual_seed(rows * hidden)
    x, weight, dy = torch.randn(rows, hidden), 1 + 0.3 * torch.randn(hidden), torch.randn(rows, hidden)
    x[0] *= 1e-3  # eps counts
    dx, partial = torch.full_like(x, torch.nan), torch.full((programs, hidden), torch.nan)
    launch(RMSNormBackward(hidden, EPS), x, weight, dy, dx, partial, order=order)
    expected_x, expected_weight = rms_norm_backward_reference(x, weight, dy, EPS)
    assert ((dx - expected_x).abs() <= 1e-5 * expected_x.abs().amax(-1, keepdim=True)).all()
    torch.testing.assert_close(partial.sum(0), expected_weight, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_norm_are_those_of_finite_differences():
    torch.manual_seed(0)
    x, weight, dy = torch.randn(2, 128), 1 + 0.3 * torch.randn(128), torch.randn(2, 128)
    found_x, found_weight = run(rms_norm_backward, x, weight, dy, EPS)
    expected = slopes(lambda x: (norm(x, weight) * dy.double()).sum(), x)
    torch.testing.assert_close(found_x.double(), expected, rtol=1e-4, atol=1e-5)
    expected = slopes(lambda w: (norm(x.double(), w) * dy.double()).sum(), weight)
    torch.testing.assert_close(found_weight.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "hidden", "programs", "dtype", "order"),
    [
        (1, 8, 1, "bfloat16", "lockstep"),
        (5, 264, 2, "float16", "random"),
        (3, 896, 4, "bfloat16", "lockstep"),
        (37, 8, 2, "float16", "random"),  # up to three rows for each warp
        (5, 1536, 1, "bfloat16", "warp"),  # of two rows for each of four warps
        thorough((9, 2048, 2, "bfloat16", "random")),
    ],
)
def test_sum_norm_and_gradients_in_training_are_those_of_the_reference(rows, hidden, programs, dtype, order):
    x, residual, dtotal, dy, weight = case(rows, hidden, dtype)
    total, y, dx = (torch.full((rows, hidden), torch.nan, dtype=x.dtype) for _ in range(3))
    partial = torch.full((programs, hidden), torch.nan)
    launch(ResidualNorm(hidden, dtype, EPS), x, residual, weight, total, y, order=order)
    expected_total, expected_y = residual_norm_reference(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    assert_close(y, expected_y)
    launch(ResidualNormBackward(hidden, dtype, EPS), total, weight, dtotal, dy, dx, partial, order=order)
    expected_x, expected_weight = residual_norm_backward_reference(total, weight, dtotal, dy, EPS)
    # Two parts that cancel leave the rounding of float32, which is that of the parts.
    torch.testing.assert_close(dx.float(), expected_x.float(), rtol=2**-7, atol=1e-6 * expected_x.abs().max().item())
    torch.testing.assert_close(partial.sum(0), expected_weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [896, thorough(1536)])
def test_an_h200_has_room_for_two_blocks_at_a_time(hidden):
    """So that while one waits the other one works, and `PROGRAMS` blocks are all there at once."""
    kernel = ResidualNormBackward(hidden, "bfloat16")
    code = compiled(kernel, "sm_90a")
    assert 2 * code.registers * kernel.threads <= 65536 and 2 * (code.shared_bytes + 1024) <= 228 * 1024


def test_gradients_in_training_are_those_of_finite_differences():
    x, residual, dtotal, dy, weight = case(2, 16)

    def all_of_it(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        total, y = residual_norm(*leaves, EPS)
        return total.detach(), *torch.autograd.grad([total, y], leaves, tensors[3:])

    total, found_x, found_residual, found_weight = run(all_of_it, x, residual, weight, dtotal, dy)
    assert torch.equal(found_x, found_residual)

    def loss(x, w):
        return (norm(x, w) * dy.double() + x * dtotal.double()).sum()

    expected = slopes(lambda x: loss(x, weight), total, 1e-7)
    torch.testing.assert_close(found_x.double(), expected, rtol=2**-7, atol=1e-6 * expected.abs().max().item())
    expected = slopes(lambda w: loss(total.double(), w), weight)
    torch.testing.assert_close(found_weight.double(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "columns", "order"), [(1, 8, "lockstep"), (31, 33, "random"), (264, 32, "warp"), (450, 40, "random")]
)
def test_columns_are_added(rows, columns, order):
    torch.manual_seed(rows)
    parts, total = torch.randn(rows, columns), torch.full((columns,), torch.nan)
    launch(ColumnSum(columns), parts, total, order=order)
    torch.testing.assert_close(total, parts.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(run(column_sum, parts), total)
