"""Checks of exercises 05: intervals, mismatch, a schedule, and naming a failure."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.lessons.curve_records import load_curve

q1 = Question("q1", "accuracy_interval", hint="Mean, standard error, and the mean less and plus z standard errors.")
q2 = Question("q2", "paired_interval", hint="Subtract problem by problem first, then take the mean and the deviation.")
q3 = Question("q3", "mismatch", hint="Choose the tokens where the mask is true before you compute with them.")
q4 = Question("q4", "learning_rate", hint="Two cases: before step `warmup`, and from there on.")
q5 = Question("q5", "diagnose", hint="Compare the mean of the first five steps with that of the last five.")


def interval(values: list[float], z: float, divisor: int | None = None) -> Tensor:
    """Mean and mean -+ z standard errors, by sums over a list; divisor: n if not given."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / (divisor or n)
    width = z * math.sqrt(variance / n)
    return torch.tensor([mean, mean - width, mean + width])


def accuracy_mistakes(right: Tensor, z: float) -> dict[str, Tensor]:
    n, p = len(right), right.float().mean().item()
    variance = p * (1 - p)
    widths = {
        "The standard error is the root of p (1 - p) / n: the root is missing.": z * variance / n,
        "Divide by n under the root: this is the deviation of one answer, not of their mean.": z * math.sqrt(variance),
        "The half width is z standard errors: z is missing.": math.sqrt(variance / n),
        "This is the whole width on each side: the interval is p - z se to p + z se.": 2 * z * math.sqrt(variance / n),
    }
    if n > 1:
        widths["You divided by n - 1: the formula of this exercise divides by n."] = z * math.sqrt(variance / (n - 1))
    return {sentence: torch.tensor([p, p - w, p + w]).clamp(0, 1) for sentence, w in widths.items()}


@q1.case("85 right of 100")
def _(f):
    for count in (85, draw(50, 90)):
        right = torch.randperm(100) < count
        compare(f(right), interval(right.float().tolist(), 1.96), accuracy_mistakes(right, 1.96))


@q1.case("random answers, another z")
def _(f):
    for n in (8, 30, 200):
        right = torch.rand(n) < 0.6
        right[:2] = torch.tensor([True, False])
        expected = interval(right.float().tolist(), 1.0).clamp(0, 1)
        compare(f(right, 1.0), expected, {"z is an argument: you always used 1.96.": f_with(right, 1.96)})
        compare(f(right, z=1.0), expected, accuracy_mistakes(right, 1.0))


def f_with(right: Tensor, z: float) -> Tensor:
    return interval(right.float().tolist(), z).clamp(0, 1)


@q1.case("ends are cut to 0 and 1; no width when all agree")
def _(f):
    right = torch.tensor([True, True, True, True, False])
    uncut = interval(right.float().tolist(), 1.96)
    compare(f(right), uncut.clamp(0, 1), {"An accuracy is never above 1 or below 0: cut the ends.": uncut})
    compare(f(torch.ones(7, dtype=torch.bool)), torch.ones(3))
    compare(f(torch.zeros(7, dtype=torch.bool)), torch.zeros(3))
    right = torch.rand(50) < 0.5
    compare(f(right), interval(right.float().tolist(), 1.96).clamp(0, 1), accuracy_mistakes(right, 1.96))


def paired_mistakes(first: Tensor, second: Tensor, z: float) -> dict[str, Tensor]:
    a, b, n = first.float().mean().item(), second.float().mean().item(), len(first)
    d = (second.float() - first.float()).tolist()
    mean, _, high = interval(d, z).tolist()
    apart = z * math.sqrt((a * (1 - a) + b * (1 - b)) / n)
    wide = (high - mean) * math.sqrt(n)
    return {
        "The sign is turned: take `second` less `first`.": -interval(d, z)[[0, 2, 1]],
        "This adds the two variances: that is for models asked different problems. Subtract first.": torch.tensor(
            [mean, mean - apart, mean + apart]
        ),
        "You divided by n - 1: here std divides by n (torch: correction=0).": interval(d, z, n - 1),
        "Divide the deviation by the root of n: this is the deviation of one problem.": torch.tensor(
            [mean, mean - wide, mean + wide]
        ),
    }


