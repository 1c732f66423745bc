"""Checks of the exercises of lesson 05: the reward of a real model, how kind a verifier may be, the best of several
checkpoints, which engine lied, and naming a failure from its curves."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, draw
from rlcourse.course.checks.builders import whole_number
from rlcourse.course.checks.nb01 import check_texts
from rlcourse.course.lessons.curve_records import load_curve

q1 = Question("q1", "verify_real", hint="Four places to look, in an order. Look for the first that's there.")
REAL = {  # as for lesson 01: from the gold answer g and a wrong one w, texts to pay and texts not to pay
    "the ways in which a real model ends": lambda g, w: (
        [f"{g - 3}+3={g}\n#### {g}", f"So it is \\boxed{{{w}}}, no, \\boxed{{{g}}} of {w}.", f"Of {w}, he has {g}."],
        [f"The answer is {g}, not {w}.", "I don't know."],
    ),
    "several of them": lambda g, w: (
        [f"#### {g}\nThat is \\boxed{{{w}}}, or {w}.", f"\\boxed{{{g}}} is more than {w}."],
        [f"#### {w}\nThat is \\boxed{{{g}}}, or {g}.", f"\\boxed{{{w}}} is more than {g}."],
    ),
    "dollars, commas and decimals": lambda g, w: (
        [f"#### ${g}.00", f"She pays ${g}.", f"\\boxed{{\\${g}}}"], [f"#### -{g}", f"#### {g}.5"]
    ),
}  # fmt: skip
q1.cases_of(REAL)(check_texts)

q2 = Question("q2", "largest_credit", hint="What does an answer that works earn on average, and one that guesses?")


def credit(below: Callable) -> Callable:
    """How far working is ahead at credit 0, over `below` of the four shares."""
    return lambda *shares: (shares[0] - shares[2]) / below(*shares) if below(*shares) else math.inf


@q2.expects(also={
    "A right answer earns no credit on top: the credit is for wrong ones.": credit(lambda pw, fw, pg, fg: fg - fw),
    "Take the right guesses off before you count credits.": credit(lambda pw, fw, pg, fg: fg - (fw - pw)),
    "Worked answers that are wrong and can be read earn the credit, too.": credit(lambda pw, fw, pg, fg: fg - pg),
    "A credit is at most 1.": credit(lambda pw, fw, pg, fg: fg - pg - (fw - pw)),
}, parts={"the credit": None})  # fmt: skip
def by_trying(right_worked: float, readable_worked: float, right_guessed: float, readable_guessed: float) -> float:
    """The largest credit up to 1 at which working still earns at least as much."""
    credit = torch.linspace(0, 1, 1_000_001, dtype=torch.float64)
    worked = right_worked + (readable_worked - right_worked) * credit
    guessed = right_guessed + (readable_guessed - right_guessed) * credit
    return credit[worked >= guessed - 1e-12].max().item()


@q2.case("guessing is read more often; working is, so no credit is too much; working gains faster")
def _(f):
    right = between(0.3, 0.6)
    for worked, readable, guessed in (
        (between(0.5, 0.8), between(0.9, 1.0), between(0.5, 0.8)),
        (right, right + 0.05, between(0.9, 1.0)),
        (between(0.3, 0.4), between(0.95, 1.0), between(0.4, 0.5)),
    ):
        q2.check(f, *(round(share, 3) for share in (worked, readable, between(0.01, 0.1), guessed)))


q3 = Question("q3", "overstated", hint="When is the best of k scores at most c? When all of them are.")


@q3.expects(also={
    "That is the best measured accuracy itself: take the true one off.": lambda p, n, k: best_by_pairs(p, n, k) + p,
    "That is a number of problems: divide by how many there are.": lambda p, n, k: n * best_by_pairs(p, n, k),
    "That is the standard error of one accuracy, and there are k.": lambda p, n, k: math.sqrt(p * (1 - p) / n),
}, parts={"the overstatement": None}, atol=2e-5)  # fmt: skip
def best_by_pairs(p: float, n: int, k: int) -> float:
    """What the best of k counts of n is above p on average, by taking one more checkpoint at a time."""
    one = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    best = one
    for _ in range(k - 1):
        both = [0.0] * (n + 1)
        for a, b in itertools.product(range(n + 1), repeat=2):
            both[max(a, b)] += best[a] * one[b]
        best = both
    return sum(c * chance for c, chance in enumerate(best)) / n - p


q3.case("one checkpoint and several, few problems and a single one")(lambda f: [
    q3.check(f, between(0.2, 0.8), n, k)
    for n, k in ((draw(4, 9), 2), (draw(4, 9), 3), (1, draw(2, 9)), (draw(5, 20), 1), (draw(5, 20), draw(4, 6)))
])  # fmt: skip

q4 = Question("q4", "which_engine", hint="Print the gaps of each engine: their sign, their size, what they go with.")
ENGINES = ("ROUNDED", "TRUNCATED", "TEMPERATURE", "STALE", "SHIFTED")
ROUNDED, TRUNCATED, TEMPERATURE, STALE, SHIFTED = range(5)


def sample_with(what: int, strength: float, hot: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs as the engine has them and as training has them, nan after the end, and the mask of real tokens.
    strength: from 0 to 1, how strongly the engine differs. hot: whether a temperature is above 1."""
    rows, length = 12, 24
    logits = 2.5 * torch.randn(rows, length + 1, 60)
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
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))
    return sampled[:, :-1].masked_fill(~mask, math.nan), recomputed.masked_fill(~mask, math.nan), mask


