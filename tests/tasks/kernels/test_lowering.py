"""Lowered programs in Triton's interpreter, or on the GPU where there is one, against the reference in float64."""

import pytest
import torch

pytest.importorskip("triton")

from rlcourse.tasks.kernels.clock import optimum
from rlcourse.tasks.kernels.judge import agrees, draw_inputs, reference
from rlcourse.tasks.kernels.language import eager, read_computation
from tools.embedded.computations import computations
from tools.measured import run_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ran(program, computation, seed=5, columns=13):
    """y of the lowered program, and of the reference."""
    inputs = draw_inputs(computation, seed, columns)
    tensors = [torch.tensor(inputs[name], device=DEVICE) for name in computation.inputs]
    y = run_of(computation, program)(*tensors)
    return y.cpu().numpy(), reference(computation, inputs)["y"]


def check(computation, **drawn):
    for program in (eager(computation), list(optimum(computation)[1])):
        assert agrees(*ran(program, computation, **drawn)), computation


def test_eager_and_optimal_programs_compute_what_they_should():
    for computation in computations(3, "test", 2, (3, 5)) + computations(3, "test", 2, (6, 7), 0.5):
        check(computation)


@pytest.mark.parametrize("columns", [1, 13])
def test_reductions_know_where_the_columns_end(columns):
    """Beyond the end stands no 0: exp(0) would count in the sum, and 0 would win the maximum of negative numbers."""
    text = "a = exp u ; b = rowsum a ; c = neg a ; d = rowmax c ; e = mul b d ; y = add a e"
    check(read_computation(text), columns=columns)


def test_a_reduction_of_one_number_a_row_is_that_number():
    check(read_computation("a = rowsum u ; b = rowsum a ; c = rowmax b ; y = add u c"))
