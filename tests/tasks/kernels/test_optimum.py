"""Counted times, by hand, and the least of them by search, against all programs there are."""

from itertools import permutations, product

import pytest

from rlcourse.tasks.kernels.clock import A10G, H200, Card, optimum, program_us
from rlcourse.tasks.kernels.language import CompileError, Statement, compile_program, parse, read_computation
from tools.embedded.computations import computations

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


ROUND = Card("round", launch_us=10.0, bytes_per_us=4.0, operations_per_us=100.0, rows=10, columns=20)
# A matrix has 200 numbers, 800 bytes, 200 µs; a number a row 10, 40 bytes, 10 µs. An operation on a matrix: 2 µs.


CHAIN = "a = add u v ; b = relu a ; y = mul b w"
SHARE = "a = exp u ; b = rowsum a ; c = sqrt b ; y = div a c"
TIMES = {  # of a computation and its program: launches, loads, stores, operations
    (CHAIN, "a = add u v end put ; b = relu a end put ; y = mul b w end put ;"): 3 * 10 + 5 * 200 + 3 * 200 + 3 * 2,
    (CHAIN, "a = add u v put ; b = relu a put ; y = mul b w put ;"): 10 + 3 * 200 + 3 * 200 + 3 * 2,
    (CHAIN, "a = add u v keep ; b = relu a keep ; y = mul b w put ;"): 10 + 3 * 200 + 1 * 200 + 3 * 2,
    # A number a row moves little, and its operation counts what it reads.
    (SHARE, "a = exp u end put ; b = rowsum a end put ; c = sqrt b end put ; y = div a c put ;"): 4 * 10
    + (200 + 200 + 10 + 200 + 10)
    + (200 + 10 + 10 + 200)
    + (2 + 2 + 0.1 + 2),
}


@pytest.mark.parametrize(("computation", "program"), TIMES)
def test_each_launch_load_store_and_operation_is_paid_for(computation, program):
    found = program_us(compile_program(parse(program), read_computation(computation)), ROUND)
    assert found == pytest.approx(TIMES[computation, program])
