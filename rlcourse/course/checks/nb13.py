"""Checks of lesson 13: rows of an SFT batch, examples that share a row, ranks from one budget, adapters, a wait."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, draw

q1 = Question("q1", "diagnose", hint="Write down the labels that a row should have. Where do those that it has differ?")
IGNORED, PAD, EOS = -100, 0, 1
FINE, PROMPT, PADDING, END, SHIFTED, FIRST = range(6)


def some_row(kind: int, width: int, pad: int, variant: int) -> tuple[list[int], list[int], int, int]:
    """ids, labels, tokens of the prompt, tokens in all, of a row with that mistake, made in one of several ways."""
    prompt, answer = draw(3, 6), draw(3, 5)  # the answer's end included
    length = prompt + answer
    ids = (torch.randperm(50)[:length] + 2).tolist()
    if draw(0, 1):
        ids[draw(0, prompt - 2)] = EOS  # of an earlier turn
    ids[-1] = 60 if kind == END and variant % 2 else EOS
    ids += [pad] * (width - length)
    begin = {PROMPT: (0, prompt - 1, 1)[variant % 3], FIRST: prompt + 1}.get(kind, prompt)
    end = {PADDING: (length + 1, width)[variant % 2], END: length - 1 + variant % 2}.get(kind, length)
    labels = [IGNORED] * begin + ids[begin:end] + [IGNORED] * (width - end)
    if kind == SHIFTED:
        labels = [*labels[1:], IGNORED]
    return ids, labels, prompt, length


def judged(ids: list[int], labels: list[int], prompt: int, length: int, mistake: str = "") -> int:
    """By tokens that are learned where they should not be or are not where they should."""
    learned = [t for t, label in enumerate(labels) if label != IGNORED]
    if mistake == "pads by id":
        length = next((t for t in range(prompt, len(ids)) if ids[t] in (PAD, EOS)), len(ids))
    if mistake == "first end":
        length = ids.index(EOS) + 1 if EOS in ids else len(ids)
    if mistake != "presence" and any(labels[t] != ids[t] for t in learned):
        return SHIFTED
    if any(t < prompt for t in learned):
        return PROMPT
    if any(t >= length for t in learned):
        return PADDING
    if (mistake != "cut off" and ids[length - 1] != EOS) or (mistake != "end ignored" and length - 1 not in learned):
        return END
    return FINE if prompt in learned else FIRST


@q1.expects({
    "pads by id": "Padding begins where a row's length ends: some batches pad with the very token that ends an answer.",
    "first end": "A prompt may have end tokens of its own, of earlier turns: `lengths` says where the answer ends.",
    "cut off": "A row whose last token is not the end token never learns to stop, whatever its labels are.",
    "end ignored": "An end token whose label is ignored is not learned.",
    "presence": "Compare labels with the ids above them: labels one place too early are no prompt that is learned.",
}, parts={"the list of mistakes": None})  # fmt: skip
def diagnosed(ids, labels, prompts, lengths, eos: int, mistake: str = "") -> Tensor:
    rows = zip(*(each.tolist() for each in (ids, labels, prompts, lengths)), strict=True)
    return torch.tensor([judged(*row, mistake) for row in rows])


def check_rows(f, *kinds: int, pad: int = PAD) -> None:
    order = [(kinds[i], variant) for variant in range(3) for i in torch.randperm(len(kinds)).tolist()]
    rows = [some_row(kind, 14, pad, variant) for kind, variant in order]
    q1.check(f, *map(torch.tensor, zip(*rows, strict=True)), EOS)


q1.case("rows that are fine, prompts and padding that are learned")(lambda f: check_rows(f, FINE, PROMPT, PADDING))
q1.case("an end that is not learned, labels one place off, a first token left out")(
    lambda f: [check_rows(f, *kinds) for kinds in ((END, FINE, END), (SHIFTED, FIRST, FINE, PROMPT))]
)
q1.case("all of them, padded with the end token")(lambda f: check_rows(f, *range(6), pad=EOS))

q2 = Question("q2", "keep_apart", hint="For each place of the row: which example is it of, and which token of it?")


@q2.expects({
    "positions": "Positions go on from example to example: each begins at 0.",
    "causal": "An example sees the ones before it in the row: causal is not enough.",
    "both ways": "Within an example a token sees those behind it.",
    "padding": "A place of padding sees nothing: the softmax of nothing is nan. It sees itself.",
    "not shifted": "The output at a place predicts the NEXT token: the mask of the labels is one place further.",
    "border": "The last token of an example does not predict the first of the next one.",
    "prompt": "The prompts are in the loss.",
}, parts={("positions", "sees", "predicts"): None})  # fmt: skip
def by_places(lengths: Tensor, answers: Tensor, width: int, mistake: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Positions [width], sees [width, width], predicts [width]."""
    lengths, answers = lengths.tolist(), answers.tolist()
    owner = [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    owner += [(-1 - place, 0) for place in range(width - len(owner))]  # each place of padding is alone
    positions, sees, predicts = [], [], []
    for here, (i, t) in enumerate(owner):
        positions.append(here if mistake == "positions" and i >= 0 else t)
        row = []
        for there, (j, _) in enumerate(owner):
            own = {"causal": i == j or min(i, j) >= 0, "padding": i == j >= 0}.get(mistake, i == j)
            row.append(own and (there <= here or mistake == "both ways"))
        sees.append(row)
        j, u = owner[here + 1] if mistake == "border" and here + 1 < width else (i, t + (mistake != "not shifted"))
        inside = j >= 0 and u < lengths[j]
        predicts.append(inside and (u >= lengths[j] - answers[j] or mistake == "prompt"))
    return torch.tensor(positions), torch.tensor(sees), torch.tensor(predicts)


def check_places(f, count: int, longest: int = 8, padding: int = 0, alone: tuple[int, ...] = ()) -> None:
    """alone: the numbers of examples without a prompt."""
    lengths = [draw(longest // 2, longest) for _ in range(count)]
    answers = [length if i in alone else draw(2, length - 2) for i, length in enumerate(lengths)]
    q2.check(f, torch.tensor(lengths), torch.tensor(answers), sum(lengths) + padding)


q2.case("one example, and three")(lambda f: [check_places(f, *count) for count in ((1, 60), (3,))])
q2.case("padding behind them")(lambda f: check_places(f, 3, padding=draw(2, 5)))
q2.case("examples without a prompt")(lambda f: check_places(f, 4, padding=draw(1, 3), alone=(draw(0, 1), draw(2, 3))))

q3 = Question("q3", "ranks", hint="How much less is left out if this matrix gets one rank more?", seconds=20)


def update(values: list[float], rows: int, columns: int) -> Tensor:
    """With these singular values: [rows, columns] float32."""
    left, right = (torch.linalg.qr(torch.randn(n, len(values)).double())[0] for n in (rows, columns))
    return (left * torch.tensor(values, dtype=torch.float64) @ right.T).float()


def squares(updates: Tensor) -> list[list[float]]:
    return torch.linalg.svdvals(updates.double()).square().tolist()


def greedy(worth: Callable) -> Callable:
    """Ranks one by one to the matrix of the largest `worth`, a function of its squares and its rank so far."""

    def ranks(updates: Tensor, budget: int) -> list[int]:
        found, way = squares(updates), [0] * len(updates)
        for _ in range(budget):
            open_ = [i for i in range(len(way)) if way[i] < len(found[i])]
            way[max(open_, key=lambda i: worth(found[i], way[i]))] += 1
        return way

    return ranks


@q3.expects(also={
    "You compared shares of each matrix: what is left out of all together?": greedy(lambda s, r: s[r] / sum(s)),
    "You went by all that a matrix leaves out: what does ONE more rank take of it?": greedy(lambda s, r: sum(s[r:])),
    "All ranks alike: some matrices changed more than others.": greedy(lambda s, r: -r),
}, parts={"the ranks": None})  # fmt: skip
def best(updates: Tensor, budget: int) -> list[int]:
    """Of all ways to give the budget away, the one that leaves out least."""
    found = squares(updates)
    ways = (w for w in itertools.product(range(len(found[0]) + 1), repeat=len(found)) if sum(w) == budget)
    return list(min(ways, key=lambda way: sum(sum(s[r:]) for s, r in zip(found, way, strict=True))))


def falling(first: float, factor: float, large: int = 5) -> list[float]:
    """Five singular values, each moved a little: so many `large` ones that fall by a factor, then small ones."""
    return [(first * factor**i if i < large else 0.1 / i) * between(1, 1.05) for i in range(5)]


@q3.cases_of({  # case: from where to where the budget is drawn, and what `falling` takes for three matrices
    "a large matrix of rank 1": ((4, 6), (30, 0.001), (1, 0.9), (2, 0.7)),
    "one that hardly changed": ((5, 8), (3, 0.8), (0.01, 0.5), (2.2, 0.75)),
    "a flat one beside two large values": ((3, 4), (1.15, 0.98), (2, 0.85, 2), (0.4, 0.9)),
    "the whole budget of a matrix": ((6, 8), (0.1, 0.9), (9, 0.9), (1, 0.5)),
})  # fmt: skip
def _(f, drawn_from):
    budget, *shapes = drawn_from
    q3.check(f, torch.stack([update(falling(*shape), 7, 5) for shape in shapes]), draw(*budget))


q4 = Question("q4", "merge", hint="What does one adapter add to the weight? When is the sum rounded?")


@q4.expects({
    "alpha": "You multiplied by alpha: the product counts alpha / rank.",
    "no scale": "You left alpha / rank out.",
    "each": "You rounded after each adapter: small ones vanish that together do not. Round once.",
    "product": "You rounded B A before it was added: add in float32, and round once.",
    "transposed": "You added the transpose of B A.",
}, parts={"the merged weight": None}, atol=0.0)  # fmt: skip
def merged(weight: Tensor, adapters: list, mistake: str = "") -> Tensor:
    """In float64, which holds every sum here without an error."""
    total = weight.double()
    for a, b, alpha in adapters:
        scale = {"alpha": alpha, "no scale": 1.0}.get(mistake, alpha / len(a))
        added = scale * torch.einsum("or,ri->oi", b.double(), a.double())
        added = added.to(weight.dtype).double() if mistake == "product" else added
        total = total + (added.T if mistake == "transposed" and added.shape[0] == added.shape[1] else added)
        total = total.to(weight.dtype).double() if mistake == "each" else total
    return total.to(weight.dtype)


def grid(*shape: int) -> Tensor:
    """Small whole numbers over 64: products and sums of them are exact in float32, in any order, and not in bf16."""
    return torch.randint(-32, 33, shape) / 64


def check_sum(f, weight: Tensor, *ranks: int, scale: float = 1.0) -> None:
    rows, columns = weight.shape
    adapters = [(grid(rank, columns), scale * grid(rows, rank), float(rank * 2 ** draw(1, 3))) for rank in ranks]
    found = f(weight, adapters)
    if isinstance(found, Tensor):
        assert found.dtype == weight.dtype, f"the result has dtype {found.dtype}, the weight {weight.dtype}"
    q4.check(lambda *_: found, weight, adapters)


q4.case("one adapter, and three of several ranks at a square weight")(
    lambda f: [check_sum(f, grid(6, 4), draw(2, 3)), check_sum(f, grid(5, 5), 4, draw(1, 2), 8)]
)
q4.case("bf16")(lambda f: check_sum(f, (1 + grid(24, 16)).bfloat16(), draw(3, 5)))
q4.case("bf16, small adapters that add up")(
    lambda f: check_sum(f, (1 + grid(24, 16)).bfloat16(), *[2] * 6, scale=2**-8)
)

q5 = Question("q5", "steps_to_start", hint="When do all answers of a group get the same reward?")


def at_least_once(p, times: int):
    """Whether something of probability p happens in so many tries; a p of 1e-18 is not lost."""
    return math.fsum((-1) ** (k + 1) * math.comb(times, k) * p**k for k in range(1, times + 1))


@q5.expects({
    "all right": "A group in which all are right has no signal either.",
    "mean rate": "You put the mean rate into the formula: take the mean of what the formula says of each problem.",
    "a prompt": "That counts groups: a step has several.",
    "expected groups": "That is 1 / the expected number of groups with a signal: a step may have two of them.",
}, also={
    "tiny rates are lost: 1 - (1 - p) ** group is 0 in rounding; use log1p and expm1": lambda *_: math.inf
}, parts={"the number of steps": None})  # fmt: skip
def waiting(rates: Tensor, group: int, prompts: int, mistake: str = "") -> float:
    p = [rates.mean().item()] if mistake == "mean rate" else rates.tolist()
    signals = [at_least_once(r, group) - (0 if mistake == "all right" else r**group) for r in p]
    q = math.fsum(signals) / len(p)
    seen = {"a prompt": q, "expected groups": q * prompts}.get(mistake, at_least_once(q, prompts))
    return 1 / seen if seen > 0 else math.inf


def check_waiting(f, rates: Tensor, group: int, prompts: int) -> None:
    expected = waiting(rates, group, prompts)
    atol = 1e-2 * expected if 1e5 < expected < math.inf else 1e-5
    q5.check(f, rates, group, prompts, atol=atol)


def drawn(count: int, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(count, dtype=torch.float64)


q5.case("easy and hopeless problems")(lambda f: [
    check_waiting(f, torch.cat([torch.zeros(draw(20, 30)), drawn(draw(2, 4), 0.8, 0.95)]), group, prompts)
    for group, prompts in ((draw(2, 4), 1), (8, draw(2, 3)))
])  # fmt: skip
q5.case("problems that always work, and nothing but zeros and ones")(lambda f: [
    check_waiting(f, torch.cat([torch.zeros(draw(5, 9)), torch.ones(9), drawn(3, 0, 0.3)]), draw(3, 6), 2),
    check_waiting(f, (torch.arange(9) < draw(0, 5)).double(), draw(2, 8), draw(1, 8)),
])  # fmt: skip
q5.case("a rate of 1e-18")(lambda f: check_waiting(f, drawn(draw(3, 5), 1e-18, 2e-18), draw(4, 8), draw(2, 4)))
