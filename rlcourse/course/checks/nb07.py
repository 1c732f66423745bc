"""Checks of the exercises of lesson 07: a recorded step without an if, a draw by tiles, and slots."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, draw
from rlcourse.course.checks.builders import Names, drawn_until, left_in

q1 = Question("q1", "tape_of_the_end", hint="What had ended is needed first and written last. Truth is the number 1.")
OPERATIONS = {
    "add": lambda a, b: a + b,
    "equal": lambda a, b: int(a == b),
    "less": lambda a, b: int(a < b),
    "and": lambda a, b: a * b,
    "or": lambda a, b: max(a, b),
    "choose": lambda a, b, c: b if a > 0 else c,
}
Row = tuple[int, int, int]  # token, position, ended


def played(tape, memory: dict[str, int], drawn: int) -> Row:
    """Replay a tape for one row. Raises AssertionError for an instruction that the machine does not know."""
    memory["drawn"] = drawn
    for number, instruction in enumerate(tape):
        said = f"instruction {number}, {instruction!r},"
        if not isinstance(instruction, list | tuple) or len(instruction) < 2 or instruction[0] not in OPERATIONS:
            raise AssertionError(f"{said} is not (operation, target, sources...), or has an unknown operation.")
        operation, target, *sources = instruction
        if len(sources) != (count := 3 if operation == "choose" else 2):
            raise AssertionError(f"{said} needs {count} sources.")
        for source in sources:
            if type(source) is not int and source not in memory:
                raise AssertionError(f"{said} reads {source!r}, no whole number and nothing that has been written.")
        memory[target] = OPERATIONS[operation](*(memory[s] if isinstance(s, str) else s for s in sources))
    return memory["token"], memory["position"], memory["ended"]


def check_tape(f, limit: int, position: int, ended: int, draws: str) -> None:
    """draws: what the model draws for one row, replay by replay: "w", some word, or "e", the end."""
    eos = draw(100, 900)
    pad, row = eos + draw(1, 90), (draw(1, 99), position, ended)
    special = eos, pad, limit
    tape, memory = f(*special), dict(zip(("token", "position", "ended"), row, strict=True))
    assert isinstance(tape, list | tuple), "return a list of instructions, (operation, target, sources...)."
    for kind in draws:
        drawn = eos if kind == "e" else draw(1, 99)
        ended, position = row[2], row[1] + (not row[2])
        expected = (pad, position, 1) if ended else (drawn, position, int(drawn == eos or position >= limit))
        found = played(tape, memory, drawn)
        assert found == expected, (
            f"with eos, pad, limit = {special}: from token, position, ended = {row} and drawn {drawn} your tape makes "
            f"{found}, not {expected}"
        )
        row = expected


q1.case("a row writes, ends by itself, and stays so, also one that had ended before")(lambda f: [
    check_tape(f, 1000, draw(3, 40), 0, "wwewww"),
    check_tape(f, 1000, draw(3, 9), 1, "wweww"),
    check_tape(f, 20, 20, 1, "ewwe"),
])  # fmt: skip


@q1.case("a row runs into the limit, or ends exactly there")
def _(f):
    for draws in ("wwwwww", "wwewww", "ewwewe"):
        limit = draw(20, 200)
        check_tape(f, limit, limit - 3, 0, draws)


q2 = Question("q2", "mended_draw", hint="Follow one u by hand on four tokens in two tiles, line by line.")
PLANTED = {
    "scale": "each tile is measured by its own largest logit: bring all of a row to one scale",
    "left": "within the tile, look for what is left of the goal: take off the mass of the tiles before it",
    "reach": "the running sum must exceed the goal, not reach it: a token of probability 0 was drawn",
    "tile": "the log-prob is that within the tile: divide by the mass of the whole row",
}


def wrong_draw(logits: Tensor, tile: int, uniform: Tensor, wrong: Names) -> tuple[Tensor, Tensor]:
    """With some of the planted mistakes, row by row in float64."""
    tokens, logprobs = [], []
    for row, u in zip(logits.double(), uniform.tolist(), strict=True):
        masses = [(piece - (piece if "scale" in wrong else row).max()).exp() for piece in row.split(tile)]
        sums = torch.stack([mass.sum() for mass in masses])
        goal = u * sums.sum()

        def first(values: Tensor, goal: Tensor) -> int:
            running = values.cumsum(0)
            return int((running >= goal if "reach" in wrong else running > goal).long().argmax())

        which = first(sums, goal)
        place = first(masses[which], goal if "left" in wrong else goal - sums[:which].sum())
        tokens.append(which * tile + place)
        logprobs.append((masses[which][place] / (sums[which] if "tile" in wrong else sums.sum())).log())
    return torch.tensor(tokens), torch.stack(logprobs)


@q2.expects(also=left_in(wrong_draw, PLANTED) | {
    "That is the place within the tile: add the tokens of the tiles before it.": lambda logits, tile, u: (
        draw_flat(logits, tile, u)[0] % tile, draw_flat(logits, tile, u)[1]
    ),
    "That is the most probable token: where u falls decides.": lambda logits, tile, u: (
        logits.argmax(-1), draw_flat(logits, tile, u)[1]
    ),
}, parts={("the token ids", "the log-probs"): None}, atol=1e-4)  # fmt: skip
def draw_flat(logits: Tensor, tile: int, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """By the running sum over the whole row, in float64."""
    logpi = logits.double().log_softmax(-1)
    tokens = (logpi.exp().cumsum(-1) <= uniform[:, None].double()).sum(-1)
    return tokens, logpi.gather(1, tokens[:, None])[:, 0]


def check_draw(f, logits: Tensor, tile: int, tokens: Tensor | None = None) -> None:
    """tokens: those that u falls on, in the middle of their pieces of [0, 1]; some likely ones if not given."""
    pi = logits.double().softmax(-1)
    tokens = torch.multinomial((pi > 0.01) * pi, 1)[:, 0] if tokens is None else tokens
    middle = pi.cumsum(-1) - pi / 2
    q2.check(f, logits, tile, middle.gather(1, tokens[:, None])[:, 0].float())


q2.case(
    "tiles of some tokens, of one and of all, a last tile that is not full; logits whose exp is infinite"
)(lambda f: [
    *(check_draw(f, 1.5 * torch.randn(16, 24), tile) for tile in (6, 1, 24)),
    check_draw(f, torch.randn(3, 23), 5, torch.tensor([22, 21, 20])),
    check_draw(f, torch.randn(6, 12) + 200.0, 4),
    check_draw(f, torch.randn(8, 12) - 4.0 * (torch.arange(12) // 4 == 1), 4),
])  # fmt: skip


@q2.case("u = 0 falls on the first token that can be drawn")
def _(f):
    logits = torch.randn(3, 8)
    logits[:, 0] = logits[1, 1] = -torch.inf
    q2.check(f, logits, 4, torch.zeros(3))
    logits = torch.randn(2, 12)
    logits[:, 0], logits[:, 1:4] = -torch.inf, logits[:, 1:4] - 10_000  # a tile whose mass rounds to 0
    q2.check(f, logits, 4, torch.zeros(2))


q3 = Question("q3", "best_slots", hint="After how many steps has the last answer ended, with so many slots? Try all.")


def steps_needed(lengths: list[int], slots: int, rule: str) -> int:
    """Steps until all answers have ended, one by one; or what a wrong rule says."""
    if rule == "batches":
        return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))
    if rule == "evenly":
        return -(-sum(lengths) // slots)
    left, waiting, step = [], sorted(lengths, reverse=True) if rule == "sorted" else list(lengths), 0
    while left or waiting:
        while waiting and len(left) < slots:
            left.append(waiting.pop(0))
        step += 1
        left = [n - 1 for n in left if n > 1]
    return step


@q3.expects({
    "batches": "You wait for the longest of each batch: a free slot takes the next answer at once.",
    "evenly": "You divided the tokens evenly: an answer stays in its slot until it ends.",
    "sorted": "You sorted the longest first: they wait in the order given.",
    "no host": "You left the host out: a step never takes less than that.",
    "steps": "You made the steps few, not the time short: more slots make each step longer.",
}, parts={"the number of slots": None})  # fmt: skip
def slots_by(lengths: Tensor, host: float, fixed: float, row: float, most: int, rule: str = "") -> int:
    """By the milliseconds with 1 to `most` slots, or what a wrong rule takes for them."""
    answers, host = lengths.tolist(), 0.0 if rule == "no host" else host
    steps = [1.0 if rule == "steps" else max(host, fixed + row * slots) for slots in range(1, most + 1)]
    times = [step * steps_needed(answers, i + 1, rule) for i, step in enumerate(steps)]
    return 1 + times.index(min(times))


def some_answers() -> tuple[Tensor, float, float, float, int]:
    """Lengths of answers, one of them much longer than the others, prices, and the most slots."""
    lengths = (1 + torch.distributions.Geometric(1 / 9).sample((20,)).long()).clamp(max=200)
    lengths[draw(8, 19)] = draw(20, 100)
    return lengths, between(0, 2.5), between(0.3, 1.0), between(0.02, 0.2), 20


@q3.cases_of({  # case: the rules that, like 1, 2 and all slots, do not give the best number
    "a host that hides some rows": ["no host"],
    "rows that cost, and a price for each step": ["steps", "no host"],
    "the order in which they wait": ["sorted"],
    "one answer that is much longer than the others": ["evenly", "batches"],
})  # fmt: skip
def _(f, rules):
    def deceiving(*inputs) -> bool:
        return slots_by(*inputs) not in (1, 2, 20, *(slots_by(*inputs, rule) for rule in rules))

    q3.check(f, *drawn_until(deceiving, some_answers))
