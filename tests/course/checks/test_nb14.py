"""The checks of lesson 14 pass what is right, kill what is wrong, and name the mistake."""

import itertools

import pytest
import torch
from answers import common_tests

from rlcourse.course.checks import Local
from rlcourse.course.checks.nb14 import QUESTIONS
from rlcourse.course.checks.nb14.q4_by_hand import PROBLEMS, drawn
from rlcourse.tasks.kernels.language import compile_program, eager, parse, write
from rlcourse.tasks.kernels.optimum import fits_one_launch, optimum, program_us

# q1: cheats ------------------------------------------------------------------------------------------------------


def eager_text(lines, side=""):
    return " ".join(f"{side}{name} = {' '.join(rest)} end put ;" for name, *rest in lines)


def fused_text(lines):
    return " ".join(f"{name} = {' '.join(rest)} {'end put' if name == 'y' else 'keep'} ;" for name, *rest in lines)


def skipping(lines, ops=("rowsum", "rowmax", "relu", "abs")):
    """One launch without the lines that give back what they get, if that is an input or a column."""
    text = fused_text([line for line in lines])
    for name, op, *args in lines[:-1]:
        if op in ops and (op.startswith("row") or args[0] in "uvwx"):
            text = text.replace(f"{name} = {op} {args[0]} keep ; ", "", 1)
            words = text.split()
            text = " ".join(args[0] if word == name else word for word in words)
            lines = [[n, o, *(args[0] if a == name else a for a in rest)] for n, o, *rest in lines if n != name]
            return skipping(lines, ops)
    return text


def cheat(lines, level):
    if level == 3:
        return skipping(lines)
    return ("" if level == 1 else eager_text(lines[:-1], "side ") + " ") + eager_text(lines[-1:])


def cheat_in_one_side_launch(lines, level):
    """Level 2 with a side launch that goes on where the registers allow it; level 1 with launches of nothing."""
    if level != 2:
        return cheat(lines, level)
    first, *others = lines[:-1]
    return " ".join([eager_text([first], "side "), *(eager_text([o], "side ") for o in others), eager_text(lines[-1:])])


# q2: inputs ------------------------------------------------------------------------------------------------------


def trial(inputs, seed):
    found = []
    for number in range(len(inputs)):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        x = torch.randn(8, 8, generator=generator)
        x[3:5] = x[3:5] * 6
        x[5] = x[5] * 0.2
        x[6] = x[6].abs() + 0.5
        x[7] = -x[7].abs() - 0.5
        found.append(x)
    return torch.stack(found)


