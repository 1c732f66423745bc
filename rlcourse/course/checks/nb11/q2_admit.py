"""q2: how many answers surely fit."""

import torch

from rlcourse.course.checks import Question, compare, draw

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
