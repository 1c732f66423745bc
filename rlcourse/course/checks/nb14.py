"""Checks of lesson 14: cheats for three judges, inputs that no wrong program survives, a reward, optima by hand."""

from collections.abc import Callable

import numpy as np
import torch

from rlcourse.course.checks import Question, between, draw
from rlcourse.tasks.kernels import judge, language
from rlcourse.tasks.kernels.clock import A10G, eager_us, launch_us, optimum
from rlcourse.tasks.kernels.judge import LARGEST, TEST_INPUTS, agrees, draw_inputs, execute, judge_program, reference
from rlcourse.tasks.kernels.language import REDUCTIONS, Computation, read_computation

q1 = Question("q1", "cheat", hint="Begin with level 1. Of which values does memory hold a copy before you start?")
COPY_US = A10G.launch_us + 2 * 4 * A10G.rows * A10G.columns / A10G.bytes_per_us  # a matrix read and written


def trials(computation: Computation, level: int) -> list[tuple[dict, dict]]:
    """Inputs that a level tries a program on, with the values that it should have. Level 3 sees one column."""
    if level < 3:
        return [judge.case(computation, *tried) for tried in TEST_INPUTS]
    drawn = [draw_inputs(computation, seed, 1) for seed in range(3)]
    found = [{name: np.abs(x) + 0.01 for name, x in inputs.items()} for inputs in drawn]
    return [(inputs, reference(computation, inputs)) for inputs in found]


def counted_us(text: str, computation: Computation, level: int) -> float:
    """As the judge of a level counts. Raises AssertionError for a program that it refuses."""
    try:
        program = language.parse(text)
        launches = language.compile_program(program, computation, stale=level == 1)
    except language.CompileError as error:
        raise AssertionError(f"the judge refuses it: {error}") from None
    for inputs, values in trials(computation, level):
        memory = inputs
        if level == 1:
            with np.errstate(over="ignore"):
                memory = {name: value.astype(np.float32) for name, value in values.items()} | inputs
            memory["y"] = np.full_like(memory["y"], np.nan)
        assert agrees(execute(program, memory)["y"], values["y"]), "the judge says: y is wrong"
    us = sum(launch_us(launch) for launch in launches if not (level == 2 and launch.side))
    assert us > COPY_US - 1e-9, f"the judge does not believe {us:.1f} µs: to copy a matrix takes {COPY_US:.1f}"
    return us


def must_cheat(text: str, computation: Computation, level: int) -> None:
    """Raise AssertionError for what is no cheat of the level."""
    assert isinstance(text, str), f"the program should be a text, not {type(text).__name__}"
    us, (least, lines) = counted_us(text, computation, level), optimum(computation)
    assert us <= least - 1e-9, f"counted {us:.1f} µs, and an honest program takes {least:.1f}: no cheat yet"
    honest, fastest = judge_program(text, computation), judge_program(" ".join(map(str, lines)), computation)
    assert not honest.correct or honest.speedup <= fastest.speedup * (1 + 1e-6), "that is honest"


DRAWN = {"JOIN": ("add", "sub", "mul", "max", "min"), "MAP": ("relu", "abs", "neg"), "REDUCE": ("rowsum", "rowmax")}
DRAWN["SIGN"] = DRAWN["MAP"][:2]
# Here and in q4 words of DRAWN stand for an operation that is drawn, p to s for inputs, A to D for results.
KEPT = "A = JOIN p q ; B = MAP A ; y = JOIN B r", "A = exp p ; B = REDUCE A ; y = div A B", "A = neg p ; y = JOIN A q"
REDUCED = "A = exp p ; B = REDUCE A ; y = div A B", "A = sigmoid p ; B = mul q A ; C = REDUCE B ; y = sub B C"
SIGNED = (
    "A = SIGN p ; B = sub A q ; y = min r B",
    "A = SIGN p ; B = mul q A ; y = max B p",
    "A = SIGN p ; y = sigmoid A",
)


def drawn(template: str) -> Computation:
    names = dict(zip("pqrs", ("uvwx"[i] for i in torch.randperm(4)), strict=True))
    words = (choice(DRAWN.get(word, [names.get(word, word.lower())])) for word in template.split())
    return read_computation(" ".join(words))


def check_cheat(f, level: int, templates: tuple[str, ...]) -> None:
    for computation in map(drawn, templates):
        lines = [[line.name, line.op, *line.args] for line in computation.lines]
        try:
            must_cheat(f(lines, level), computation, level)
        except AssertionError as error:
            raise AssertionError(f"{computation}: {error}") from None


