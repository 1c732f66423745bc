"""q2: a recorded step without an if."""

from rlcourse.course.checks import Question, draw

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
