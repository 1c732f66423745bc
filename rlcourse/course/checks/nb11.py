"""Checks of the exercises of lesson 11: an auditor, an admission rule, a schedule that never ends, a probe of bits."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "audit", hint="Keep one list of blocks for each table, and see before each entry who holds what.")

# What an auditor may overlook: the rule that an entry breaks, and the sentence for one who lets it pass.
RULES = {
    "held": "You let a block be given that some table holds.",
    "nobody's": "You let a block be given that is nobody's, or that there is not: they go from 1 to number - 1.",
    "given twice": "You let one entry give the same block twice.",
    "ghost": "You let a block be shared that no table holds.",
    "shared with itself": "You let a table share a block that it already holds itself.",
    "shared write": "You let a table write into a block that another one reads.",
    "foreign write": "You let a table write into a block that it does not hold.",
    "foreign drop": "You let a table drop a block that it does not hold, though another one may.",
    "dropped twice": "You let one entry drop the same block twice.",
}
KINDS = dict(zip(RULES, ["give"] * 3 + ["share"] * 2 + ["write"] * 2 + ["drop"] * 2, strict=True))


def broken(entry: list, tables: dict[str, list[int]], number: int, ignored: str = "") -> str:
    """The first rule that an entry breaks, "" for none. Carries the entry out."""
    kind, name, blocks = entry
    table = tables.setdefault(name, [])
    found = []
    for block in blocks:
        holders = [other for other, held in tables.items() if block in held]
        if kind == "give":
            found.append("nobody's" if not 1 <= block < number else "")
            found.append("given twice" if blocks.count(block) > 1 else "held" if holders else "")
        if kind == "share":
            found.append("ghost" if not holders else "shared with itself" if block in table else "")
        if kind == "write":
            found.append("foreign write" if block not in table else "shared write" if len(holders) > 1 else "")
        if kind == "drop":
            found.append("foreign drop" if block not in table else "dropped twice" if blocks.count(block) > 1 else "")
    if kind in ("give", "share"):
        table += blocks
    if kind == "drop":
        tables[name] = [block for block in table if block not in blocks]
    return next((rule for rule in found if rule not in ("", ignored)), "")


def choice(items: list):
    return items[draw(0, len(items) - 1)]


def fair_entry(tables: dict[str, list[int]], number: int) -> list:
    """An entry that a right manager could write next, and that leaves a block free. tables: who holds what."""
    held = {block for table in tables.values() for block in table}
    free = [block for block in range(1, number) if block not in held]
    name = choice(list("abcde"))
    mine, others = tables.get(name, []), sorted(held - set(tables.get(name, [])))
    alone = [b for b in mine if sum(b in table for table in tables.values()) == 1]
    kinds = ["give"] * (len(free) > 1) + ["share"] * bool(others) + ["write"] * bool(alone) + ["drop"] * (len(mine) > 1)
    if not kinds:
        return fair_entry(tables, number)
    kind = choice(kinds)
    if kind == "give":
        return ["give", name, free[: draw(1, min(2, len(free) - 1))]]
    return [kind, name, [choice({"share": others, "write": alone, "drop": mine}[kind])]]


def foul_entry(rule: str, tables: dict[str, list[int]], number: int) -> list | None:
    """An entry that breaks this rule, None where these tables do not let it."""
    held = sorted({block for table in tables.values() for block in table})
    free = [block for block in range(1, number) if block not in held]
    name = choice(list("abcde"))
    mine = tables.get(name, [])
    foreign = [block for block in held if block not in mine]
    shared = [b for b in mine if sum(b in table for table in tables.values()) > 1]
    blocks = {
        "held": held,
        "nobody's": [0, number],
        "given twice": free,
        "ghost": free,
        "shared with itself": mine,
        "shared write": shared,
        "foreign write": foreign,
        "foreign drop": foreign,
        "dropped twice": mine,
    }[rule]
    if not blocks:
        return None
    return [KINDS[rule], name, [choice(blocks)] * (2 if "twice" in rule else 1)]


def some_trace(rule: str, number: int) -> tuple[list, int]:
    """A trace in which the rule is broken first at a place that is returned; -1 for the rule "none"."""
    tables: dict[str, list[int]] = {"a": [1, 2], "b": [1]}
    trace: list = [["give", "a", [1, 2]], ["share", "b", [1]]]
    before = draw(5, 12)
    while len(trace) < before or (rule != "none" and len(trace) < 60):
        foul = foul_entry(rule, tables, number) if len(trace) >= before else None
        if foul:
            place = len(trace)
            trace.append(foul)
            broken(foul, tables, number)
            return trace + [fair_entry(tables, number) for _ in range(draw(1, 4))], place
        trace.append(fair_entry(tables, number))
        broken(trace[-1], tables, number)
    return trace, -1


def check_audit(f, *rules: str) -> None:
    for rule in rules:
        number = draw(9, 14)
        trace, place = some_trace(rule, number)
        mistakes = {}
        for ignored, sentence in RULES.items():
            tables: dict[str, list[int]] = {}
            fouls = [i for i, entry in enumerate(trace) if broken(entry, tables, number, ignored)]
            mistakes[sentence] = torch.tensor(fouls[0] if fouls else -1)
        mistakes["That is the last entry that is wrong, or any: the first is asked for."] = torch.tensor(
            max(place, len(trace) - 1)
        )
        compare(f(trace, number), torch.tensor(place), mistakes)


@q1.case("what is given")
def _(f):
    check_audit(f, "held", "nobody's", "none", "given twice", "held")


@q1.case("what is shared")
def _(f):
    check_audit(f, "ghost", "none", "shared with itself", "ghost")


@q1.case("who may write")
def _(f):
    check_audit(f, "shared write", "foreign write", "none", "shared write")


@q1.case("what is dropped")
def _(f):
    check_audit(f, "foreign drop", "none", "dropped twice", "foreign drop")


q2 = Question("q2", "admit", hint="How many blocks does each row need after the last of the steps? Which has it now?")


def blocks_after(running: list[int], starts: list[tuple[int, int]], block: int, steps: int, mistake: str = "") -> int:
    """Blocks that are in use after `steps` steps, beyond those in use now: each is counted where a token lies.

    starts: (number of the prompt, its tokens) of each answer that is admitted.
    """
    if mistake == "pooled":
        now = sum(running)
        later = now + steps * len(running) + sum(dict(starts).values()) + steps * len(starts)
        return -(-later // block) - -(-now // block)
    now = {("row", i, t // block) for i, tokens in enumerate(running) for t in range(tokens)}
    later = set() if mistake == "counted twice" else set(now)
    for i, tokens in enumerate(running):
        later |= {("row", i, t // block) for t in range(tokens + (0 if mistake == "running" else steps))}
    for i, (number, tokens) in enumerate(starts):
        full = {"alone": 0, "partly": -(-tokens // block)}.get(mistake, tokens // block)
        for t in range(tokens + (0 if mistake == "new" else steps)):
            shared = t // block < full
            later.add(("prompt", number, t // block) if shared else ("new", i, t // block))
    return len(later) - (0 if mistake == "counted twice" else len(now))


def admitted(running, prompts, group, free, block, steps, mistake: str = "") -> int:
    """How many of the answers in line fit, by trying one more each time."""
    line = [(number, tokens) for number, tokens in enumerate(prompts) for _ in range(group)]
    count, starts = 0, []
    for answer in line:
        if blocks_after(running, [*starts, answer], block, steps, mistake) <= free:
            starts.append(answer)
            count += 1
        elif mistake != "skipped":
            break
    return count // group * group if mistake == "whole groups" else count


ADMISSION = {
    "whole groups": "A part of a group may be admitted.",
    "alone": "The full blocks of a prompt are held once for its whole group.",
    "partly": "A block that the prompt fills only in part is not shared: each answer writes into its own.",
    "running": "You forgot that those that run grow as well.",
    "new": "You forgot that those that are admitted grow as well.",
    "pooled": "You divided the sum of the tokens: each row has a last block of its own that is partly empty.",
    "counted twice": "`free` are blocks that nobody holds: what those that run hold already is not taken from it.",
    "skipped": "They wait in order: if one does not fit, none behind it is admitted.",
}


def check_admission(f, draw_one) -> None:
    """Six requests that `draw_one` makes: running, prompts, group, block, steps. Some blocks are free."""
    found = set()
    for number in range(6):
        running, prompts, group, block, steps = draw_one()
        line = [(i, tokens) for i, tokens in enumerate(prompts) for _ in range(group)]
        wanted = (number * len(line)) // 6 + draw(0, 1)  # so many fit
        wanted = min(wanted, len(line) - 1)
        free = blocks_after(running, line[:wanted], block, steps) + draw(0, 1)
        inputs = running, prompts, group, free, block, steps
        expected = admitted(*inputs)
        found.add(expected)
        mistakes = {said: torch.tensor(admitted(*inputs, mistake)) for mistake, said in ADMISSION.items()}
        asked = torch.tensor(running, dtype=torch.long), torch.tensor(prompts), group, free, block, steps
        compare(f(*asked), torch.tensor(expected), mistakes)


def some(count: int, low: int, high: int) -> list[int]:
    return [draw(low, high) for _ in range(count)]


@q2.case("nobody runs, one answer a prompt")
def _(f):
    check_admission(f, lambda: ([], some(9, 1, 40), 1, draw(3, 8), draw(1, 6)))


@q2.case("some run already")
def _(f):
    check_admission(f, lambda: (some(draw(4, 7), 5, 60), some(8, 1, 40), 1, draw(3, 8), draw(2, 9)))


@q2.case("groups that share a prompt")
def _(f):
    check_admission(f, lambda: (some(3, 5, 30), some(4, 9, 50), draw(2, 5), draw(3, 8), draw(1, 7)))


@q2.case("prompts that end on the edge of a block, and beside it")
def _(f):
    def edges():
        block = draw(3, 7)
        near = [block * draw(1, 4) + draw(-1, 1) for _ in range(5)]
        return [block * draw(1, 4) for _ in range(3)], near, draw(2, 4), block, block * draw(1, 2)

    check_admission(f, edges)


q3 = Question("q3", "shortest", hint="Write one step of her rule first. When is it sure that it goes on for ever?")

MOST, FEWEST, YOUNGEST = "most", "fewest", "youngest"


def ends(capacity: int, rows: int, length: int, rule: str = MOST) -> bool:
    """Whether some answer ends: if a state comes back before, none ever does. rule: who is sent back."""
    held: dict[int, int] = {}  # tokens of those that run
    seen = set()
    while True:
        for row in range(rows):
            if row not in held and sum(held.values()) + len(held) + 1 <= capacity:
                held[row] = 0
        while sum(held.values()) + len(held) > capacity:
            order = sorted(held, key=lambda row: (held[row], -row))
            held.pop({MOST: order[-1], FEWEST: order[0], YOUNGEST: max(held)}[rule])
        held = {row: tokens + 1 for row, tokens in held.items()}
        if length in held.values():
            return True
        state = tuple(sorted(held.items()))
        if state in seen:
            return False
        seen.add(state)


def least(capacity: int, rows: int, rule: str = MOST) -> int:
    """The smallest length at which no answer ends; capacity + 1 if one always does."""
    return next((n for n in range(1, capacity + 1) if not ends(capacity, rows, n, rule)), capacity + 1)


def check_shortest(f, low: int, high: int, *rows: int) -> None:
    for count in rows:
        capacity = draw(low, high)
        while least(capacity, count) > capacity:
            capacity += 1
        mistakes = {
            "An answer of that length fits alone, but so does a shorter one that never ends.": torch.tensor(capacity),
            "That is the first length at which somebody is sent back. It ends all the same.": torch.tensor(
                capacity // count + 1
            ),
            "That is the greatest length at which one still ends: one more.": torch.tensor(least(capacity, count) - 1),
            "The one that holds most is sent back: you send back one that holds less.": torch.tensor(
                least(capacity, count, FEWEST)
            ),
            "Three quarters is near, but it depends on how the steps fall: run it.": torch.tensor(3 * capacity // 4),
        }
        compare(f(capacity, count), torch.tensor(least(capacity, count)), mistakes)


@q3.case("two answers, little room")
def _(f):
    check_shortest(f, 8, 20, 2, 2, 2)


@q3.case("two answers, more room")
def _(f):
    check_shortest(f, 21, 60, 2, 2, 2)


@q3.case("three answers")
def _(f):
    check_shortest(f, 12, 40, 3, 3, 3)


@q3.case("more of them")
def _(f):
    check_shortest(f, 20, 40, 4, 5, 4)


q4 = Question("q4", "first_to_part", hint="Compare each row with the same row one call earlier: the bits, as integers.")


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def planted(rows: int, width: int, at: int, how: str, dtype: torch.dtype) -> list[Tensor]:
    """What an operation gave for 1 to `rows` rows. Bits of a row that was there before change at `at` rows first, 0 for
    never. how: 'on' from there on, 'once', 'zero' by the sign of a zero."""
    base = torch.randn(rows, width).to(dtype)
    base[:, 0] = 0.0
    base[draw(0, rows - 1), 1] = torch.nan
    results = [base[: r + 1].clone() for r in range(rows)]
    if at:
        row = draw(0, at - 2)
        column = 0 if how == "zero" else draw(2, width - 1)
        value = bits(base[row])[column].item()
        changed = -(2**15) if dtype == torch.bfloat16 else -(2**31)  # -0.0
        for result in results[at - 1 : at if how == "once" else rows]:
            bits(result[row])[column] = changed if how == "zero" else value ^ 1
    return results


def check_parting(f, how: list[str], dtype: torch.dtype = torch.float32) -> None:
    for _ in range(2):
        rows, width = draw(6, 9), draw(4, 7)
        places = [0 if kind == "never" else draw(2, rows) for kind in how]
        places[0] = draw(3, rows - 1)
        results = [planted(rows, width, at, kind, dtype) for at, kind in zip(places, how, strict=True)]

        def first(different, results=results) -> Tensor:
            """The first number of rows at which `different(call, all calls)`, 0 for none."""
            found = []
            for calls in results:
                found.append(next((len(call) for call in calls[1:] if different(call, calls)), 0))
            return torch.tensor(found)

        mistakes = {
            "nan is not equal to itself, and yet its bits are: compare integers.": first(
                lambda call, calls: bool((call[:-1] != calls[len(call) - 2]).any())
            ),
            "0.0 and -0.0 are equal and have other bits.": first(
                lambda call, calls: not torch.equal(call[:-1].nan_to_num(), calls[len(call) - 2].nan_to_num())
            ),
            "A tolerance lets the last bit pass.": first(
                lambda call, calls: not torch.allclose(call[:-1], calls[len(call) - 2], equal_nan=True)
            ),
            "You looked at row 0 alone.": first(lambda call, calls: not torch.equal(bits(call[0]), bits(calls[0][0]))),
            "You compared with the last call: a row's bits are to be those of the call before.": first(
                lambda call, calls: not torch.equal(bits(call), bits(calls[-1][: len(call)]))
            ),
            "That is the call before the one that parts.": torch.tensor([max(at - 1, 0) for at in places]),
        }
        compare(f(results), torch.tensor(places), mistakes)


@q4.case("other bits from some number of rows on")
def _(f):
    check_parting(f, ["on", "never", "on", "on", "never"])


@q4.case("other bits in one call alone")
def _(f):
    check_parting(f, ["once", "on", "never", "once"])


@q4.case("the sign of a zero")
def _(f):
    check_parting(f, ["zero", "never", "zero"])


@q4.case("bf16")
def _(f):
    check_parting(f, ["on", "never", "once", "zero"], torch.bfloat16)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
