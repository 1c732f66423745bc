"""Checks of the exercises of lesson 07: a static cache, a tape without an if, a draw to mend, a number of slots."""

import functools
import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "attend_with_cache", hint="Write k and v at [row, position], then hide the slots behind position.")


def attend(q: Tensor, keys: Tensor, values: Tensor, lengths: list[int], scale: float | None = None) -> Tensor:
    """Attention by a loop over rows, over the first `lengths[r]` slots: q [R, G, D], keys, values [R, S, D] float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = torch.zeros(q.shape, dtype=torch.float64)
    for r, length in enumerate(lengths):
        for g in range(q.shape[1]):
            scores = scale * (keys[r, :length].double() @ q[r, g].double())
            weights = (scores - scores.logsumexp(0)).exp()
            found[r, g] = (weights[:, None] * values[r, :length].double()).sum(0)
    return found


def attend_masked_wrongly(q: Tensor, keys: Tensor, values: Tensor, lengths: list[int], after: bool) -> Tensor:
    """Scores (or, after the softmax, weights) times a mask of 0 and 1: q [R, G, D], keys, values [R, S, D]."""
    seen = torch.arange(keys.shape[1]) < torch.tensor(lengths)[:, None, None]
    scores = torch.einsum("rgd,rsd->rgs", q.double(), keys.double()) * q.shape[-1] ** -0.5
    weights = scores.softmax(-1) * seen if after else (scores * seen).softmax(-1)
    return torch.einsum("rgs,rsd->rgd", weights, values.double())


def check_cache(f, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
    at = positions.tolist()
    upto = [p + 1 for p in at]

    def filled(rows, places, new_k=k, new_v=v) -> tuple[Tensor, Tensor]:
        new_keys, new_values = keys.clone(), values.clone()
        new_keys[rows, places], new_values[rows, places] = new_k, new_v
        return new_keys, new_values

    own = torch.arange(len(at))
    there, all_slots, size = filled(own, positions), [keys.shape[1]] * len(at), q.shape[-1]
    all_rows, one_place = filled(slice(None), at, k[:, None], v[:, None]), filled(own, positions[:1].expand(len(at)))
    mistakes = {
        "You attend to all slots: hide those behind the position.": attend(q, *there, all_slots),
        "The new token must see itself too: slot `positions` counts.": attend(q, *there, [max(p, 1) for p in at]),
        "The new key and value do not stand in slot `positions`: write them first.": attend(q, keys, values, upto),
        "You wrote the value nowhere: only the key arrived.": attend(q, there[0], values, upto),
        "All rows were written at the position of the first: each row has its own.": attend(q, *one_place, upto),
        "Each row was written at all positions: index rows and positions together.": attend(q, *all_rows, upto),
        "You multiplied the scores by the mask: 0 is a score like any other, minus infinity is none.": (
            attend_masked_wrongly(q, *there, upto, after=False)
        ),
        "You hid the slots after the softmax: they have taken their share by then.": attend_masked_wrongly(
            q, *there, upto, after=True
        ),
        "The scores are not scaled: divide them by the square root of D.": attend(q, *there, upto, scale=1.0),
        "You divided the scores by D: it is the square root of D.": attend(q, *there, upto, scale=1 / size),
    }
    compare(f(q, k, v, keys, values, positions), attend(q, *there, upto), mistakes, atol=1e-4)


def random_cache(rows: int, group: int, slots: int, size: int, junk: float = 1.0) -> list[Tensor]:
    """q [R, G, D], k, v [R, D], keys, values [R, S, D]; `junk`: how large what stands in the cache is."""
    one = [torch.randn(rows, group, size), torch.randn(rows, size), torch.randn(rows, size)]
    return one + [junk * torch.randn(rows, slots, size) for _ in range(2)]


@q1.case("rows at different positions, the last slot included")
def _(f):
    check_cache(f, *random_cache(4, 3, 8, 6), torch.randperm(7)[:4])
    check_cache(f, *random_cache(2, 2, 5, 4), torch.tensor([4, 2]))


@q1.case("what an earlier completion left in the slots is not seen")
def _(f):
    q, k, v, keys, values = random_cache(3, 2, 9, 4)
    positions = torch.tensor([1, 4, 7])
    for r, p in enumerate(positions.tolist()):
        keys[r, p:] *= 30
        values[r, p:] *= 30
    check_cache(f, q, k, v, keys, values, positions)


@q1.case("an empty cache: the first token sees itself alone")
def _(f):
    q, k, v, keys, values = random_cache(2, 3, 4, 5)
    check_cache(f, q, k, v, keys, values, torch.tensor([0, 0]))
    compare(f(q, k, v, keys, values, torch.tensor([0, 0])), v[:, None].expand(2, 3, 5))


q2 = Question("q2", "tape_of_the_end", hint="What had ended is needed first and written last. Truth is the number 1.")

OPERATIONS = {
    "add": (2, lambda a, b: a + b),
    "equal": (2, lambda a, b: int(a == b)),
    "less": (2, lambda a, b: int(a < b)),
    "and": (2, lambda a, b: a * b),
    "or": (2, lambda a, b: max(a, b)),
    "choose": (3, lambda a, b, c: b if a > 0 else c),
}
Row = tuple[int, int, int]  # token, position, ended


def played(tape, memory: dict[str, int]) -> None:
    """Replay a tape for one row. Raises AssertionError for an instruction that the machine does not know."""
    for number, instruction in enumerate(tape):
        said = f"instruction {number}, {instruction!r},"
        if not isinstance(instruction, list | tuple) or len(instruction) < 2:
            raise AssertionError(f"{said} is not (operation, target, sources...).")
        operation, target, *sources = instruction
        if operation not in OPERATIONS or not isinstance(target, str):
            raise AssertionError(f"{said} has an unknown operation, or a target that is no name.")
        count, apply = OPERATIONS[operation]
        if len(sources) != count:
            raise AssertionError(f"{said} needs {count} sources.")
        values = []
        for source in sources:
            if isinstance(source, str) and source not in memory:
                raise AssertionError(f"{said} reads {source!r}, which nothing has written.")
            if not isinstance(source, str) and (isinstance(source, bool) or not isinstance(source, int)):
                raise AssertionError(f"{said} has a source that is neither a name nor a whole number.")
            values.append(memory[source] if isinstance(source, str) else source)
        memory[target] = apply(*values)


def next_row(row: Row, drawn: int, eos: int, pad: int, limit: int, wrong: str = "") -> Row:
    """One row after a replay, with an `if`; wrong: which usual mistake is in it."""
    token, position, ended = row
    if ended:
        token = drawn if wrong == "no pad" else pad
        position += wrong == "position"
        if wrong == "forgets":
            ended = int(drawn == eos)
        return token, position, ended
    ended = int(drawn == eos or (position + 1 >= limit and wrong != "no limit"))
    if wrong == "early" and position >= limit:
        ended = 1
    if wrong == "late":
        ended = int(drawn == eos or position >= limit)
    token = pad if wrong == "end lost" and ended else drawn
    position += not (wrong == "end not counted" and ended)
    return token, position, ended


TAPE_MISTAKES = {
    "no pad": "A row that had ended gets padding, whatever was drawn.",
    "position": "The position of a row that had ended must stay where it is.",
    "forgets": "A row that had ended stays so: the flag is what it was, or the new end.",
    "no limit": "A row whose position has reached the limit has ended, too.",
    "late": "You were one step late: a row ends when its position, once it has gone up, reaches the limit.",
    "end lost": "The last token of an answer turned into padding: write the flag after the token.",
    "end not counted": "The last token of an answer takes a place as well: the position goes up before the flag.",
}


def check_tape(f, eos: int, pad: int, limit: int, start: Row, draws: list[int]) -> None:
    tape = f(eos, pad, limit)
    if not isinstance(tape, list | tuple) or not tape:
        raise AssertionError("return a list of instructions, (operation, target, sources...).")
    memory = dict(zip(("token", "position", "ended"), start, strict=True))
    right, found = [start], [start]
    for drawn in draws:
        memory["drawn"] = drawn
        played(tape, memory)
        found.append(tuple(memory[name] for name in ("token", "position", "ended")))
        right.append(next_row(right[-1], drawn, eos, pad, limit))
    if found == right:
        return
    for wrong, said in TAPE_MISTAKES.items():
        row, rows = start, [start]
        for drawn in draws:
            rows.append(row := next_row(row, drawn, eos, pad, limit, wrong))
        if found == rows:
            raise AssertionError(said)
    at = next(i for i in range(len(right)) if found[i] != right[i])
    token, position, ended = right[at - 1]
    raise AssertionError(
        f"with eos {eos}, pad {pad}, limit {limit}: from token {token}, position {position}, ended {ended} and drawn "
        f"{draws[at - 1]} your tape makes {found[at]} of them, expected {right[at]}."
    )


def special() -> tuple[int, int]:
    """Ids of end and padding."""
    eos = draw(100, 900)
    return eos, eos + draw(1, 90)


def ordinary(count: int) -> list[int]:
    return [draw(1, 99) for _ in range(count)]


@q2.case("a row writes, ends by itself, and stays so")
def _(f):
    eos, pad = special()
    at = draw(3, 40)
    check_tape(f, eos, pad, 1000, (7, at, 0), [*ordinary(2), eos, *ordinary(3)])


@q2.case("a row runs into the limit")
def _(f):
    eos, pad = special()
    limit = draw(20, 200)
    check_tape(f, eos, pad, limit, (7, limit - 3, 0), ordinary(6))


@q2.case("a row that had ended before, for which an end is drawn")
def _(f):
    eos, pad = special()
    limit = draw(20, 200)
    check_tape(f, eos, pad, limit, (pad, draw(3, 9), 1), [*ordinary(2), eos, *ordinary(2)])
    check_tape(f, eos, pad, limit, (pad, limit, 1), ordinary(3))


@q2.case("an end exactly at the limit, and an end as the first token")
def _(f):
    eos, pad = special()
    limit = draw(20, 200)
    check_tape(f, eos, pad, limit, (7, limit - 2, 0), [*ordinary(1), eos, *ordinary(2)])
    check_tape(f, eos, pad, limit, (7, 3, 0), [eos, eos, *ordinary(2)])


@q2.case("random rows, drawn now and then an end")
def _(f):
    eos, pad = special()
    for _ in range(4):
        limit = draw(8, 16)
        draws = [eos if draw(0, 6) == 0 else drawn for drawn in ordinary(14)]
        check_tape(f, eos, pad, limit, (draw(1, 99), draw(1, 5), 0), draws)


q3 = Question("q3", "mended_draw", hint="Follow one u by hand on four tokens in two tiles, line by line.")

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "scale": "each tile is measured by its own largest logit: bring all of a row to one scale",
    "left": "within the tile, look for what is left of the goal: take off the mass of the tiles before it",
    "reach": "the running sum must exceed the goal, not reach it: a token of probability 0 was drawn",
    "tile": "the log-prob is that within the tile: divide by the mass of the whole row",
}


def wrong_draw(logits: Tensor, tile: int, uniform: Tensor, wrong: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs with some of the planted mistakes, row by row in float64."""
    tokens, logprobs = [], []
    for row, u in zip(logits.double(), uniform.tolist(), strict=True):
        tiles = [piece for piece in row.split(tile)]
        tops = [piece.max() if "scale" in wrong else row.max() for piece in tiles]
        masses = [(piece - top).exp() for piece, top in zip(tiles, tops, strict=True)]
        sums = [mass.sum().item() for mass in masses]
        goal = u * sum(sums)

        def first(values: list[float], goal: float) -> int:
            """The first place whose running sum gets there; 0 if none does."""
            running = 0.0
            for place, value in enumerate(values):
                running += value
                if running > goal or ("reach" in wrong and running == goal):
                    return place
            return 0

        which = first(sums, goal)
        place = first(masses[which].tolist(), goal if "left" in wrong else goal - sum(sums[:which]))
        tokens.append(which * tile + place)
        whole = sums[which] if "tile" in wrong else sum(sums)
        logprobs.append((masses[which][place] / whole).log().item())
    return torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64)


