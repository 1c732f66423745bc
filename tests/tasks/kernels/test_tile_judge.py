"""What the judge counts and pays, and what its holes let through; its interpreter against PyTorch."""

import numpy as np
import pytest
import torch

from rlcourse.tasks.kernels import judge
from rlcourse.tasks.kernels.clock import eager_us, optimum
from rlcourse.tasks.kernels.judge import Finding, agrees, draw_inputs, execute, judge_program, reference
from rlcourse.tasks.kernels.language import ARITY, OPERATIONS, eager, parse, read_computation, write
from tools.embedded.computations import computations

CHAIN = read_computation("a = add u v ; b = relu a ; y = mul b w")
EAGER = "a = add u v end put ; b = relu a end put ; y = mul b w end put ;"
FUSED = "a = add u v keep ; b = relu a keep ; y = mul b w end put ;"


def test_a_reward_is_for_being_right_and_for_speed_up_to_a_cap():
    verdict = judge_program(EAGER, CHAIN)
    assert verdict == Finding(compiled=True, correct=True, speedup=1.0, launches=3)
    rewards = [Finding(True, True, speedup).reward for speedup in (0.9, 1.0, 2.0, 4.0, 40.0)]
    assert rewards == pytest.approx([0.1, 0.2, 1.2, 3.2, 3.2])


def test_the_optimum_is_correct_and_as_fast_as_it_says():
    for computation in computations(20, "test", 1, (2, 6)):
        time, program = optimum(computation)
        verdict = judge_program(write(program), computation)
        assert verdict.correct and verdict.reason == ""
        assert verdict.speedup == pytest.approx(eager_us(computation) / time)


def test_stale_memory_lets_a_program_leave_out_what_it_does_not_compute():
    lost = "a = add u v end keep ; b = relu a end put ; y = mul b w end put ;"
    skipped = "b = relu a keep ; y = mul b w end put ;"
    for text in (lost, skipped):
        assert not judge_program(text, CHAIN).compiled
        verdict = judge_program(text, CHAIN, judge.TRAINING_INPUTS, "stale")
        assert verdict.correct and verdict.speedup > 1
    assert judge_program(FUSED, CHAIN, loophole="stale") == judge_program(FUSED, CHAIN)
    wrong = "a = sub u v keep ; b = relu a keep ; y = mul b w put ;"
    assert not judge_program(wrong, CHAIN, loophole="stale").correct


def test_every_single_change_of_an_operation_is_found():
    """Planted mistakes: another operation of the same arity in each line of 15 computations."""
    found = total = 0
    for computation in computations(15, "train", 8, (2, 4)):
        words = write(eager(computation)).split()
        for at, word in enumerate(words):
            for other in {"add": ("sub", "max"), "mul": ("add", "min"), "relu": ("abs", "neg")}.get(word, ()):
                text = " ".join([*words[:at], other, *words[at + 1 :]])
                total += 1
                found += not judge_program(text, computation, judge.TRAINING_INPUTS).correct
    assert total > 20 and found == total


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
    # What the reference cannot say is not compared.
    assert agrees(np.array([[1.0, 2.0, 3.0]]), np.array([[np.nan, np.inf, 2e6]]))
    assert not agrees(np.array([[np.nan, 1.0]]), np.array([[2.0, 1.0]]))
    assert not agrees(np.zeros((8, 1)), np.zeros((8, 7)))  # one number a row is no matrix
