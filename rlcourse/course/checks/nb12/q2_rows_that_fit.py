"""q2: the largest micro-batch that fits."""

import torch

from rlcourse.course.checks import Question, compare, draw

q2 = Question("q2", "rows_that_fit", hint="What is there whatever the rows, what grows with them, what stops growing?")


def needed(rows, n, layers, kept, hidden, vocabulary, prompt, answer, chunk, again, mistake="") -> int:
    """Bytes for micro-batches of so many rows, by the exercise's list."""
    fixed = {"moments": 10, "gradients": 14, "copy": 16}.get(mistake, 18) * n
    tokens = rows * (answer if mistake == "prompts" else prompt + answer)
    activations = tokens * layers * kept
    if again:
        activations = tokens * layers * 4 * hidden + (0 if mistake == "one layer" else tokens * kept)
    of_answers = tokens if mistake == "all tokens" else rows * answer
    stand = {"no chunk": of_answers, "a whole chunk": chunk}.get(mistake, min(chunk, of_answers))
    return fixed + activations + (1 if mistake == "one copy" else 3) * 4 * vocabulary * stand


def most(budget, *sizes, mistake: str = "") -> int:
    rows = 0
    while needed(rows + 1, *sizes, mistake) <= budget:
        rows += 1
    return rows


LEDGER = {
    "moments": "You forgot AdamW's two moments.",
    "gradients": "You forgot the gradients of the micro-batches before.",
    "copy": "You forgot the engine's copy of the weights.",
    "prompts": "Prompts have activations, too.",
    "one layer": "When a layer is computed again, all that it keeps is there at once.",
    "all tokens": "Only tokens of answers pass through the head.",
    "no chunk": "Logits exist for at most `chunk` tokens at a time.",
    "a whole chunk": "A micro-batch with fewer answer tokens than `chunk` has fewer logits.",
    "one copy": "Three tensors exist at once: the logits, their softmax, its gradient.",
}


def check_fit(f, draw_one) -> None:
    """Five shapes at once, the last budget to the byte."""
    requests, expected = [], []
    for number in range(5):
        sizes = draw_one()
        wanted = draw(0, 3) if number == 0 else draw(4, 40)
        room = needed(wanted + 1, *sizes) - needed(wanted, *sizes)
        slack = 0 if number == 4 else int(torch.rand(()).item() * room)
        requests.append((needed(wanted, *sizes) + slack, *sizes))
        expected.append(wanted)
    results = [f(*request) for request in requests]
    if any(result is None for result in results):
        raise AssertionError("the result is None: is there a `return`?")
    mistakes = {said: torch.tensor([most(*r, mistake=m) for r in requests]) for m, said in LEDGER.items()}
    mistakes["One more does not fit."] = torch.tensor(expected) + 1
    found = torch.stack([torch.as_tensor(result) for result in results])
    compare(found, torch.tensor(expected), mistakes, what="the number of rows, for five shapes,")


def shape(chunk: tuple[int, int], again: bool) -> tuple:
    """n, layers, kept, hidden, vocabulary, prompt, answer, chunk, again."""
    hidden, layers = 64 * draw(2, 16), draw(3, 24)
    return (
        12 * layers * hidden * draw(hidden // 2, hidden), layers, hidden * draw(20, 40), hidden,
        500 * draw(1, 40), draw(20, 200), draw(50, 300), draw(*chunk), again,
    )  # fmt: skip


@q2.case("all logits fit into a chunk")
def _(f):
    check_fit(f, lambda: shape((100_000, 200_000), False))


@q2.case("a small chunk")
def _(f):
    check_fit(f, lambda: shape((100, 300), False))


@q2.case("activations are computed again")
def _(f):
    check_fit(f, lambda: shape((100, 2000), True))


@q2.case("a chunk that is reached on the way")
def _(f):
    check_fit(f, lambda: shape((1500, 5000), False))
