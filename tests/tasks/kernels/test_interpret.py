"""The interpreter against PyTorch, which knows nothing of it."""

import numpy as np
import pytest
import torch

from rlcourse.tasks.kernels.interpret import agrees, draw_inputs, execute, reference
from rlcourse.tasks.kernels.language import ARITY, OPERATIONS, eager, parse, read_computation

TORCH = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
    "relu": torch.relu, "neg": torch.neg, "abs": torch.abs, "square": torch.square, "exp": torch.exp,
    "sigmoid": torch.sigmoid, "sqrt": torch.sqrt, "rowsum": lambda v: v.sum(-1, keepdim=True),
    "rowmax": lambda v: v.amax(-1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_is_that_of_pytorch(op):
    computation = read_computation(f"y = {op} {' '.join('uv'[: ARITY[op]])}")
    inputs = draw_inputs(computation, seed=3)
    expected = TORCH[op](*(torch.tensor(inputs[name]).double() for name in computation.inputs)).numpy()
    np.testing.assert_allclose(reference(computation, inputs)["y"], expected, rtol=1e-12, equal_nan=True)
    got = execute(eager(computation), inputs)["y"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


CHAIN = read_computation("a = add u v ; b = relu a ; y = mul b w")


def test_a_launch_reads_a_register_before_memory_and_memory_after_a_launch():
    """Stale memory holds a of the reference; a launch that computes another a reads its own."""
    inputs = draw_inputs(CHAIN, seed=1)
    memory = inputs | {"a": np.zeros_like(inputs["u"])}
    own = execute(parse("a = add u v keep ; b = relu a keep ; y = mul b w put ;"), memory)["y"]
    np.testing.assert_array_equal(own, execute(eager(CHAIN), inputs)["y"])
    lost = execute(parse("a = add u v end keep ; b = relu a keep ; y = mul b w put ;"), memory)["y"]
    np.testing.assert_array_equal(lost, np.zeros_like(lost))


def test_agreement_is_within_a_tolerance_of_the_size_of_the_reference():
    expected = np.array([[0.0, 1.0, 1000.0]])
    assert agrees(expected + np.array([[0.9e-4, 1.9e-4, 0.099]]), expected)
    for wrong in ([1.1e-4, 0, 0], [0, 2.1e-4, 0], [0, 0, 0.11], [np.nan, 0, 0], [np.inf, 0, 0]):
        assert not agrees(expected + np.array([wrong]), expected)


def test_what_the_reference_cannot_say_is_not_compared():
    assert agrees(np.array([[1.0, 2.0, 3.0]]), np.array([[np.nan, np.inf, 2e6]]))
    assert not agrees(np.array([[np.nan, 1.0]]), np.array([[2.0, 1.0]]))
    assert not agrees(np.zeros((8, 1)), np.zeros((8, 7)))  # one number a row is no matrix
