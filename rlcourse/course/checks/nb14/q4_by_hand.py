"""q4: the least counted time of computations that one launch does not hold as they are written."""

import torch

from rlcourse.course.checks import Question, draw
from rlcourse.tasks.kernels.judge import judge_program
from rlcourse.tasks.kernels.language import LETTERS, Computation, read_computation
from rlcourse.tasks.kernels.optimum import eager_us, optimum

q4 = Question("q4", "by_hand", hint="Count the tensors that are held after each line, on paper, for each problem.")

JOINS = ("add", "sub", "mul", "max", "min")
MAPS = ("relu", "abs", "neg", "sigmoid")
REDUCTIONS = ("rowsum", "rowmax")
# JOIN, MAP and REDUCE stand for an operation that is drawn, p to s for inputs, A to D for results.
PROBLEMS = {
    1: "A = JOIN p q ; B = JOIN r s ; y = JOIN A B",
    2: "A = MAP p ; B = JOIN q r ; C = JOIN B q ; y = JOIN A C",
    3: "A = MAP p ; B = JOIN q r ; C = REDUCE B ; D = JOIN A C ; y = JOIN D p",
    4: "A = MAP p ; B = JOIN p q ; C = JOIN B r ; y = JOIN C A",
}


def choice(items: tuple[str, ...]) -> str:
    return items[draw(0, len(items) - 1)]


def drawn(problem: int) -> Computation:
    """The problem with other operations and names."""
    words = PROBLEMS[problem].split()
    inputs = dict(zip("pqrs", ("uvwx"[i] for i in torch.randperm(4)), strict=True))
    results = dict(zip("ABCD", LETTERS[draw(0, 2) :], strict=False))
    operations = {"JOIN": JOINS, "MAP": MAPS, "REDUCE": REDUCTIONS}
    return read_computation(
        " ".join(
            choice(operations[word]) if word in operations else (inputs | results).get(word, word) for word in words
        )
    )


def check_by_hand(f, problem: int) -> None:
    for _ in range(4):
        computation = drawn(problem)
        text = f(problem, [str(line) for line in computation.lines])
        if not isinstance(text, str):
            raise AssertionError(f"the program should be a text, not {type(text).__name__}")
        finding = judge_program(text, computation)
        assert finding.correct, f"{computation}: {finding.reason}"
        least = optimum(computation)[0]
        us = eager_us(computation) / finding.speedup
        assert us < least * (1 + 1e-6), f"{computation}: right, {us:.1f} µs, and there is one that takes {least:.1f}"


def add_case(problem: int, words: str) -> None:
    @q4.case(words)
    def _(f):
        check_by_hand(f, problem)


add_case(1, "problem 1")
add_case(2, "problem 2")
add_case(3, "problem 3")
add_case(4, "problem 4")