def uniform_trial(inputs, seed):
    """Even numbers: centred, wide, all negative, all positive."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.tensor([-1.0, -8.0, -3.0, 0.5, -1.0, -9.0, -4.0, 0.1])[:, None]
    high = torch.tensor([1.0, 8.0, -0.5, 3.0, 1.0, 9.0, -0.2, 2.0])[:, None]
    return low + (high - low) * torch.rand(len(inputs), 8, 8, generator=generator)


def normal(scale=1.0, shift=0.0, rows=8, columns=8, change=lambda x: x):
    def function(inputs, seed):
        generator = torch.Generator().manual_seed(seed)
        return change(torch.randn(len(inputs), rows, columns, generator=generator) * scale + shift)

    return function


def same_for_all_inputs(inputs, seed):
    return trial(["u"], seed).expand(len(inputs), -1, -1).clone()


# q3: rewards -----------------------------------------------------------------------------------------------------


def reward(compiled, correct, speedup):
    return correct * (1 + speedup.clamp(max=20))


def reward_by_cases(compiled, correct, speedup):
    found = torch.zeros_like(speedup)
    for i in range(len(found)):
        if correct[i] > 0:
            found[i] = 0.5 + 2 * min(float(speedup[i]), 12.0)
    return found


REWARDS = {
    "the lesson's": lambda compiled, correct, s: correct * (0.2 + s.clamp(max=4) - 1),
    "compiling": lambda compiled, correct, s: 0.3 * compiled + correct * (0.3 + s.clamp(max=10)),
    "no limit": lambda compiled, correct, s: correct * (0.3 + s),
    "wrong and fast": lambda compiled, correct, s: 0.3 * correct + s.clamp(max=10),
    "a low limit": lambda compiled, correct, s: correct * (0.3 + s.clamp(max=4)),
    "correct alone": lambda compiled, correct, s: correct,
    "a logarithm": lambda compiled, correct, s: correct * (3 + s.clamp(min=0.01).log2()),
    "speed alone": lambda compiled, correct, s: s,
    "a fine for wrong ones": lambda compiled, correct, s: (
        correct * s.clamp(max=10) + (1 - correct) * s.clamp(max=10) / 2
    ),
}


# q4: by hand -----------------------------------------------------------------------------------------------------


def by_search(problem, lines):
    """The other road: all orders, all words behind each line."""
    from rlcourse.tasks.kernels.language import read_computation

    return write(optimum(read_computation(" ; ".join(lines)))[1])


def by_hand(problem, lines):
    order = {1: (1, 0, 2), 2: (1, 2, 0, 3), 3: (1, 2, 0, 3, 4), 4: (1, 2, 0, 3)}[problem]
    cut = {1: 0, 4: 1}.get(problem)
    words = []
    for place, line in enumerate(order):
        last = place == len(order) - 1
        words.append(f"{lines[line]} {'end put' if last or place == cut else 'keep'} ;")
    return " ".join(words)


def in_order(*how):
    """The lines as they stand, with these words behind them."""
    return lambda problem, lines: " ".join(f"{line} {word} ;" for line, word in zip(lines, how, strict=False))


def cut_before_the_last(problem, lines):
    kept = [f"{line} put ;" for line in lines[:-2]]
    return " ".join([*kept, f"{lines[-2]} end put ;", f"{lines[-1]} end put ;"])


RIGHT = {
    "q1": [cheat, cheat_in_one_side_launch],
    "q2": [trial, uniform_trial],
    "q3": [reward, reward_by_cases],
    "q4": [by_hand, by_search],
}

WRONG = {
    "q1": {
        "eager": lambda lines, level: eager_text(lines),
        "fused": lambda lines, level: fused_text(lines),
        "reads y": lambda lines, level: "y = max y y end put ;",
        "all on the side": lambda lines, level: eager_text(lines, "side "),
        "the last line alone": lambda lines, level: eager_text(lines[-1:]),
        "any relu is idle": lambda lines, level: skipping(lines, ()),
        "no text": lambda lines, level: torch.zeros(3),
    },
    "q2": {
        "normal": normal(),
        "positive": normal(change=torch.abs),
        "one column": normal(columns=1, scale=3),
        "four columns": normal(columns=4, rows=16, scale=3),
        "huge": normal(scale=1e8),
        "small": normal(scale=0.01),
        "shifted": normal(shift=2, scale=3),
        "one seed": lambda inputs, seed: trial(inputs, 0),
        "too many": normal(rows=100),
        "all inputs alike": same_for_all_inputs,
        "wrong shape": lambda inputs, seed: trial(inputs, seed)[0],
    },
    "q3": REWARDS,
    "q4": {
        "eager": in_order(*["end put"] * 5),
        "one launch": in_order("keep", "keep", "keep", "keep", "keep"),
        "cut before the last": cut_before_the_last,
        "kept and lost": in_order("end keep", "keep", "keep", "keep", "put"),
        "a constant": lambda problem, lines: "a = add u v end put ; b = mul w x keep ; y = sub a b end put ;",
    },
}

NAMED = {
    ("q1", "eager"): "no cheat yet",
    ("q1", "fused"): "no cheat yet",
    ("q1", "reads y"): "y is wrong",
    ("q1", "all on the side"): "does not believe",
    ("q1", "the last line alone"): "neither in memory nor in a register",
    ("q1", "no text"): "should be a text",
    ("q2", "normal"): "starts its search for the largest at 0",
    ("q2", "positive"): "leaves out an `abs`",
    ("q2", "four columns"): "adds up four columns",
    ("q2", "huge"): "too large to be compared",
    ("q2", "one seed"): "by heart",
    ("q2", "too many"): "at most 64",
    ("q2", "all inputs alike"): "subtracts the wrong way round",
    ("q2", "wrong shape"): "expected a tensor",
    ("q2", "small"): "right near 0 alone",
    ("q3", "the lesson's"): "slower than eager",
    ("q3", "compiling"): "computes nothing",
    ("q3", "no limit"): "measured as a wonder",
    ("q3", "wrong and fast"): "wrong",
    ("q3", "a low limit"): "4 times as fast",
    ("q3", "correct alone"): "as fast as eager",
    ("q4", "eager"): "there is one that takes",
    ("q4", "one launch"): "out of registers",
    ("q4", "kept and lost"): "neither in memory nor in a register",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_best_program_of_each_problem_has_one_shape(problem):
    """One launch is refused as the lines stand, and what is drawn changes neither the least time nor who takes it."""
    times = set()
    for seed in range(6):
        torch.manual_seed(seed)
        computation = drawn(problem)
        assert not fits_one_launch(computation)
        text = by_hand(problem, [str(line) for line in computation.lines])
        us = program_us(compile_program(parse(text), computation))
        assert us == pytest.approx(optimum(computation)[0])
        assert us < program_us(compile_program(eager(computation), computation))
        times.add(round(us, 6))
    assert len(times) == 1


def test_no_program_of_problem_1_holds_it_in_one_launch():
    torch.manual_seed(0)
    computation = drawn(1)
    fitting = 0
    for order in itertools.permutations(computation.lines):
        if order[-1].name == "y":
            fitting += fits_one_launch(type(computation)(order))
    assert fitting == 0


def rewarding(compiling: float, being_right: float, limit: float):
    """Hint 3's shape. compiling: as a share of what being right at eager's speed adds."""
    alpha = compiling * (being_right + 1)
    return Local(lambda compiled, correct, s: alpha * compiled + correct * (being_right + s.clamp(max=limit)))


def failed(function, seed: int) -> list[str]:
    return [case.name for case in QUESTIONS["q3"].run(function, seed).cases if not case.passed]


@pytest.mark.parametrize("compiling, being_right, limit", [(0.1, 0.05, 6.1), (0.1, 1.9, 7), (0, 1.0, 100)])
def test_the_rules_of_the_solution_hold_whatever_is_drawn(compiling, being_right, limit):
    for seed in range(10):
        assert failed(rewarding(compiling, being_right, limit), seed) == []


@pytest.mark.parametrize(
    "compiling, being_right, limit, case",
    [
        (0.11, 0.3, 10, "the empty program, where few others are right"),
        (0.1, 0.3, 5.5, "speed is worth a risk, far up"),
        (0.1, 2.2, 10, "speed is worth a risk, far up"),
        (0.1, 0.3, 102, "a clock that is wrong now and then"),
    ],
)
def test_beyond_the_rules_of_the_solution_a_reward_fails(compiling, being_right, limit, case):
    for seed in range(10):
        assert failed(rewarding(compiling, being_right, limit), seed) == [case]
