"""Checks of exercises 05: how kind a verifier may be, the best of several checkpoints, which engine lied, and naming a
failure from its curves."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.lessons.curve_records import load_curve

q1 = Question("q1", "largest_credit", hint="What does an answer that works earn on average, and one that guesses?")
q2 = Question("q2", "overstated", hint="When is the best of k scores at most c? When all of them are.")
q3 = Question("q3", "which_engine", hint="Print the gaps of each engine: their sign, their size, what they go with.")
q4 = Question("q4", "diagnose", hint="Compare the mean of the first five steps with that of the last five.")


# q1: how kind a verifier may be ----------------------------------------------------------------------------------


def pay(right: float, readable: float, credit: float) -> float:
    """What a way of answering earns on average."""
    return right * 1.0 + (readable - right) * credit


def by_bisection(right_worked: float, readable_worked: float, right_guessed: float, readable_guessed: float) -> Tensor:
    """The largest credit up to 1 at which working still earns at least as much."""
    low, high = 0.0, 1.0

    def works(credit: float) -> bool:
        return pay(right_worked, readable_worked, credit) >= pay(right_guessed, readable_guessed, credit)

    if works(1.0):
        return torch.tensor(1.0, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return torch.tensor(low, dtype=torch.float64)


def check_credit(f, right_worked: float, readable_worked: float, right_guessed: float, readable_guessed: float) -> None:
    shares = right_worked, readable_worked, right_guessed, readable_guessed
    ahead, read_more = right_worked - right_guessed, readable_guessed - readable_worked
    steeper = (readable_guessed - right_guessed) - (readable_worked - right_worked)

    def over(below: float) -> float:
        return ahead / below if below else math.inf

    mistakes = {
        "A right answer earns 1 and no credit on top: the credit is for wrong answers that can be read.": over(
            read_more
        ),
        "A credit is at most 1: where working pays at any credit, the answer is 1.": over(steeper),
        "It is the other way up: what working is ahead stands above the line.": steeper / ahead,
        "That is how far working is ahead at credit 0: how much faster does guessing gain as the credit grows?": ahead,
        "Some of the guesses that can be read are right: take them off before you count the credits.": over(
            readable_guessed - (readable_worked - right_worked)
        ),
        "Some of the worked answers are wrong and can be read: they earn the credit, too.": over(
            readable_guessed - right_guessed
        ),
        "That is 1 less the largest credit.": 1 - over(steeper),
    }
    tensors = {sentence: torch.tensor(float(value), dtype=torch.float64) for sentence, value in mistakes.items()}
    compare(f(*shares), by_bisection(*shares), tensors, what="the credit")


def share(low: float, high: float) -> float:
    """A number from low to high, of three decimals."""
    return round(low + (high - low) * torch.rand(()).item(), 3)


@q1.case("working is right more often, guessing is read more often")
def _(f):
    for _ in range(3):
        right = share(0.3, 0.6)
        check_credit(f, right, right + share(0.02, 0.2), share(0.01, 0.15), share(0.9, 1.0))


@q1.case("guessing is hardly ever right")
def _(f):
    right = share(0.05, 0.1)
    check_credit(f, right, right + share(0.1, 0.3), 0.0, share(0.95, 1.0))


@q1.case("working is read as often: no credit is too much")
def _(f):
    check_credit(f, share(0.5, 0.8), share(0.9, 1.0), share(0.01, 0.1), share(0.5, 0.8))
    right = share(0.3, 0.6)
    check_credit(f, right, right + 0.05, share(0.01, 0.1), share(0.9, 1.0))


# q2: the best of several checkpoints -----------------------------------------------------------------------------


def chances(p: float, n: int) -> list[float]:
    """The chance of each number of right answers, 0 to n."""
    return [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]


def best_by_pairs(p: float, n: int, k: int) -> float:
    """The mean of the best of k counts, by taking one more checkpoint at a time."""
    one = chances(p, n)
    best = one
    for _ in range(k - 1):
        both = [0.0] * (n + 1)
        for a, b in itertools.product(range(n + 1), repeat=2):
            both[max(a, b)] += best[a] * one[b]
        best = both
    return sum(c * chance for c, chance in enumerate(best))


def check_best(f, p: float, n: int, k: int) -> None:
    mean, se = best_by_pairs(p, n, k), math.sqrt(p * (1 - p) / n)
    lowest = n - best_by_pairs(1 - p, n, k)
    mistakes = {
        "That is the best measured accuracy itself: take the true one off.": mean / n,
        "That is a number of problems: divide by how many there are.": mean - n * p,
        "That is one standard error of one accuracy: how far the best lies out depends on how many there are.": se,
        "That is the worst of them: the best is at most 60 when each is at most 60.": lowest / n - p,
        "That is how far the worst of them lies below.": p - lowest / n,
        "That is a standard error for each checkpoint: the best of ten does not lie ten times as far out.": k * se,
        "That is half an interval of 95 %, however many there are to choose from.": 1.96 * se,
    }
    tensors = {sentence: torch.tensor(value, dtype=torch.float64) for sentence, value in mistakes.items()}
    found = f(p, n, k)
    compare(found, torch.tensor(mean / n - p, dtype=torch.float64), tensors, "the overstatement", atol=2e-5)


@q2.case("two and three checkpoints, few problems")
def _(f):
    for k in (2, 3):
        check_best(f, share(0.2, 0.8), draw(4, 9), k)


@q2.case("one checkpoint is not overstated")
def _(f):
    p, n = share(0.2, 0.8), draw(5, 20)
    check_best(f, p, n, 1)
    check_best(f, p, n, draw(4, 6))


@q2.case("one problem: the best is right unless all are wrong")
def _(f):
    for k in (2, draw(5, 9)):
        p = share(0.1, 0.9)
        compare(f(p, 1, k), torch.tensor(1 - (1 - p) ** k - p, dtype=torch.float64), what="the overstatement with n 1")


@q2.case("ten checkpoints, a hundred problems")
def _(f):
    check_best(f, share(0.3, 0.9), draw(90, 110), 10)


# q3: which engine lied -------------------------------------------------------------------------------------------

ENGINES = ("ROUNDED", "TRUNCATED", "TEMPERATURE", "STALE", "SHIFTED")
ROUNDED, TRUNCATED, TEMPERATURE, STALE, SHIFTED = range(5)
VOCABULARY = 60


def sample_with(what: int, rows: int, length: int, strength: float, hot: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs as the engine has them and as training has them, nan behind the end, and the mask of real tokens.

    strength: from 0 to 1, how strongly the engine differs. hot: whether a temperature is above 1.
    """
    logits = 2.5 * torch.randn(rows, length + 1, VOCABULARY)
    of_engine = logits
    if what == TRUNCATED:
        kept = logits.topk(round(16 - 10 * strength)).values[..., -1:]
        of_engine = logits.masked_fill(logits < kept, -math.inf)
    elif what == TEMPERATURE:
        of_engine = logits / (1.35 + 0.25 * strength if hot else 0.75 - 0.15 * strength)
    elif what == STALE:
        of_engine = logits + (0.25 + 0.25 * strength) * torch.randn_like(logits)
    tokens = torch.distributions.Categorical(logits=of_engine).sample()[..., None]
    sampled, recomputed = (x.log_softmax(-1).gather(-1, tokens)[..., 0] for x in (of_engine, logits))
    recomputed = recomputed + 0.005 * torch.randn_like(recomputed).clamp(-3, 3)  # bfloat16
    recomputed = recomputed[:, 1:] if what == SHIFTED else recomputed[:, :-1]
    sampled = sampled[:, :-1]
    lengths = torch.randint(length // 2, length + 1, (rows,))
    mask = torch.arange(length) < lengths[:, None]
    return sampled.masked_fill(~mask, math.nan), recomputed.masked_fill(~mask, math.nan), mask


def one_of_five(found) -> int:
    """What a function returned, as a number from 0 to 4. Raises AssertionError for anything else."""
    if found is None:
        raise AssertionError("the result is None: does every path return one of the five numbers?")
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(found, int | float) or found not in range(5):
        raise AssertionError(f"the result is {found!r:.40}: return one of the five numbers")
    return int(found)


def seen(sampled: Tensor, recomputed: Tensor, mask: Tensor) -> str:
    """What the gaps look like, in a sentence."""
    a, b = sampled[mask], recomputed[mask]
    gap = b - a
    with_sampled = torch.corrcoef(torch.stack([a, gap]))[0, 1]
    both = torch.corrcoef(torch.stack([a, b]))[0, 1]
    return (
        f"gaps from {gap.min():.2f} to {gap.max():.2f}, {gap.abs().mean():.3f} in size on average, correlation "
        f"{with_sampled:.2f} with the engine's log-prob; between the two log-probs {both:.2f}"
    )


def check_engine(f, what: int, hot: bool) -> None:
    inputs = sample_with(what, 12, 24, torch.rand(()).item(), hot)
    found = one_of_five(f(*inputs))
    if found != what:
        raise AssertionError(f"this engine is {ENGINES[what]}, not {ENGINES[found]}: {seen(*inputs)}")


def engine_case(what: int, name: str) -> None:
    @q3.case(name)
    def _(f):
        for tried, hot in ((what, True), ((what + draw(1, 4)) % 5, True), (what, False), (what, draw(0, 1) == 1)):
            check_engine(f, tried, hot)


engine_case(ROUNDED, "an engine that only rounds")
engine_case(TRUNCATED, "an engine that cuts the tail off")
engine_case(TEMPERATURE, "an engine with a temperature of its own, below 1 or above")
engine_case(STALE, "an engine with the weights of some steps ago")
engine_case(SHIFTED, "log-probs of the neighbouring token")


# q4: name the failure --------------------------------------------------------------------------------------------

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
    found = one_of_five(f(*run))
    if found == right:
        return
    reward, accuracy, truncated = ((m[:5].mean().item(), m[-5:].mean().item()) for m in run[:3])
    kl = run[3][~run[3].isnan()]
    largest = f"largest KL {kl.max():.2g}" if len(kl) else "no KL"
    raise AssertionError(
        f"{what} is {NAMES[right]}, not {NAMES[found]}: reward {reward[0]:.2f} to {reward[1]:.2f}, "
        f"accuracy {accuracy[0]:.2f} to {accuracy[1]:.2f}, truncated {truncated[0]:.2f} to {truncated[1]:.2f} "
        f"(means of the first and the last five steps), {largest} in {len(kl)} of {len(run[3])} steps that have one"
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
    @q4.case(f"recorded: {name}, three seeds")
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


@q4.case("one bad step at the end is noise")
def _(f):
    accuracy = line(0.2, 0.8)
    accuracy[-1] = 0.2
    expect(f, (accuracy, accuracy, line(0.05, 0.0), drift(0.1)), HEALTHY, "a run with one bad step at the end")
    expect_other(f, HEALTHY)


@q4.case("answers cut off at the start only are no failure")
def _(f):
    truncated = line(0.6, 0.0)
    expect(f, (line(0.1, 0.7), line(0.1, 0.7), truncated, drift(0.1)), HEALTHY, "a run that learns to end its answers")
    expect_other(f, HEALTHY)


@q4.case("a reward that pays for something else, accuracy flat")
def _(f):
    run = line(0.3, 0.9), line(0.2, 0.2), line(0.0, 0.0), drift(0.3)
    expect(f, run, HACKED, "a run whose reward rises alone")
    expect_other(f, HACKED)


@q4.case("a collapse into short answers: nothing is cut off")
def _(f):
    fallen = torch.cat([line(0.3, 0.4, 10), torch.zeros(20)])
    kl = torch.cat([drift(5.0, 10), torch.full((20,), float("nan"))])
    expect(f, (fallen, fallen, torch.zeros(30), kl), COLLAPSED, "a run that fell to answers without an end or a number")
    expect_other(f, COLLAPSED)


@q4.case("standing still, with steps in which no row trained")
def _(f):
    accuracy = 0.15 + 0.04 * torch.rand(30)
    kl = 1e-8 * torch.rand(30)
    kl[::4] = float("nan")
    expect(f, (accuracy, accuracy, line(0.3, 0.3), kl), STILL, "a run whose KL stays at rounding level")
    expect_other(f, STILL)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
