"""Checks of lesson 12: gradients without autograd, a ledger, a leak, weights that do not move, and a kernel to mend."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.comparison import as_tensor
from rlcourse.course.checks.gradients import Numbers, by_autograd, norm_gradients
from rlcourse.course.checks.kernels import check_kernel, kernel_question

q1 = Question("q1", "wrong_gradient", hint="A right gradient fits at some step; a wrong one at none.")
STEPS = torch.tensor([10.0**-k for k in range(8)], dtype=torch.float64)


@q1.expects({
    "size": "Their sizes differ: ask how wrong a gradient is for its size.",
    "best": "That one is right: it fits best.",
    "mean": "A mean hides one wrong number among thousands: take the worst.",
    **{k: f"Step {s:g} alone: large ones show curvature, small ones rounding, none tells for all."
       for k, s in enumerate(STEPS.tolist())},
})  # fmt: skip
def place_of_wrong(steps: Tensor, plus: Tensor, minus: Tensor, claims: Tensor, wrong: str | int = "") -> Tensor:
    """By all steps, or with a mistake, such as the number of the only step: a scalar."""
    errors = ((plus.double() - minus.double()) / (2 * steps[:, None]) - claims[:, None]).abs()  # [3, S, count]
    off = errors.mean(-1) if wrong == "mean" else errors.amax(-1)
    off = off if wrong == "size" else off / claims.abs().amax(-1, keepdim=True)
    at_best = off[:, wrong] if isinstance(wrong, int) else off.amin(1)
    return at_best.argmin() if wrong == "best" else at_best.argmax()


def table(scales: list[float], offset: list[float], curved: list[float], count: int) -> tuple[tuple, int]:
    """(plus, minus, claims) of three functions, each a sum of `count` sines, in random order: how large each is, what
    is added to it in that measure, how curved it is. Of the claims one is wrong in one number: its place."""
    place, order = draw(0, 2), torch.randperm(3)
    scale, added, bend = (torch.tensor(each).double()[order, None] for each in (scales, offset, curved))
    frequency = bend * (0.5 + torch.rand(3, count)).double()
    phase, x = (6.28 * torch.rand(3, count)).double(), (0.6 + 0.8 * torch.rand(3, count)).double()
    claims = scale * frequency * (frequency * x + phase).cos()
    claims[place, draw(0, count - 1)] += (2 * draw(0, 1) - 1) * between(0.06, 0.1) * claims[place].abs().max()
    waves = (frequency * x + phase).sin()
    others = waves.sum(-1, keepdim=True) - waves  # what stays where one number is moved: [3, count]

    def values(side: int) -> Tensor:
        moved = (frequency[:, None] * (x[:, None] + side * STEPS[:, None]) + phase[:, None]).sin()  # [3, S, count]
        return (scale[:, None] * (others[:, None] + moved + added[:, None])).float()

    return (values(1), values(-1), claims.float()), place


def check_tables(f, scales=(1.0, 1.0, 1.0), offset=(0.0, 0.0, 0.0), curved=(1.0, 1.0, 1.0), count=6) -> None:
    tables = [table(scales, offset, curved, count) for _ in range(16)]
    check_each(q1, f, [(STEPS, *given) for given, _ in tables], [place for _, place in tables])


def check_each(question: Question, f, requests: list[tuple], expected: list[int]) -> None:
    """All results at once: one alone leaves too few answers to tell one mistake from another."""

    def each(function) -> Tensor:
        return torch.stack([as_tensor(function(*request)) for request in requests])

    mistakes = {said: each(wrong) for said, wrong in question.mistakes.items()}
    compare(each(f), torch.tensor(expected), mistakes, "what it gives of several")


q1.case("sizes that differ")(lambda f: check_tables(f, scales=(0.001, 1.0, 1000.0)))
q1.case("functions that are much curved, values far from zero")(lambda f: [
    check_tables(f, (1.0, 2.0, 4.0), curved=(6.0, 6.0, 6.0)),
    check_tables(f, (1.0, 3.0, 9.0), (60.0, 60.0, 60.0), (0.7, 0.7, 0.7)),
])  # fmt: skip
q1.case("thousands of numbers")(  # values of 20,000 are rounded so much that a mean always takes theirs for wrong
    lambda f: check_tables(f, offset=(0.0, 1000.0, 20_000.0), count=2000)
)
q1.case("one much curved, one far from zero: each needs a step of its own")(
    lambda f: check_tables(f, offset=(0.0, 1000.0, 0.0), curved=(600.0, 0.7, 1.0))
)

q2 = Question("q2", "rows_that_fit", hint="What is there whatever the rows, what grows with them, what stops growing?")


def needed(rows, n, layers, kept, hidden, vocabulary, prompt, answer, chunk, again, mistake="") -> int:
    """In bytes, by the exercise's list."""
    fixed, tokens = {"moments": 10, "gradients": 14}.get(mistake, 18) * n, rows * (prompt + answer)
    activations = tokens * layers * kept
    if again:
        activations = tokens * layers * 4 * hidden + (0 if mistake == "one layer" else tokens * kept)
    of_answers = tokens if mistake == "all tokens" else rows * answer
    there = {"no chunk": of_answers, "a whole chunk": chunk}.get(mistake, min(chunk, of_answers))
    return fixed + activations + (1 if mistake == "one copy" else 3) * 4 * vocabulary * there