def check_pair(f, n: int, z: float = 1.96) -> None:
    """Two models that agree on most of n problems."""
    first = torch.rand(n) < 0.7
    second = first ^ (torch.rand(n) < 0.2)
    second[0], second[1] = ~first[0], first[1]
    expected = interval((second.float() - first.float()).tolist(), z)
    compare(f(first, second, z), expected, paired_mistakes(first, second, z))


@q2.case("ten problems by hand")
def _(f):
    first = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 1, 0]).bool()
    second = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 1, 1]).bool()
    expected = torch.tensor([0.2, 0.2 - 1.96 * math.sqrt(0.036), 0.2 + 1.96 * math.sqrt(0.036)])
    compare(f(first, second), expected, paired_mistakes(first, second, 1.96))
    check_pair(f, 40)


@q2.case("random models that agree on most problems, another z")
def _(f):
    for n in (20, 300):
        check_pair(f, n, 2.5)


@q2.case("one model against itself: no difference, no width")
def _(f):
    first = torch.rand(50) < 0.5
    compare(f(first, first.clone()), torch.zeros(3))
    check_pair(f, 50)


def mismatch_by_loop(recomputed: Tensor, sampled: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    gaps = [
        recomputed[i, j].item() - sampled[i, j].item()
        for i in range(mask.shape[0])
        for j in range(mask.shape[1])
        if mask[i, j]
    ]
    outside = sum(not 1 - epsilon <= math.exp(gap) <= 1 + epsilon for gap in gaps)
    sizes = [abs(gap) for gap in gaps]
    return torch.tensor([sum(sizes) / len(sizes), max(sizes), outside / len(gaps)])


def mismatch_mistakes(recomputed: Tensor, sampled: Tensor, mask: Tensor, epsilon: float) -> dict[str, Tensor]:
    gap = (recomputed - sampled).nan_to_num(0, 0, 0)
    real, masked = gap[mask], gap * mask
    mean, largest, share = mismatch_by_loop(recomputed, sampled, mask, epsilon)
    filled = mask.sum() / mask.numel()
    rows = (masked.abs().sum(1) / mask.sum(1).clamp(min=1)).mean()

    def outside(gaps: Tensor) -> Tensor:
        return ((gaps.exp() - 1).abs() > epsilon).float().mean()

    wrong = {
        "You left the mask out: padding is not a token.": (gap.abs().mean(), gap.abs().max(), outside(gap)),
        "You divided by all positions: divide by the number of real tokens.": (mean * filled, largest, share * filled),
        "Take the absolute gap: here gaps of both signs cancel.": (real.mean(), largest, share),
        "The largest gap is the largest in size: a negative one counts too.": (mean, real.max(), share),
        "The share compares the ratio with 1, not the gap with 0: take exp first.": (
            mean,
            largest,
            (real.abs() > epsilon).float().mean(),
        ),
        "The ratio is that of recomputed to sampled: yours is turned over.": (mean, largest, outside(-real)),
        "Every token weighs the same: you averaged the rows' means.": (rows, largest, share),
    }
    return {sentence: torch.stack(numbers) for sentence, numbers in wrong.items()}


def random_logprobs(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Recomputed and sampled log-probs, and a mask with a row of every length from 1 on."""
    sampled = -torch.rand(rows, length) * 3
    recomputed = sampled + 0.25 * torch.randn(rows, length) - 0.05
    mask = torch.arange(length) < (1 + torch.arange(rows) % length)[:, None]
    return recomputed, sampled, mask


@q3.case("random rows of different lengths")
def _(f):
    for rows, length, epsilon in ((6, 8, 0.2), (12, 5, 0.1), (1, 1, 0.2)):
        inputs = random_logprobs(rows, length)
        compare(f(*inputs, epsilon), mismatch_by_loop(*inputs, epsilon), mismatch_mistakes(*inputs, epsilon))


@q3.case("a ratio between 0.8 and 1.2 is inside")
def _(f):
    ratios = torch.tensor([[0.72, 0.82, 1.0, 1.12, 1.21]]) + 0.06 * torch.rand(1, 5)
    inputs = ratios.log(), torch.zeros(1, 5), torch.ones(1, 5, dtype=torch.bool)
    compare(f(*inputs), mismatch_by_loop(*inputs, 0.2), mismatch_mistakes(*inputs, 0.2))


@q3.case("what stands under the mask does not matter: nan and infinity")
def _(f):
    recomputed, sampled, mask = random_logprobs(5, 6)
    expected = mismatch_by_loop(recomputed, sampled, mask, 0.2)
    recomputed, sampled = recomputed.masked_fill(~mask, float("nan")), sampled.masked_fill(~mask, float("-inf"))
    compare(f(recomputed, sampled, mask), expected, mismatch_mistakes(recomputed, sampled, mask, 0.2))


@q3.case("an engine that is the policy has no gap")
def _(f):
    _, sampled, mask = random_logprobs(4, 4)
    compare(f(sampled, sampled.clone(), mask), torch.zeros(3))
    inputs = random_logprobs(5, 7)
    compare(f(*inputs, 0.2), mismatch_by_loop(*inputs, 0.2), mismatch_mistakes(*inputs, 0.2))


def schedule(steps: int, warmup: int, peak: float) -> Tensor:
    """The learning rate of every step, as a table: [steps]."""
    falling = steps - warmup
    table = [peak * (i + 1) / warmup for i in range(min(warmup, steps))]
    table += [peak * math.cos(math.pi / 2 * i / falling) ** 2 for i in range(falling)]
    return torch.tensor(table)


def schedule_mistakes(steps: int, warmup: int, peak: float) -> dict[str, Tensor]:
    span = steps - warmup
    late, rising = ([(i + first) / warmup for i in range(warmup)] for first in (0, 1))

    def half(share: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * share))

    def then(fall) -> list[float]:
        return rising + [fall(i) for i in range(span)]

    lists = {
        "The first step has rate 0: it rises as (step + 1) / warmup.": late + [half(i / span) for i in range(span)],
        "The cosine begins after warm-up: subtract `warmup` from the step.": then(lambda i: half((warmup + i) / steps)),
        "You forgot to subtract `warmup` below: the falling part has steps - warmup steps.": then(
            lambda i: half(i / steps)
        ),
        "This falls in a straight line: take half a cosine.": then(lambda i: 1 - i / span),
        "This is a whole period: the rate rises again. Half a period is cos(pi * share).": then(
            lambda i: half(2 * i / span)
        ),
        "Shift the cosine up: half of 1 + cos, which falls from 1 to 0 over half a period.": then(
            lambda i: math.cos(math.pi / 2 * i / span)
        ),
        "The peak is missing: multiply by it.": [rate / peak for rate in then(lambda i: half(i / span))],
        "There is no warm-up in yours.": [half(i / steps) for i in range(steps)],
    }
    return {sentence: peak * torch.tensor(values) for sentence, values in lists.items()}


@q4.case("every step of some runs")
def _(f):
    for steps, warmup, peak in ((20, 5, 1.0), (60, 10, 0.5), (7, 1, 2.0)):
        peak = peak * (1 + torch.rand(()).item())
        found = torch.tensor([float(f(step, steps, warmup, peak)) for step in range(steps)])
        compare(found, schedule(steps, warmup, peak), schedule_mistakes(steps, warmup, peak), "the list of rates")


@q4.case("without warm-up it starts at the peak; at the end it is 0")
def _(f):
    peak = 3.0 + torch.rand(()).item()
    compare(f(0, 10, 0, peak), torch.tensor(peak), what="the rate of step 0 with warmup 0")
    compare(f(5, 10, 0, peak), torch.tensor(peak / 2), what="the rate at half time with warmup 0")
    compare(f(10, 10, 2, peak), torch.tensor(0.0), what="the rate at step `steps`")


@q4.case("a run that is all warm-up")
def _(f):
    peak = 1.0 + torch.rand(()).item()
    found = torch.tensor([float(f(step, 4, 4, peak)) for step in range(4)])
    compare(found, peak * torch.tensor([0.25, 0.5, 0.75, 1.0]), what="the list of rates")
    compare(f(4, 4, 4, peak), torch.tensor(peak), what="the rate of step 4 when all 4 steps are warm-up")


NAMES = ("HEALTHY", "STILL", "COLLAPSED", "CUT_OFF", "HACKED")
HEALTHY, STILL, COLLAPSED, CUT_OFF, HACKED = range(5)
METRICS = ("reward", "accuracy", "truncated", "kl")


def recorded(name: str) -> list[tuple[Tensor, ...]]:
    """The four metrics of each seed of a recorded run of the lesson."""
    none = float("nan")
    runs = load_curve(f"lesson05_{name}")["results"]
    return [tuple(torch.tensor([none if v is None else v for v in run["metrics"][m]]) for m in METRICS) for run in runs]


def expect(f, run: tuple[Tensor, ...], right: int, what: str) -> None:
    """Raise AssertionError, with what the metrics did, unless f gives the run its right name."""
    found = f(*run)
    if found is None:
        raise AssertionError("the result is None: does every path return one of the five numbers?")
    if not isinstance(found, int | float | Tensor) or int(found) not in range(5):
        raise AssertionError(f"the result is {found!r}: return one of the five numbers")
    if int(found) == right:
        return
    reward, accuracy, truncated = ((m[:5].mean().item(), m[-5:].mean().item()) for m in run[:3])
    raise AssertionError(
        f"{what} is {NAMES[right]}, not {NAMES[int(found)]}: reward {reward[0]:.2f} to {reward[1]:.2f}, "
        f"accuracy {accuracy[0]:.2f} to {accuracy[1]:.2f}, truncated {truncated[0]:.2f} to {truncated[1]:.2f} "
        "(means of the first and the last five steps)"
    )


RECORDED = {
    "healthy": HEALTHY,
    "half_format": HEALTHY,
    "words_strict": HEALTHY,
    "format": HACKED,
    "collapse": COLLAPSED,
    "truncation": CUT_OFF,
    "still": STILL,
}


def recorded_case(name: str, right: int) -> None:
    @q5.case(f"recorded: {name}, three seeds")
    def _(f):
        for reward, accuracy, *others in recorded(name):
            reward, accuracy = (m + 0.002 * torch.randn(len(m)) for m in (reward, accuracy))
            expect(f, (reward, accuracy, *others), right, f"the recorded run {name!r}")
        expect_other(f, right)


for _name, _right in RECORDED.items():
    recorded_case(_name, _right)


def expect_other(f, right: int) -> None:
    """Whoever gives every run one name is wrong: a run that is made up, and not what the case is about."""
    if right == HEALTHY:
        run = line(0.8, 0.1), line(0.6, 0.1), line(0.0, 0.0), drift(0.5)
        expect(f, run, COLLAPSED, "a run whose reward falls")
    else:
        run = line(0.1, 0.8), line(0.1, 0.8), line(0.05, 0.0), drift(0.1)
        expect(f, run, HEALTHY, "a run that learns")


def line(start: float, end: float, steps: int = 30) -> Tensor:
    """A metric that goes from `start` to `end` in a straight line, with a little noise."""
    return (torch.linspace(start, end, steps) + 0.01 * torch.randn(steps)).clamp(0, 1)


def drift(end: float, steps: int = 30) -> Tensor:
    """A KL that grows to `end`."""
    return torch.linspace(0, end, steps)


@q5.case("one bad step at the end is noise")
def _(f):
    accuracy = line(0.2, 0.8)
    accuracy[-1] = 0.2
    expect(f, (accuracy, accuracy, line(0.05, 0.0), drift(0.1)), HEALTHY, "a run with one bad step at the end")
    expect_other(f, HEALTHY)


@q5.case("answers cut off at the start only are no failure")
def _(f):
    truncated = line(0.6, 0.0)
    expect(f, (line(0.1, 0.7), line(0.1, 0.7), truncated, drift(0.1)), HEALTHY, "a run that learns to end its answers")
    expect_other(f, HEALTHY)


@q5.case("a reward that pays for something else, accuracy flat")
def _(f):
    run = line(0.3, 0.9), line(0.2, 0.2), line(0.0, 0.0), drift(0.3)
    expect(f, run, HACKED, "a run whose reward rises alone")
    expect_other(f, HACKED)


@q5.case("a collapse into short answers: nothing is cut off")
def _(f):
    fallen = torch.cat([line(0.3, 0.4, 10), torch.zeros(20)])
    kl = torch.cat([drift(5.0, 10), torch.full((20,), float("nan"))])
    expect(f, (fallen, fallen, torch.zeros(30), kl), COLLAPSED, "a run that fell to answers without an end or a number")
    expect_other(f, COLLAPSED)


@q5.case("standing still, with steps in which no row trained")
def _(f):
    accuracy = 0.15 + 0.04 * torch.rand(30)
    kl = 1e-8 * torch.rand(30)
    kl[::4] = float("nan")
    expect(f, (accuracy, accuracy, line(0.3, 0.3), kl), STILL, "a run whose KL stays at rounding level")
    expect_other(f, STILL)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
