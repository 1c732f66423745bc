"""The sum over the rows of a matrix, which adds up blocks' parts."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import launch, run

from rlcourse.course.kernels.column_sum import ColumnSum, column_sum


@pytest.mark.parametrize(
    ("rows", "columns", "order"), [(1, 8, "lockstep"), (31, 33, "random"), (264, 32, "warp"), (450, 40, "random")]
)
def test_columns_are_added(rows, columns, order):
    torch.manual_seed(rows)
    parts, total = torch.randn(rows, columns), torch.full((columns,), torch.nan)
    launch(ColumnSum(columns), parts, total, order=order)
    torch.testing.assert_close(total, parts.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(run(column_sum, parts), total)
