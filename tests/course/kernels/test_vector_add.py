"""c = a + b, for sizes that 4 divides and that it does not."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import launch, run

from rlcourse.course.kernels.vector_add import VectorAdd, vector_add, vector_add_reference


@pytest.mark.parametrize("n", [1, 3, 4, 5, 1023, 1024, 1030])
def test_every_element_is_added_and_nothing_beside_them(n):
    torch.manual_seed(n)
    a, b, c = torch.randn(n), torch.randn(n), torch.full((n,), torch.nan)
    launch(VectorAdd(), a, b, c)
    assert torch.equal(c, vector_add_reference(a, b))


def test_the_operation_takes_empty_vectors():
    assert run(vector_add, torch.empty(0), torch.empty(0)).shape == (0,)
    assert torch.equal(run(vector_add, torch.ones(6), torch.ones(6)), torch.full((6,), 2.0))
