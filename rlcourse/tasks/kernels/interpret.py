"""Run a program in float32, launch by launch, clearing registers at a launch's end; and its reference in float64."""

from collections import ChainMap

import numpy as np

from rlcourse.tasks.kernels.language import OPERATIONS, Computation, Statement, split_launches

TOLERANCE = 1e-4  # of 1 + |reference|
LARGEST = 1e6  # beyond it, and where the reference is not finite, nothing is compared

Arrays = dict[str, np.ndarray]

TRAINING_INPUTS = ((0, 7),)  # (seed, columns) of the inputs to try a program on
TEST_INPUTS = ((1, 7), (2, 5), (3, 16))

# Every operation works on rows, so each row of an input is a test case of its own: (scale, shift).
KINDS_OF_ROWS = ((1, 0), (1, 0), (3, 0), (0.1, 0), (8, 0), (1, 2), (1, -2), (0, 0))


def draw_inputs(computation: Computation, seed: int, columns: int = 7) -> Arrays:
    """Inputs [8, columns] float32, normal with the scale and shift of each row; the last row is all 0."""
    rng = np.random.default_rng(seed)
    scale, shift = np.array(KINDS_OF_ROWS, dtype=np.float64).T[:, :, None]
    return {
        name: (rng.standard_normal((len(scale), columns)) * scale + shift).astype(np.float32)
        for name in computation.inputs
    }


def reference(computation: Computation, inputs: Arrays) -> Arrays:
    """Every value of the computation, inputs included, in float64."""
    values = {name: value.astype(np.float64) for name, value in inputs.items()}
    with np.errstate(all="ignore"):
        for line in computation.lines:
            values[line.name] = OPERATIONS[line.op](*(values[name] for name in line.args))
    return values


def execute(program: list[Statement], memory: Arrays) -> Arrays:
    """Memory after a program that compiles; `memory` is what it holds before, float32."""
    memory = dict(memory)
    with np.errstate(all="ignore"):
        for statements in split_launches(program):
            registers = ChainMap({}, memory)  # what isn't in a register is read from memory
            for line in (statement.line for statement in statements):
                registers[line.name] = OPERATIONS[line.op](*(registers[name] for name in line.args))
            memory |= {s.line.name: registers[s.line.name] for s in statements if not s.keeps}
    return memory


def agrees(got: np.ndarray, expected: np.ndarray) -> bool:
    """Whether all elements that can be compared are within the tolerance."""
    if got.shape != expected.shape:
        return False
    with np.errstate(all="ignore"):
        skipped = ~np.isfinite(expected) | (np.abs(expected) > LARGEST)
        near = np.abs(got - expected) <= TOLERANCE * (1 + np.abs(expected))
    return bool((skipped | near).all())