@q2.expects({
    "moments": "You forgot AdamW's two moments.",
    "gradients": "You forgot the gradients of the micro-batches before.",
    "one layer": "When a layer is computed again, all that it keeps is there at once.",
    "all tokens": "Only tokens of answers pass through the head.",
    "no chunk": "Logits exist for at most `chunk` tokens at a time.",
    "a whole chunk": "A micro-batch with fewer answer tokens than `chunk` has fewer logits.",
    "one copy": "Three tensors exist at once: the logits, their softmax, its gradient.",
}, also={"One more does not fit.": lambda *given: most(*given) + 1})  # fmt: skip
def most(budget: int, *sizes) -> int:
    """By trying. sizes: as `needed` takes them, a mistake last."""
    rows = 0
    while needed(rows + 1, *sizes) <= budget:
        rows += 1
    return rows


def check_fit(f, chunk: tuple[int, int], again: bool = False) -> None:
    """Five shapes, the last budget to the byte. chunk: from which to which."""
    requests, expected = [], [draw(0, 3), *(draw(4, 40) for _ in range(4))]
    for number, rows in enumerate(expected):
        hidden, layers = 64 * draw(2, 16), draw(3, 24)
        n, kept = 12 * layers * hidden * draw(hidden // 2, hidden), hidden * draw(20, 40)
        sizes = n, layers, kept, hidden, 500 * draw(1, 40), draw(20, 200), draw(50, 300), draw(*chunk), again
        room = needed(rows + 1, *sizes) - needed(rows, *sizes)
        requests.append((needed(rows, *sizes) + (0 if number == 4 else int(between(0, 1) * room)), *sizes))
    check_each(q2, f, requests, expected)


q2.case("all logits fit into a chunk")(lambda f: check_fit(f, (100_000, 200_000)))
q2.case("a small chunk")(lambda f: check_fit(f, (100, 300)))
q2.case("activations are computed again")(lambda f: check_fit(f, (100, 2000), again=True))
q2.case("a chunk that is reached on the way")(lambda f: check_fit(f, (1500, 5000)))

q3 = Question("q3", "gradients", hint="First on paper: the slopes of log p and of the entropy, for one logit.")


def check_slopes(f, n: int, chunk: int, vocabulary: int, a: float, b: float, temperature: float) -> None:
    """a: how large the factors of log-probs are."""
    d, a = draw(5, 9), a * torch.randn(n)
    hidden, head, targets = torch.randn(n, d), torch.randn(vocabulary, d), torch.randint(vocabulary, (n,))
    given = hidden, head, targets, a, b, temperature, chunk
    with Numbers() as seen:  # nothing while grading, where the function runs in another process
        found = f(*given)
    q3.check(lambda *_: found, *given)
    if n > 20 * chunk:  # else a few tensors of a chunk's logits are as large as all logits
        seen.check(largest=max(chunk * vocabulary, vocabulary * d, n * d), at_once=n * vocabulary // 2)


q3.expects({
    "temperature": "The temperature is missing: logits are divided by it.",
    "inner": "The temperature divides the gradient, too: it stands between hidden and logits.",
    "sign": "The entropy has the wrong sign: it is added.",
    "log p alone": "The entropy's part is missing.",
    "no H": "The entropy depends on p in two places: its slope is -p (log p + H).",
    "short": "The last chunk, which is not full, is missing.",
    "last": "That is one chunk's.",
}, parts={("the gradient of hidden", "the gradient of head"): None}, atol=1e-4)(by_autograd)  # fmt: skip
q3.case("log-probs alone, at temperature 1, and at another")(
    lambda f: [check_slopes(f, 12, 4, draw(20, 40), 1, 0.0, t) for t in (1.0, between(0.5, 0.8))]
)
q3.case("the entropy alone")(lambda f: check_slopes(f, 10, 5, draw(20, 40), 0, 0.7, between(1, 2)))
q3.case("both, and a last chunk that is not full")(lambda f: check_slopes(f, 13, 5, draw(30, 60), 1, 0.3, 0.8))
q3.case("many tokens, whose logits are never all there")(lambda f: check_slopes(f, 400, 4, draw(280, 320), 1, 0.3, 0.8))

q4 = Question("q4", "spoiled", hint="Whose token is it? Then one layer after the other; then: who predicts token t?")


@q4.expects({
    "one layer": "What a token has seen in one layer others see in the next.",
    "no shift": "The log-prob of token t is read at token t - 1.",
    "first tokens": "The first token of an answer is predicted by the last token of another.",
    "not learned": "Tokens that are not learned have no log-prob to be spoiled.",
})  # fmt: skip
def walk(positions, seen, learned, layers: int, mistake: str = "") -> Tensor:
    """Token by token and layer by layer."""
    owner = (positions == 0).cumsum(0).tolist()
    looks, tokens = seen.tolist(), range(len(owner))
    bad, result = [False] * len(owner), [False]
    for _ in range(1 if mistake == "one layer" else layers):
        bad = [bad[i] or any(looks[i][j] and (owner[i] != owner[j] or bad[j]) for j in tokens) for i in tokens]
    for t in tokens[1:]:
        foreign = owner[t - 1] != owner[t] and mistake != "first tokens"
        found = bad[t] if mistake == "no shift" else bad[t - 1] or foreign
        result.append(found and (bool(learned[t]) or mistake == "not learned"))
    return torch.tensor(result)


def check_leaks(f, window: tuple[int, int], leaks: tuple[int, int], layers: tuple[int, int]) -> None:
    """Rows of three to four answers; each token sees `window` before it, of its own, and `leaks` see others."""
    for _ in range(4):
        sizes = torch.tensor([draw(4, 7) for _ in range(draw(3, 4))])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        place, depth = torch.arange(len(owner)), draw(*layers)
        positions = place - (sizes.cumsum(0) - sizes)[owner]
        back = place[:, None] - place
        seen = (owner[:, None] == owner) & (back >= 0) & (back <= draw(*window))
        for _ in range(draw(*leaks)):
            i = draw(int(sizes[0]), len(owner) - 1)
            seen[i, draw(0, i - int(positions[i]) - 1)] = True
        q4.check(f, positions, seen, (torch.rand(len(owner)) < 0.8) & (place > 0), depth)


q4.case("nothing leaks through attention")(lambda f: check_leaks(f, (2, 9), (0, 0), (3, 3)))
q4.case("one layer")(lambda f: check_leaks(f, (1, 3), (2, 4), (1, 1)))
q4.case("from layer to layer")(lambda f: check_leaks(f, (1, 1), (1, 3), (2, 8)))

q5 = Question("q5", "steps_to_move", hint="Where is the next number in the step's direction, and how far half-way?")


def by_gap(weights: Tensor, step: float, mistake: str) -> Tensor:
    """Steps from the distance to the next number, with a mistake."""
    bits = weights.view(torch.int16)
    outer = ((bits + 1).view(torch.bfloat16).double() - weights.double()).abs()  # distance to the next number
    inner = (weights.double() - (bits - 1).view(torch.bfloat16).double()).abs()
    outwards = outer / 2 / abs(step)
    half = torch.where(weights.double() * step > 0, outer, inner) / 2 / abs(step)
    return {
        "whole": (2 * half).ceil(),
        "ties move": half.ceil(),
        "ties stay": half.floor() + 1,
        "outwards": torch.where(bits % 2 == 0, outwards.floor() + 1, outwards.ceil()),
    }[mistake].long()


@q5.expects({
    "whole": "That is the whole way to the next number: half of it is enough.",
    "ties move": "A tie goes to the even number: sometimes that is the weight itself.",
    "ties stay": "On a tie an odd number gives way: it goes to its even neighbour.",
    "outwards": "Below a power of two numbers are twice as dense as above it: mind the direction.",
})  # fmt: skip
def least(weights: Tensor, step: float, mistake: str = "") -> Tensor:
    """By trying: each sum is exact, and rounded as a processor does it."""
    if mistake:
        return by_gap(weights, step, mistake)
    sums = weights.double()[:, None] + step * torch.arange(1, 20_000)
    return (sums.bfloat16() != weights[:, None]).int().argmax(1) + 1


def check_steps(f, sizes: Tensor, *units: int) -> None:
    """Both signs. units: steps as multiples of 2^-22, with which w + k step is exact in float32."""
    for unit in units:
        q5.check(f, (sizes * (2 * torch.randint(0, 2, sizes.shape) - 1)).bfloat16(), unit * 2.0**-22)


q5.case("weights of the usual size, and large ones")(
    lambda f: [check_steps(f, low + high * torch.rand(9), 9, -11) for low, high in ((0.004, 0.1), (0.5, 1.4))]
)
q5.case("half-way exactly")(lambda f: check_steps(f, 0.01 + 0.2 * torch.rand(9), 2 ** draw(0, 3), -4))
q5.case("powers of two")(lambda f: check_steps(f, 2.0 ** -torch.randint(1, 8, (6,)), 5, -3))

q6 = Question("q6", "mended", hint="Her test has weights of zero. Try others, and compare both gradients.")


def check_norm(f, rows: int, heads: int, weight_size: float, x_size: float = 1.0) -> None:
    shape = rows, heads, draw(6, 12)
    q6.check(f, x_size * torch.randn(shape), weight_size * torch.randn(shape[-1]), torch.randn(shape), 1e-3)


q6.expects({
    "hers": "It is still hers: try weights that are not 0. Where is the factor that y has?",
    "held still": "The scale depends on x: its part of the gradient is missing.",
    "no one": "The factor is 1 + weight.",
    "eps": "eps is missing.",
    "all heads": "Each head has a norm of its own: nothing is summed over heads in the gradient of x.",
}, parts={("the gradient of x", "the gradient of weight"): None}, atol=1e-3)(norm_gradients)  # fmt: skip
q6.case("weights of zero, as her test has them")(lambda f: check_norm(f, 3, 2, 0.0))
q6.case("weights that have been trained, one head and several; small numbers: eps counts")(
    lambda f: [check_norm(f, 3, *how) for how in ((1, 0.5), (draw(2, 4), 0.5), (2, 0.5, 0.03))]
)

q7 = kernel_question("q7", "SoftmaxBackward", "Copy the colleague's lines; the card names her mistakes one by one.")


def check_dz(f, rows: tuple[int, ...] = (2,), lengths: tuple[int, ...] = (64,), offsets: tuple = (0,)) -> None:
    """offsets: each is added to all logits, which changes no probability."""
    for count, n, offset in itertools.product(rows, lengths, offsets):
        z, g = 2 * torch.randn(count, n) + offset, torch.randn(count, n)
        wide, p = z.double().requires_grad_(), z.double().softmax(1)
        (right,) = torch.autograd.grad(wide.softmax(1), wide, g.double())
        product = p * g
        own = torch.stack([product[:, j % 32 :: 32].sum(1) for j in range(n)], 1)
        whole = product[:, : n // 32 * 32].sum(1, keepdim=True)
        mistakes = {
            "A lane's part of the sum is not the sum: add up over all lanes.": p * (g - own),
            "The columns after the last whole 32 have no part in the sum.": p * (g - whole),
            "The sum over the row is missing: all probabilities depend on each logit.": product,
            "The sum is over g times the probability, not over g alone.": p * (g - g.sum(1, keepdim=True)),
        }
        inputs = {"z": z, "log_sum": z.double().logsumexp(1).float(), "g": g}
        lost = "are nan: a power of a large number is infinite, and infinity is lost" if offset else "are nan"
        check_kernel(f, inputs, right, mistakes, f"{count} rows of {n}", "dz", atol=1e-4, nan=lost)


q7.case("what she tested: rows two by two, of 32, 64 or 96")(
    lambda f: check_dz(f, (2 * draw(1, 3),), (32 * draw(1, 3),))
)
q7.case("rows of any length")(lambda f: check_dz(f, (2,), (draw(2, 31), 32 * draw(1, 2) + draw(1, 31))))
q7.case("any number of rows")(lambda f: check_dz(f, (1, 2 * draw(1, 3) + 1)))
q7.case("logits far above zero, and far below it")(lambda f: check_dz(f, offsets=(draw(120, 400), -draw(120, 400))))