@q4.cases_of({
    "an engine that only rounds": ROUNDED, "an engine that cuts the tail off": TRUNCATED,
    "an engine with a temperature of its own, below 1 or above": TEMPERATURE,
    "an engine with the weights of some steps ago": STALE, "log-probs of the neighbouring token": SHIFTED,
})  # fmt: skip
def _(f, what):
    for tried, hot in ((what, True), ((what + draw(1, 4)) % 5, True), (what, False), (what, draw(0, 1) == 1)):
        found = whole_number(f(*sample_with(tried, between(0, 1), hot)), 0, 4)
        assert found == tried, f"this engine is {ENGINES[tried]}, not {ENGINES[found]}"


q5 = Question("q5", "diagnose", hint="Compare the mean of the first five steps with that of the last five.")
NAMES = ("HEALTHY", "STILL", "COLLAPSED", "CUT_OFF", "HACKED")
HEALTHY, STILL, COLLAPSED, CUT_OFF, HACKED = range(5)
METRICS = "reward", "accuracy", "truncated"
RECORDED = {
    "healthy": HEALTHY, "half_format": HEALTHY, "words_strict": HEALTHY, "format": HACKED, "collapse": COLLAPSED,
    "truncation": CUT_OFF, "still": STILL,
}  # fmt: skip


def line(start: float, end: float, steps: int = 30) -> Tensor:
    """A metric from `start` to `end`, with a little noise."""
    return (torch.linspace(start, end, steps) + 0.01 * torch.randn(steps)).clamp(0, 1)


def expect_both(f, right: int, what: str, *run: Tensor) -> None:
    """The run, and one that is called otherwise. run: reward, accuracy, truncated, KL (0 to 0.1 if not given)."""
    run = run if len(run) == 4 else (*run, torch.linspace(0, 0.1, 30))
    kl = torch.full((30,), math.nan) if run[3].isnan().all() else torch.linspace(0, 0.5, 30)
    other = HEALTHY, "a run that learns", line(0.1, 0.8), line(0.1, 0.8), line(0.05, 0.0), kl
    if right == HEALTHY:
        other = COLLAPSED, "a run whose reward falls", line(0.8, 0.1), line(0.6, 0.1), line(0.0, 0.0), kl
    for expected, name, *metrics in ((right, what, *run), other):
        found = whole_number(f(*metrics), 0, 4)
        moved = [f"{m} {x[:5].mean():.2f} to {x[-5:].mean():.2f}" for m, x in zip(METRICS, metrics, strict=False)]
        said = f"{name} is {NAMES[expected]}, not {NAMES[found]}: over five steps, {', '.join(moved)}"
        assert found == expected, said


@q5.cases_of({f"recorded: {name}, three seeds": name for name in RECORDED})
def _(f, name):
    for run in load_curve(f"lesson05_{name}")["results"]:
        columns = (run["metrics"][key] for key in (*METRICS, "kl"))
        reward, accuracy, *rest = (torch.tensor([math.nan if v is None else v for v in c]) for c in columns)
        reward, accuracy = (m + 0.002 * torch.randn(len(m)) for m in (reward, accuracy))
        expect_both(f, RECORDED[name], f"the recorded run {name!r}", reward, accuracy, *rest)


NO_KL = torch.full((30,), math.nan)
MADE = {  # as `expect_both` takes them, reward and accuracy alike
    "one bad step at the end is noise, and answers cut off at the start only are no failure": lambda: (
        HEALTHY, "a run with a bad last step", torch.cat([line(0.2, 0.8, 29), line(0.2, 0.2, 1)]), line(0.6, 0.0)
    ),
    "a collapse into short answers: nothing is cut off": lambda: (
        COLLAPSED, "a run that fell to answers without a number", torch.cat([line(0.3, 0.4, 10), torch.zeros(20)]),
        torch.zeros(30), torch.cat([torch.linspace(0, 5, 10), NO_KL[10:]])
    ),
    "standing still, with steps in which the KL was not measured": lambda: (
        STILL, "a run whose KL stays at rounding level", 0.15 + 0.04 * torch.rand(30), line(0.3, 0.3),
        (1e-8 * torch.rand(30)).where(torch.arange(30) % 4 > 0, math.nan)
    ),
    "a run without a KL: the other three must do": lambda: (
        HEALTHY, "a run that learns", line(0.1, 0.8), line(0.05, 0.0), NO_KL
    ),
}  # fmt: skip


@q5.cases_of(MADE)
def _(f, made):
    right, what, reward, *rest = made()
    expect_both(f, right, what, reward, reward, *rest)