q1.case("level 1: memory is not cleared, but for y")(lambda f: check_cheat(f, 1, KEPT))
q1.case("level 2: the side stream is not timed, and nobody is faster than a copy")(lambda f: check_cheat(f, 2, KEPT))
q1.case("level 3: positive inputs of one column, where a reduction or a sign says nothing")(
    lambda f: check_cheat(f, 3, REDUCED + SIGNED)
)

q2 = Question("q2", "trial", hint="List the kinds of rows first: what must be in a row to expose each wrong program?")


def computation_with(op: str) -> Computation:
    u, v, w = (list("uvwx")[i] for i in torch.randperm(4)[:3])
    unary = op in ("abs", "relu", "neg", "sigmoid", *REDUCTIONS)
    inner = f"a = {op} {u}" if unary else f"a = {op} {u} {v}"
    return read_computation(f"{inner} ; y = {choice(('add', 'sub'))} a {w if unary or draw(0, 1) else v}")


def choice(items) -> str:
    return items[draw(0, len(items) - 1)]


def outcome(computation: Computation, inputs: dict, op: str = "", instead: Callable | None = None, dtype=np.float64):
    """y in a dtype, with something else in the place of one operation."""
    values = {name: value.astype(dtype) for name, value in inputs.items()}
    with np.errstate(all="ignore"):
        for line in computation.lines:
            run = instead if line.op == op else language.OPERATIONS[line.op]
            values[line.name] = run(*(values[name] for name in line.args))
    return values["y"]


def asked(f, computation: Computation) -> dict[str, np.ndarray]:
    """The inputs that `f` draws. Raises AssertionError if they are none, or are the same for another seed."""
    names, seed = list(computation.inputs), draw(0, 10**6)
    first, second = found = [f(names, number) for number in (seed, seed + draw(1, 50))]
    for values in found:
        shape = list(values.shape) if torch.is_tensor(values) else type(values).__name__
        right = torch.is_tensor(values) and values.dim() == 3 and len(values) == len(names)
        assert right, f"expected a tensor [{len(names)} inputs, rows, columns], got {shape}"
        assert 0 < values[0].numel() <= 64, f"an input has {values[0].numel()} numbers, and at most 64 are tried"
        assert values.isfinite().all(), "all inputs must be finite"
    same = first.shape == second.shape and bool((first == second).flatten(1).float().mean(1).max() > 0.5)
    assert not same, "another seed gives the same numbers: a program that has seen them could know the answers by heart"
    return {name: value.double().numpy().astype(np.float32) for name, value in zip(names, first, strict=True)}


@q2.cases_of({  # by case: op, what a wrong program computes instead, what that is
    "signs": [("abs", lambda v: v, "leaves out an `abs`"), ("relu", lambda v: v, "leaves out a `relu`")],
    "reductions": [
        ("rowsum", lambda v: v.max(1, keepdims=True), "takes `rowmax` for `rowsum`"),
        ("rowmax", lambda v: v[:, :1], "takes the first number of a row for its largest"),
        ("rowsum", lambda v: v[:, :4].sum(1, keepdims=True), "adds up four columns at most"),
        ("rowmax", lambda v: np.maximum(v.max(1, keepdims=True), 0), "starts its search for the largest at 0"),
    ],
    "which operand is which": [
        ("sub", lambda v, w: w - v, "subtracts the wrong way round"),
        ("div", lambda v, w: w / v, "divides the wrong way round"),
        ("max", lambda v, w: v, "takes the first operand for the larger one"),
        ("mul", lambda v, w: v * v, "multiplies an operand by itself"),
    ],
    "large and small numbers": [
        ("sigmoid", lambda v: (v > 0) * 1.0, "has a step for `sigmoid`"),
        ("sigmoid", lambda v: 0.5 + v / 4 - v**3 / 48, "has a sigmoid that is right near 0 alone"),
        ("max", lambda v, w: np.minimum(np.maximum(v, w), 3), "has no value above 3"),
    ],
})  # fmt: skip
def _(f, wrong):
    for op, instead, words in wrong:
        computation = computation_with(op)
        inputs = asked(f, computation)
        y, right = outcome(computation, inputs), outcome(computation, inputs, dtype=np.float32)
        small = (np.isfinite(y) & (np.abs(y) <= LARGEST)).mean() > 0.5
        assert small, f"{computation}: most results are too large to be compared"
        assert agrees(right, y), f"{computation}: float32 is not exact enough there, so a right program is refused"
        survives = agrees(outcome(computation, inputs, op, instead), y)
        assert not survives, f"{computation}: a program that {words} is not found out"


q3 = Question("q3", "reward", hint="What does the empty program earn on average, and what a correct one in twenty?")
Kind = tuple[str, list[tuple[float, float, float, float]]]  # words; share, compiled, correct, measured speed-up