def middles(logits: Tensor, tokens: Tensor) -> Tensor:
    """The uniform number in the middle of each token's piece of [0, 1]: [rows]."""
    pi = logits.double().softmax(-1)
    at = tokens[:, None]
    return (pi.cumsum(-1).gather(1, at) - pi.gather(1, at) / 2)[:, 0].float()


def check_draw(f, logits: Tensor, tile: int, tokens: Tensor, uniform: Tensor | None = None) -> None:
    """Token `tokens[i]` is the one that `uniform[i]`, its middle if not given, falls on."""
    uniform = middles(logits, tokens) if uniform is None else uniform
    result = f(logits, tile, uniform)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise AssertionError("return two tensors: the tokens, and their log-probs.")
    if not isinstance(result[0], Tensor):
        raise AssertionError("the first of the two results should be a tensor of token ids.")
    of_tokens = {}
    for count in range(1, 4):
        for wrong in itertools.combinations(("scale", "left", "reach"), count):
            left = "One mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
            of_tokens[f"{left}: {PLANTED[wrong[0]]} ({', '.join(wrong)})."] = wrong_draw(logits, tile, uniform, wrong)[
                0
            ]
    of_tokens |= {
        "That is the place within the tile: add the tokens of the tiles before it.": tokens % tile,
        "That is the number of the tile, not the token.": tokens // tile,
        "That is the most probable token: where u falls decides.": logits.argmax(-1),
        "You are one token too far: it is the first at which the running sum exceeds u.": tokens + 1,
    }
    compare(result[0].long(), tokens, of_tokens, what="the token ids")
    wide = logits.double()
    chosen = wide.gather(1, tokens[:, None])[:, 0]
    expected = chosen - wide.logsumexp(-1)
    within = torch.stack(
        [row.split(tile)[t // tile].log_softmax(0)[t % tile] for row, t in zip(wide, tokens.tolist(), strict=True)]
    )
    own = torch.stack([sum((p - p.max()).exp().sum() for p in row.split(tile)).log() for row in wide])
    tops = torch.stack([row.split(tile)[t // tile].max() for row, t in zip(wide, tokens.tolist(), strict=True)])
    mistakes = {
        f"One mistake is left: {PLANTED['tile']} (tile).": within,
        f"One mistake is left, in the log-probs: {PLANTED['scale']} (scale).": chosen - tops - own,
        "That is the logit of the token: take off the log of the sum of exponentials.": chosen,
        "That is the probability: take its logarithm.": expected.exp(),
        "The total mass is measured from the largest logit: take that off as well.": expected + wide.amax(1),
    }
    compare(result[1], expected, mistakes, what="the log-probs", atol=1e-4)


def likely(logits: Tensor) -> Tensor:
    """A token of each row that is not too improbable to aim at: [rows]."""
    pi = logits.softmax(-1)
    return torch.multinomial((pi > 0.01) * pi, 1)[:, 0]


@q3.case("tiles that divide the vocabulary, of one token and of all")
def _(f):
    logits = 1.5 * torch.randn(16, 24)
    for tile in (6, 1, 24):
        check_draw(f, logits, tile, likely(logits))


@q3.case("a last tile that is not full")
def _(f):
    logits = torch.randn(12, 23)
    tokens = likely(logits)
    tokens[:3] = torch.tensor([22, 21, 20])
    check_draw(f, logits, 5, tokens)


@q3.case("large logits: exp of them is infinite")
def _(f):
    logits = torch.randn(6, 12) + 200.0
    check_draw(f, logits, 4, likely(logits))


@q3.case("tiles of very different size")
def _(f):
    logits = torch.randn(8, 12) - 4.0 * (torch.arange(12) // 4 == 1)
    check_draw(f, logits, 4, likely(logits))


@q3.case("u = 0 falls on the first token that can be drawn")
def _(f):
    logits = torch.randn(3, 8)
    logits[:, 0] = -torch.inf
    logits[1, 1] = -torch.inf
    check_draw(f, logits, 4, torch.tensor([1, 2, 1]), torch.zeros(3))


q4 = Question("q4", "best_slots", hint="After how many steps is the last answer through, with so many slots? Try all.")


@functools.lru_cache(maxsize=10_000)
def steps_needed(lengths: tuple[int, ...], slots: int) -> int:
    """Steps until all answers have ended, by going through all steps one by one."""
    left, waiting, step = [], list(lengths), 0
    while left or waiting:
        while waiting and len(left) < slots:
            left.append(waiting.pop(0))
        step += 1
        left = [n - 1 for n in left if n > 1]
    return step


def in_batches(lengths: tuple[int, ...], slots: int) -> int:
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def in_turn(lengths: tuple[int, ...], slots: int) -> int:
    return max(sum(lengths[s::slots]) for s in range(slots))


def sorted_first(lengths: tuple[int, ...], slots: int) -> int:
    return steps_needed(tuple(sorted(lengths, reverse=True)), slots)


def evenly(lengths: tuple[int, ...], slots: int) -> int:
    return -(-sum(lengths) // slots)


def step_time(slots: int, host: float, fixed: float, row: float) -> float:
    return max(host, fixed + row * slots)


def best(lengths: tuple[int, ...], most: int, steps, time) -> int:
    """The number of slots with the least steps x time."""
    return min(range(1, most + 1), key=lambda slots: steps(lengths, slots) * time(slots))


def slot_mistakes(lengths: tuple[int, ...], host: float, fixed: float, row: float, most: int) -> dict[str, int]:
    def time(slots: int) -> float:
        return step_time(slots, host, fixed, row)

    free_host = math.floor((host - fixed) / row) if row else most
    return {
        "You wait for the longest of each batch: a free slot takes the next answer at once.": best(
            lengths, most, in_batches, time
        ),
        "You divided the tokens evenly: an answer stays in its slot until it ends.": best(lengths, most, evenly, time),
        "You sorted the longest first: they wait in the order given.": best(lengths, most, sorted_first, time),
        "You dealt the answers out in turn: the next one takes the slot that is free first.": best(
            lengths, most, in_turn, time
        ),
        "You left the host out: a step never takes less than that.": best(
            lengths, most, steps_needed, lambda slots: fixed + row * slots
        ),
        "You added the host's time: it launches while the device works, so the longer of the two counts.": best(
            lengths, most, steps_needed, lambda slots: host + fixed + row * slots
        ),
        "You left out what is fixed in a step.": best(
            lengths, most, steps_needed, lambda slots: max(host, row * slots)
        ),
        "You made the steps few, not the time short: more slots make each step longer.": best(
            lengths, most, steps_needed, lambda slots: 1.0
        ),
        "That is as many slots as the host hides: more of them may still be faster, or fewer.": max(
            1, min(most, free_host)
        ),
        "As many slots as possible make each step as long as possible.": most,
    }


def check_slots(f, lengths: tuple[int, ...], host: float, fixed: float, row: float, most: int) -> None:
    found = f(torch.tensor(lengths), host, fixed, row, most)
    if isinstance(found, Tensor) and found.numel() == 1 and not found.dtype.is_floating_point:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int):
        raise AssertionError(f"return a whole number, not {type(found).__name__}.")
    if not 1 <= found <= most:
        raise AssertionError(f"{found} slots are not between 1 and {most}.")
    times = {slots: steps_needed(lengths, slots) * step_time(slots, host, fixed, row) for slots in range(1, most + 1)}
    least = min(times.values())
    if times[found] <= least * (1 + 1e-6):
        return
    said = [said for said, wrong in slot_mistakes(lengths, host, fixed, row, most).items() if found == wrong]
    if said:
        raise AssertionError(" Or: ".join(said))
    raise AssertionError(f"{found} slots take {times[found]:.4g} ms, the best number of them {least:.4g} ms.")


def deceiving(make, *names: str) -> tuple:
    """Inputs of `make()` on which the rules whose sentences hold one of `names` are not best, nor 1, 2 and `most`."""
    for _ in range(300):
        inputs = make()
        lengths, *prices, most = inputs
        times = {s: steps_needed(lengths, s) * step_time(s, *prices) for s in range(1, most + 1)}
        least = min(times.values())
        rules = [wrong for said, wrong in slot_mistakes(*inputs).items() if any(name in said for name in names)]
        if all(times[slots] > least * 1.001 for slots in (*rules, 1, 2, most)):
            return inputs
    return inputs


def some_lengths(count: int, mean: float) -> tuple[int, ...]:
    return tuple((1 + torch.distributions.Geometric(1 / mean).sample((count,)).long()).clamp(max=200).tolist())


def part(low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), dtype=torch.float64).item()


@q4.case("a host that hides some rows")
def _(f):
    def make() -> tuple:
        return some_lengths(24, 9), part(2.0, 3.0), part(0.3, 0.6), part(0.1, 0.2), 24

    check_slots(f, *deceiving(make, "left the host out", "added the host", "As many"))
    check_slots(f, *deceiving(make, "left the host out", "that the host hides", "as the host hides"))


@q4.case("rows that cost, and a price for each step")
def _(f):
    def make() -> tuple:
        return some_lengths(30, 8), 0.01, part(1.0, 2.0), part(0.05, 0.2), 20

    check_slots(f, *deceiving(make, "left out what is fixed", "steps few", "divided the tokens"))
    check_slots(f, *deceiving(make, "longest of each batch", "divided the tokens"))


@q4.case("the order in which they wait")
def _(f):
    def make() -> tuple:
        return some_lengths(16, 12), part(0.2, 0.8), part(0.3, 0.9), part(0.05, 0.3), 12

    check_slots(f, *deceiving(make, "sorted the longest", "dealt the answers"))
    check_slots(f, *deceiving(make, "dealt the answers"))
    check_slots(f, *deceiving(make, "sorted the longest"))


@q4.case("one answer that is much longer than the others")
def _(f):
    def make() -> tuple:
        lengths = list(some_lengths(20, 5))
        lengths[draw(8, 19)] = draw(60, 120)
        return tuple(lengths), 0.0, part(0.5, 1.0), part(0.02, 0.1), 20

    check_slots(f, *deceiving(make, "divided the tokens", "longest of each batch"))


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
