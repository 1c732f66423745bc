"""Partial credit: the share of a computation's lines that a program states in their places, beside the reward."""

import pytest

from rlcourse.tasks import Attempt, load_task
from rlcourse.tasks.kernels.language import read_computation
from rlcourse.tasks.kernels.task import KernelProblem
from tools.lessons.kernel_rewards import PartialTask

CHAIN = KernelProblem(read_computation("a = add u v ; b = relu a ; y = mul b w"))
EAGER = "a = add u v end put ; b = relu a end put ; y = mul b w end put ;"
STATED = {  # of three lines
    "b = relu a put ; y = mul b w put ;": 0,  # not in their places
    "a = add u v put ;": 1,
    "a = add u v put ; b = relu put ; y = mul b w put ;": 2,  # a statement that cannot be read has a place
    EAGER + EAGER: 1.5,  # of six statements
    EAGER.replace("put", "keep"): 3,  # though it's refused
    EAGER + " y": 3,  # what no ';' ends is not a statement
    "": 0,
}


@pytest.mark.parametrize("text", [*STATED, EAGER])
def test_partial_credit_is_paid_beside_the_reward(text):
    honest = load_task("kernels")
    partial = PartialTask(**vars(honest))
    (verdict,), (plain,) = (task.judge([Attempt(CHAIN, text, 10, True)], True) for task in (partial, honest))
    assert list(verdict.metrics) == list(partial.metrics) and verdict.right == plain.right == (text == EAGER)
    assert 3 * verdict.metrics["stated"] == pytest.approx(STATED.get(text, 3))
    assert verdict.reward == plain.reward + verdict.metrics["stated"]