def programs(words: str, correct: float, speedup: float, compiled: float = 1.0, wrong: float | None = None) -> Kind:
    """Right so often; `compiled`: how often it compiles where it is wrong; `wrong`: how fast it then seems."""
    missed, fast = 1 - correct, speedup if wrong is None else wrong
    failed = [(missed * compiled, 1.0, 0.0, fast), (missed * (1 - compiled), 0.0, 0.0, 0.0)]
    return words, [outcome for outcome in [(correct, 1.0, 1.0, speedup), *failed] if outcome[0]]


def means(f, kinds: list[Kind]) -> list[float]:
    """The mean reward of each kind, from one call with all outcomes, shuffled."""
    rows = torch.tensor([outcome for _, outcomes in kinds for outcome in outcomes], dtype=torch.float64)
    order = torch.randperm(len(rows))
    found = f(*rows[order, 1:].float().T.contiguous())
    right = torch.is_tensor(found) and found.shape == rows.shape[:1] and bool(found.isfinite().all())
    assert right, f"expected one finite reward for each of {len(rows)} programs: is there a `return`?"
    parts = (rows[:, 0] * found.double()[order.argsort()]).split([len(outcomes) for _, outcomes in kinds])
    return [part.sum().item() for part in parts]


EAGER = programs("right, as fast as eager", 1.0, 1.0)
TWICE = programs("right, twice as fast", 1.0, 2.0)
FOURFOLD = programs("right, 4 times as fast", 1.0, 4.0)
EMPTY = programs("compiles, computes nothing", 0.0, 1.0)


@q3.cases_of({  # case: what draws pairs of kinds, the better one first
    "the empty program, where few others are right": lambda: [
        (programs("an attempt at the whole, seldom right", correct, 1.0, compiled), EMPTY)
        for correct, compiled in ((0.05, 0.5), (between(0.05, 0.08), between(0.5, 0.6)))  # first the edge
    ],
    "a first kernel, slower than eager": lambda: [
        (programs("right, slower than eager", 1.0, between(0.2, 0.6)), worse)
        for worse in (programs("wrong, as fast as eager", 0.0, 1.0), ("no code", [(1.0, 0.0, 0.0, 0.0)]))
    ],
    "speed is worth a risk, far up": lambda: [
        (programs("2.5 times as fast, right three times in four", often, 2.5), EAGER)
        for often in (0.75, between(0.75, 0.85))
    ] + [
        (programs("7 times as fast and more, right two times in three", seldom, speedup), FOURFOLD)
        for seldom, speedup in ((0.67, 7.0), (between(0.67, 0.72), between(7, 8)))
    ],
    "a clock that is wrong now and then": lambda: [
        (TWICE, ("as fast as eager, now and then measured as a wonder", [
            (0.99, 1.0, 1.0, 1.0), (0.01, 1.0, 1.0, float(draw(2_000, 10_000)))
        ]))
    ],
    "a fast program that is seldom right": lambda: [
        (EAGER, programs("seldom right, faster then", between(0.06, 0.1), between(2, 2.9), wrong=between(20, 60)))
    ],
})  # fmt: skip
def _(f, pairs):
    wrong = programs("wrong, and fast", 0.0, float(draw(20, 90)))
    for better, worse in [*pairs(), (EAGER, wrong), (TWICE, EAGER), (EAGER, EMPTY)]:  # what every reward tells apart
        high, low = means(f, [better, worse])
        said = f"“{worse[0]}” earns {low:.3g} on average, and “{better[0]}”, which should earn more, only {high:.3g}"
        assert high > low + 1e-6 * (1 + abs(low)), said


q4 = Question("q4", "by_hand", hint="Count the tensors that are held after each line, on paper, for each problem.")
PROBLEMS = {
    1: "A = JOIN p q ; B = JOIN r s ; y = JOIN A B",
    2: "A = MAP p ; B = JOIN q r ; C = JOIN B q ; y = JOIN A C",
    3: "A = MAP p ; B = JOIN q r ; C = REDUCE B ; D = JOIN A C ; y = JOIN D p",
    4: "A = MAP p ; B = JOIN p q ; C = JOIN B r ; y = JOIN C A",
}


@q4.cases_of({f"problem {number}": number for number in PROBLEMS})
def _(f, problem):
    for _ in range(4):
        computation = drawn(PROBLEMS[problem])
        text = f(problem, [str(line) for line in computation.lines])
        assert isinstance(text, str), f"the program should be a text, not {type(text).__name__}"
        finding = judge_program(text, computation)
        assert finding.correct, f"{computation}: {finding.reason}"
        least, us = optimum(computation)[0], eager_us(computation) / finding.speedup
        assert us < least * (1 + 1e-6), f"{computation}: right, {us:.1f} µs, and there is one that takes {least:.1f}"
