"""q1: convict a block manager by its trace."""

import torch

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
    "foreign write": "You let a table write into a block that another one holds, and it does not.",
    "unheld write": "You let a table write into a block that no table holds.",
    "foreign drop": "You let a table drop a block that another one holds, and it does not.",
    "unheld drop": "You let a table drop a block that no table holds.",
    "dropped twice": "You let one entry drop the same block twice.",
}
KINDS = dict(zip(RULES, ["give"] * 3 + ["share"] * 2 + ["write"] * 3 + ["drop"] * 3, strict=True))


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
            foreign = "foreign write" if holders else "unheld write"
            found.append(foreign if block not in table else "shared write" if len(holders) > 1 else "")
        if kind == "drop":
            foreign = "foreign drop" if holders else "unheld drop"
            found.append(foreign if block not in table else "dropped twice" if blocks.count(block) > 1 else "")
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
        "unheld write": free,
        "foreign drop": foreign,
        "unheld drop": free,
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
    check_audit(f, "shared write", "foreign write", "none", "unheld write", "shared write")


@q1.case("what is dropped")
def _(f):
    check_audit(f, "foreign drop", "none", "dropped twice", "unheld drop", "foreign drop")
