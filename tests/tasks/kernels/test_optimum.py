"""The optimum by search, against all programs there are."""

from itertools import permutations, product

import pytest

from rlcourse.tasks.kernels.clock import A10G, H200, program_us
from rlcourse.tasks.kernels.language import CompileError, Statement, compile_program, read_computation
from rlcourse.tasks.kernels.optimum import optimum, orders
from rlcourse.tasks.kernels.problems import computations

JOIN = read_computation("a = add u v ; b = add w x ; y = mul a b")  # three matrices at once: two launches


def least_by_trying_all(computation, card=A10G):
    """Over all orders of the lines, also those that cannot be, all ends and all kinds of every value."""
    best = float("inf")
    for lines in permutations(computation.lines):
        for how in product(product((False, True), repeat=2), repeat=len(lines)):
            program = [Statement(line, *flags) for line, flags in zip(lines, how, strict=True)]
            try:
                best = min(best, program_us(compile_program(program, computation), card))
            except CompileError:
                continue
    return best


@pytest.mark.parametrize("card", [A10G, H200], ids=lambda card: card.name)
def test_no_program_of_all_is_faster(card):
    problems = computations(12, "train", 5, (2, 3)) + computations(3, "train", 5, (4, 4)) + [JOIN]
    for computation in problems:
        time, program = optimum(computation, card)
        assert time == pytest.approx(least_by_trying_all(computation, card))
        assert program_us(compile_program(list(program), computation), card) == pytest.approx(time)


def test_orders_are_those_in_which_operands_come_first():
    for computation in [JOIN, *computations(5, "train", 3, (5, 5))]:
        lines = list(computation.lines)
        expected = set()
        for order in permutations(lines):
            known = set(computation.inputs)
            if all([known.issuperset(line.args), known.add(line.name)][0] for line in order):
                expected.add(order)
        assert set(map(tuple, orders(lines))) == expected
        assert len(list(orders(lines))) == len(expected)
