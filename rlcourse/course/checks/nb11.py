"""Checks of lesson 11: an auditor, an admission rule, a schedule that never ends, a probe of bits."""

import copy
import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw

q1 = Question("q1", "audit", hint="Keep one list of blocks for each table, and see before each entry who holds what.")
Tables = dict[str, list[int]]  # who holds what


def broken(entry: list, tables: Tables, number: int, ignored: str = "") -> str:
    """The first rule that an entry breaks, "" for none. Carries the entry out."""
    kind, name, blocks = entry
    table, found = tables.setdefault(name, []), []
    for block in blocks:
        holders, again = sum(block in held for held in tables.values()), blocks.count(block) > 1
        rules = {
            "give": {"nobody's": not 1 <= block < number, "given twice": again, "held": holders > 0},
            "share": {"ghost": not holders, "shared with itself": block in table},
            "write": {"foreign write": block not in table, "shared write": block in table and holders > 1},
            "drop": {"foreign drop": block not in table, "dropped twice": again},
        }
        found += [rule for rule, is_broken in rules[kind].items() if is_broken and rule != ignored]
    if kind in ("give", "share"):
        table += blocks
    if kind == "drop":
        tables[name] = [block for block in table if block not in blocks]
    return found[0] if found else ""


@q1.expects({  # what an auditor may overlook: the rule that an entry breaks
    "held": "You let a block be given that some table holds.",
    "nobody's": "You let a block be given that is nobody's, or that there is not: they go from 1 to number - 1.",
    "given twice": "You let one entry give the same block twice.",
    "ghost": "You let a block be shared that no table holds.",
    "shared with itself": "You let a table share a block that it already holds itself.",
    "shared write": "You let a table write into a block that another one reads.",
    "foreign write": "You let a table write into a block that it does not hold.",
    "foreign drop": "You let a table drop a block that it does not hold.",
    "dropped twice": "You let one entry drop the same block twice.",
}, also={"The first is asked for, not the last.": lambda trace, number: len(trace) - 1})  # fmt: skip
def first_foul(trace: list, number: int, ignored: str = "") -> int:
    """-1 for nowhere."""
    tables: Tables = {}
    return next((i for i, entry in enumerate(trace) if broken(entry, tables, number, ignored)), -1)


def next_entry(tables: Tables, number: int, rule: str = "") -> list | None:
    """An entry that breaks this rule and no other, or none at all, carried out; None if none is found."""
    for _ in range(3000):
        blocks = [draw(0, number)] * 2 if "twice" in rule else torch.randperm(number + 1)[: draw(1, 2)].tolist()
        entry = [("give", "share", "write", "drop")[draw(0, 3)], "abcde"[draw(0, 4)], blocks]
        if all(broken(entry, copy.deepcopy(tables), number, i) == r for i, r in (("", rule), (rule, ""))):
            broken(entry, tables, number)
            return entry
    return None


def some_trace(rule: str, number: int) -> list:
    """A trace in which the rule is broken first; none is for the rule "none"."""
    tables: Tables = {"a": [1, 2], "b": [1]}
    trace: list = [["give", "a", [1, 2]], ["share", "b", [1]]]
    trace += [next_entry(tables, number) for _ in range(draw(3, 10))]
    if rule == "none":
        return trace
    while (foul := next_entry(tables, number, rule)) is None:
        trace.append(next_entry(tables, number))
    return [*trace, foul, *(next_entry(tables, number) for _ in range(draw(1, 4)))]


def check_audit(f, *rules: str) -> None:
    for rule in rules:
        number = draw(9, 14)
        q1.check(f, some_trace(rule, number), number)


q1.case("what is given")(lambda f: check_audit(f, "held", "nobody's", "none", "given twice", "held"))
q1.case("what is shared")(lambda f: check_audit(f, "ghost", "none", "shared with itself", "ghost"))
q1.case("who may write")(lambda f: check_audit(f, "shared write", "foreign write", "none", "foreign write"))
q1.case("what is dropped")(lambda f: check_audit(f, "foreign drop", "none", "dropped twice", "foreign drop"))

