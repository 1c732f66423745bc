"""Lowered programs in Triton's interpreter, or on the GPU where there is one, against the reference in float64."""

import pytest
import torch

pytest.importorskip("triton")

from rlcourse.tasks.kernels.interpret import agrees, draw_inputs, reference
from rlcourse.tasks.kernels.language import CompileError, eager, parse, read_computation
from rlcourse.tasks.kernels.lowering import load, lower
from rlcourse.tasks.kernels.optimum import optimum
from rlcourse.tasks.kernels.problems import computations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ran(program, computation, seed=5, columns=13):
    """y of the lowered program, and of the reference."""
    inputs = draw_inputs(computation, seed, columns)
    tensors = [torch.tensor(inputs[name], device=DEVICE) for name in computation.inputs]
    y = load(lower(program, computation)).run(*tensors)
    return y.cpu().numpy(), reference(computation, inputs)["y"]


@pytest.mark.parametrize("number", range(6))
def test_eager_and_optimal_programs_compute_what_they_should(number):
    for computation in (computations(6, "test", 2, (3, 5)) + computations(6, "test", 2, (6, 7), 0.5))[number::6]:
        for program in (eager(computation), list(optimum(computation)[1])):
            assert agrees(*ran(program, computation)), computation


@pytest.mark.parametrize("columns", [1, 8, 13])
def test_reductions_know_where_the_columns_end(columns):
    """Beyond the end stands no 0: exp(0) would count in the sum, and 0 would win the maximum of negative numbers."""
    computation = read_computation("a = exp u ; b = rowsum a ; c = neg a ; d = rowmax c ; e = mul b d ; y = add a e")
    assert agrees(*ran(eager(computation), computation, columns=columns))
    assert agrees(*ran(list(optimum(computation)[1]), computation, columns=columns))


def test_a_reduction_of_one_number_a_row_is_that_number():
    computation = read_computation("a = rowsum u ; b = rowsum a ; c = rowmax b ; y = add u c")
    for program in (eager(computation), list(optimum(computation)[1])):
        assert agrees(*ran(program, computation))


def test_each_launch_is_a_kernel_and_kept_values_are_not_stored():
    computation = read_computation("a = add u v ; b = relu a ; y = mul b w")
    source = lower(parse("a = add u v keep ; b = relu a end put ; y = mul b w put ;"), computation)
    assert source.count("@triton.jit") == 2
    assert source.count("tl.store") == 2 and "tl.store(a_ptr" not in source
    assert source.count("tl.load") == 4
    assert source.count("new_empty") == 2


def test_memory_is_as_large_as_what_it_holds():
    computation = read_computation("a = rowsum u ; y = div u a")
    source = lower(eager(computation), computation)
    assert "a = u.new_empty(rows, 1)" in source and "y = u.new_empty(rows, columns)" in source


def test_a_value_that_is_put_and_read_in_one_launch_is_not_loaded():
    computation = read_computation("a = add u v ; y = mul a v")
    source = lower(parse("a = add u v put ; y = mul a v put ;"), computation)
    assert source.count("tl.load") == 2 and source.count("tl.store") == 2
    assert agrees(*ran(parse("a = add u v put ; y = mul a v put ;"), computation))


def test_a_program_that_does_not_compile_has_no_source():
    with pytest.raises(CompileError):
        lower(parse("y = relu a put ;"), read_computation("a = exp u ; y = relu a"))


def test_a_wrong_lowering_would_be_found():
    """The comparison can fail: the source with one operation exchanged computes something else."""
    computation = read_computation("a = add u v ; y = relu a")
    source = lower(eager(computation), computation)
    assert source.count("u + v") == 1
    inputs = draw_inputs(computation, 0)
    tensors = [torch.tensor(inputs[name], device=DEVICE) for name in computation.inputs]
    y = load(source.replace("u + v", "u - v")).run(*tensors).cpu().numpy()
    assert not agrees(y, reference(computation, inputs)["y"])
