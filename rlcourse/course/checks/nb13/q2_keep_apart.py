"""q2: positions, attention and loss of examples that share a row."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q2 = Question("q2", "keep_apart", hint="For each place of the row: which example is it of, and which token of it?")


def by_places(lengths: list[int], answers: list[int], width: int, mistake: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Positions [width], sees [width, width], predicts [width], place by place."""
    owner = [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    owner += [(-1 - place, 0) for place in range(width - len(owner))]  # each place of padding is alone
    positions, sees, predicts = [], [], []
    for here, (i, t) in enumerate(owner):
        positions.append(here if mistake == "positions" and i >= 0 else t)
        row = []
        for there, (j, _) in enumerate(owner):
            texts = i >= 0 and j >= 0
            own = {
                "causal": i == j or texts,
                "padding": i == j and texts,
                "padding together": i == j or (i < 0 and j < 0),
            }.get(mistake, i == j)
            before = there < here if mistake == "not itself" else there <= here or mistake == "both ways"
            row.append(own and before)
        sees.append(row)
        length, answer = (lengths[i], answers[i]) if i >= 0 else (0, 0)
        if mistake == "not shifted":
            predicts.append(i >= 0 and t >= length - answer)
        elif mistake == "border":
            j, u = owner[here + 1] if here + 1 < width else (-1, 0)
            predicts.append(j >= 0 and u >= lengths[j] - answers[j])
        elif mistake == "prompt":
            predicts.append(i >= 0 and t + 1 < length)
        elif mistake == "last":
            predicts.append(i >= 0 and t + 1 >= length - answer)
        else:
            predicts.append(i >= 0 and t + 1 < length and t + 1 >= length - answer)
    return torch.tensor(positions), torch.tensor(sees), torch.tensor(predicts)


MISTAKES = {
    "positions": (0, "Positions go on from example to example: each begins at 0."),
    "causal": (1, "An example sees the ones before it in the row: causal is not enough."),
    "both ways": (1, "Within an example a token sees those behind it."),
    "not itself": (1, "A token sees itself, too."),
    "padding": (1, "A place of padding sees nothing: the softmax of nothing is nan. It sees itself."),
    "padding together": (1, "A place of padding sees itself alone."),
    "not shifted": (2, "The output at a place predicts the NEXT token: the mask of the labels is one place further."),
    "border": (
        2,
        "The last token of an example predicts the first of the next one: they have nothing to do with each other.",
    ),
    "prompt": (2, "The prompts are in the loss."),
    "last": (2, "The last token of an example predicts nothing that is learned."),
}
PARTS = ("positions", "sees", "predicts")


def check_row(f, lengths: list[int], answers: list[int], padding: int) -> None:
    width = sum(lengths) + padding
    found = f(torch.tensor(lengths), torch.tensor(answers), width)
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise AssertionError("the result should be three tensors: positions, sees, predicts")
    expected = by_places(lengths, answers, width)
    for place, name in enumerate(PARTS):
        mistakes = {
            sentence: by_places(lengths, answers, width, mistake)[place]
            for mistake, (part, sentence) in MISTAKES.items()
            if part == place
        }
        compare(found[place], expected[place], mistakes, what=name)


def drawn(examples: int) -> tuple[list[int], list[int]]:
    lengths = [draw(4, 8) for _ in range(examples)]
    return lengths, [draw(2, length - 2) for length in lengths]


@q2.case("one example")
def _(f):
    length = draw(6, 60)
    check_row(f, [length], [draw(2, length - 2)], padding=0)


@q2.case("three examples")
def _(f):
    check_row(f, *drawn(3), padding=0)


@q2.case("padding behind them")
def _(f):
    check_row(f, *drawn(3), padding=draw(2, 5))


@q2.case("examples without a prompt")
def _(f):
    lengths, answers = drawn(4)
    for i in (draw(0, 1), draw(2, 3)):
        answers[i] = lengths[i]
    check_row(f, lengths, answers, padding=draw(1, 3))