q2 = Question("q2", "admit", hint="How many blocks does each row need after the last of the steps? Which has it now?")


def blocks_after(running: list[int], starts: list[tuple[int, int]], block: int, steps: int, mistake: str = "") -> int:
    """Blocks in use after `steps` steps beyond those now. starts: (prompt, its tokens) of each answer that is
    admitted."""
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
        places = {t // block for t in range(tokens + (0 if mistake == "new" else steps))}
        later |= {("prompt", number, place) if place < full else ("new", i, place) for place in places}
    return len(later) - (0 if mistake == "counted twice" else len(now))


def line_of(prompts: list[int], group: int) -> list[tuple[int, int]]:
    """(number of the prompt, its tokens) of each answer, as they wait."""
    return [(number, tokens) for number, tokens in enumerate(prompts) for _ in range(group)]


@q2.expects({
    "whole groups": "A part of a group may be admitted.",
    "alone": "The full blocks of a prompt are held once for its whole group.",
    "partly": "A block that the prompt fills only in part is not shared: each answer writes into its own.",
    "running": "You forgot that those that run grow as well.",
    "new": "You forgot that those that are admitted grow as well.",
    "pooled": "You divided the sum of the tokens: each row has a last block of its own that is partly empty.",
    "counted twice": "`free` are blocks that nobody holds: what those that run hold already is not taken from it.",
    "skipped": "They wait in order: if one does not fit, none behind it is admitted.",
})  # fmt: skip
def admitted(running, prompts, group: int, free: int, block: int, steps: int, mistake: str = "") -> int:
    """By trying one more each time."""
    starts: list[tuple[int, int]] = []
    for answer in line_of(prompts.tolist(), group):
        if blocks_after(running.tolist(), [*starts, answer], block, steps, mistake) <= free:
            starts.append(answer)
        elif mistake != "skipped":
            break
    return len(starts) // group * group if mistake == "whole groups" else len(starts)


def some(count: int, low: int, high: int) -> list[int]:
    return [draw(low, high) for _ in range(count)]


def edges() -> tuple:
    block = draw(3, 7)
    near = [block * draw(1, 4) + draw(-1, 1) for _ in range(5)]
    return [block * draw(1, 4) for _ in range(3)], near, draw(2, 4), block, block * draw(1, 2)


@q2.cases_of({  # case: what draws running, prompts, group, block, steps
    "nobody runs, one answer a prompt": lambda: ([], some(9, 1, 40), 1, draw(3, 8), draw(1, 6)),
    "some run already": lambda: (some(draw(4, 7), 5, 60), some(8, 1, 40), 1, draw(3, 8), draw(2, 9)),
    "groups that share a prompt": lambda: (some(3, 5, 30), some(4, 9, 50), draw(2, 5), draw(3, 8), draw(1, 7)),
    "prompts that end on the edge of a block, and beside it": edges,
})  # fmt: skip
def _(f, draw_one):
    for number in range(6):
        running, prompts, group, block, steps = draw_one()
        line = line_of(prompts, group)
        wanted = min(number * len(line) // 6 + draw(0, 1), len(line) - 1)  # so many fit
        free = blocks_after(running, line[:wanted], block, steps) + draw(0, 1)
        q2.check(f, torch.tensor(running, dtype=torch.long), torch.tensor(prompts), group, free, block, steps)


q3 = Question("q3", "shortest", hint="Write one step of her rule first. When is it sure that it goes on for ever?")


def ends(capacity: int, rows: int, length: int) -> bool:
    """Whether some answer ends: if a state comes back before, none ever does."""
    held, seen = {}, set()  # tokens of those that run; states that have been
    while True:
        for row in range(rows):
            if row not in held and sum(held.values()) + len(held) + 1 <= capacity:
                held[row] = 0
        while sum(held.values()) + len(held) > capacity:
            held.pop(max(held, key=lambda row: (held[row], -row)))
        held = {row: tokens + 1 for row, tokens in held.items()}
        if length in held.values():
            return True
        state = tuple(sorted(held.items()))
        if state in seen:
            return False
        seen.add(state)


@q3.expects(also={
    "An answer of that length fits alone, but so does a shorter one that never ends.": lambda capacity, rows: capacity,
    "That is the first length at which somebody is sent back. It ends all the same.": lambda c, rows: c // rows + 1,
    "That is the greatest length at which one still ends: one more.": lambda capacity, rows: least(capacity, rows) - 1,
})  # fmt: skip
def least(capacity: int, rows: int) -> int:
    """The smallest length at which no answer ends; capacity + 1 if one always does."""
    return next((n for n in range(1, capacity + 1) if not ends(capacity, rows, n)), capacity + 1)


def check_shortest(f, low: int, high: int, *rows: int) -> None:
    for count in rows:
        capacity = draw(low, high)
        while least(capacity, count) > capacity:
            capacity += 1
        q3.check(f, capacity, count)


q3.case("two answers")(lambda f: [check_shortest(f, *room, 2, 2, 2) for room in ((8, 20), (21, 60))])
q3.case("three answers, and more")(lambda f: check_shortest(f, 20, 40, 3, 4, 5, 3))

q4 = Question("q4", "first_to_part", hint="Compare each row with the same row one call earlier: the bits, as integers.")


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def planted(rows: int, width: int, at: int, how: str, dtype: torch.dtype) -> list[Tensor]:
    """What an operation gave for 1 to `rows` rows: bits of a row change at `at` rows first, 0 for never. how: 'on' from
    there on, 'once', 'zero' by the sign of a zero."""
    base = torch.randn(rows, width).to(dtype)
    base[:, 0] = 0.0
    base[draw(0, rows - 1), 1] = torch.nan
    results = [base[: r + 1].clone() for r in range(rows)]
    if at:
        row, column = draw(0, at - 2), 0 if how == "zero" else draw(2, width - 1)
        value = bits(base[row])[column].item()
        negative_zero = -(2**15) if dtype == torch.bfloat16 else -(2**31)
        for result in results[at - 1 : at if how == "once" else rows]:
            bits(result[row])[column] = negative_zero if how == "zero" else value ^ 1
    return results


@q4.expects(also={
    "nan is not equal to itself, and yet its bits are: compare integers.": {"new": lambda b, a, _: (b[:-1] != a).any()},
    "0.0 and -0.0 are equal and have other bits.": {"new": lambda b, a, _: ((b[:-1] != a) & ~a.isnan()).any()},
    "A tolerance lets the last bit pass.": {"new": lambda b, a, _: not torch.allclose(b[:-1], a, equal_nan=True)},
    "You looked at row 0 alone.": {"new": lambda b, a, _: not torch.equal(bits(b[0]), bits(a[0]))},
    "You compared with the last call.": {"new": lambda b, _, last: not torch.equal(bits(b), bits(last[: len(b)]))},
})  # fmt: skip
def first(results: list[list[Tensor]], new=lambda b, a, _: not torch.equal(bits(b[:-1]), bits(a))) -> Tensor:
    """By `new(call, the call before, the last call)`, 0 for none."""
    found = [[len(b) for a, b in itertools.pairwise(calls) if new(b, a, calls[-1])] for calls in results]
    return torch.tensor([parted[0] if parted else 0 for parted in found])


def check_parting(f, *how: str, dtype: torch.dtype = torch.float32) -> None:
    for _ in range(2):
        rows, width = draw(6, 9), draw(4, 7)
        places = [0 if kind == "never" else draw(2, rows) for kind in how]
        places[0] = draw(3, rows - 1)
        q4.check(f, [planted(rows, width, at, kind, dtype) for at, kind in zip(places, how, strict=True)])


q4.case("other bits from some number of rows on")(lambda f: check_parting(f, "on", "never", "on", "on", "never"))
q4.case("other bits in one call alone, or the sign of a zero")(
    lambda f: [check_parting(f, *how) for how in (("once", "on", "never", "once"), ("zero", "never", "zero"))]
)
q4.case("bf16")(lambda f: check_parting(f, "on", "never", "once", "zero", dtype=torch.bfloat16))
