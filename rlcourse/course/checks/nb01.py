"""Checks of the exercises of lesson 01: the five functions of the loop, a verifier to cheat and to close, what a
baseline costs."""

import itertools
import re

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.builders import expect_loss, ragged_mask
from rlcourse.course.checks.comparison import as_tensor
from rlcourse.tasks.minigsm import generate

q1 = Question("q1", "sample", hint="Logits become probabilities first. Then one token is drawn per row.")
DRAWS = 20_000


@q1.case("how often each token is drawn")
def _(f):
    logits = 1.5 * torch.randn(5)
    found = as_tensor(f(logits.expand(DRAWS, 5)), "the tokens")
    if found.shape != (DRAWS,) or found.dtype.is_floating_point or not 0 <= found.min() <= found.max() < 5:
        raise AssertionError(f"the result is {found.dtype} {list(found.shape)}: return a token number per row, [rows]")
    probabilities = logits.softmax(0)
    mistakes = {
        "It always takes the most probable token. That's greedy decoding: draw.": torch.eye(5)[logits.argmax()],
        "Every token is equally likely: where do the logits come in?": torch.full((5,), 0.2),
        "The logits went through softmax twice.": probabilities.softmax(0),
        "All rows got the same token: draw one for each row.": torch.eye(5)[found[0]],
    }
    compare(found.bincount(minlength=5) / DRAWS, probabilities, mistakes, "the share of each token", atol=0.02)


@q1.case("each row has its own probabilities")
def _(f):
    wanted = torch.randint(0, 6, (40,))
    compare(f(40.0 * torch.eye(6)[wanted] + torch.randn(40, 1)), wanted, what="what a row that is sure draws")


q2 = Question("q2", "log_probs", hint="Print shapes: logits[:, :-1] and ids[:, 1:] belong together.")


@q2.expects({
    "shift": "You compare the output at a position with the token at the same position. It predicts the next one.",
    "mask": "Tokens outside the answer have to be 0.",
    "logits": "These are logits, not log-probs: a log_softmax is missing.",
    "exp": "These are probabilities: take the log.",
    "sign": "These are cross-entropies: a log-prob is minus that, never above 0.",
}, parts={"the log-probs": None, "the gradient": 0})  # fmt: skip
def token_log_probs(logits: Tensor, ids: Tensor, mask: Tensor, wrong: str = "") -> Tensor:
    """The log-probs in float64, with a mistake: [rows, width - 1]."""
    at = (logits[:, 1:] if wrong == "shift" else logits[:, :-1]).double()
    found = (at if wrong == "logits" else at - at.logsumexp(-1, keepdim=True)).gather(-1, ids[:, 1:, None])[..., 0]
    found = {"exp": found.exp(), "sign": -found}.get(wrong, found)
    return found if wrong == "mask" else torch.where(mask, found, 0.0)


@q2.case("answers that begin and end at different places, the first and the last column included")
def _(f):
    uneven = ragged_mask(4, 6) & (torch.arange(6) >= torch.tensor([[0], [1], [0], [2]]))
    for mask in (uneven, torch.ones(2, draw(3, 5), dtype=torch.bool)):
        rows, width = mask.shape
        q2.check(f, 2 * torch.randn(rows, width + 1, 7), torch.randint(0, 7, (rows, width + 1)), mask)


q3 = Question("q3", "verify", hint="Find all numbers behind `#### `. Which of them counts?")
q4 = Question("q4", "weigh", hint="rewards.view(-1, group) has one group per row.")


@q4.expects({
    "own": "You subtracted the mean of the whole group. An answer's own reward must not be in its bar.",
    "groups": "Your groups are mixed: row i answers prompt i // group.",
    "batch": "You subtracted the mean of all other answers, whatever their prompt.",
    "none": "There's no baseline: these are the rewards.",
    "sign": "The sign is wrong: a better answer than the others needs a positive weight.",
}, atol=1e-4)  # fmt: skip
def less_the_others(rewards: Tensor, group: int, wrong: str = "") -> Tensor:
    """Answer by answer in float64, with a mistake: [rows]."""
    found, r, prompts = [], rewards.double(), len(rewards) // group
    for i in range(len(r)):
        members = {"groups": range(i % prompts, len(r), prompts), "batch": range(len(r))}.get(
            wrong, range(i // group * group, i // group * group + group)
        )
        others = torch.stack([r[j] for j in members if j != i or wrong == "own"])
        found.append(r[i] - (0 if wrong == "none" else others.mean()))
    return -torch.stack(found) if wrong == "sign" else torch.stack(found)


q4.case("several prompts, easy and hard ones, and a judge who adds a constant to everything")(lambda f: [
    q4.check(f, torch.rand(prompts * group) + torch.arange(prompts).repeat_interleave(group) + shift, group)
    for prompts, group, shift in ((3, 4, 0.0), (4, 3, 0.0), (2, 6, between(3, 9)))
])  # fmt: skip

q5 = Question("q5", "loss", hint="A sum over all tokens of the answers, divided by a constant. Mind the sign.")
expect_loss(q5, "sign", "mask", "tokens", "width", "rows", "lengths", clip=None)
q5.case("one advantage per answer, and one per token, as lesson 02 will want")(
    lambda f: [q5.check(f, *-torch.rand(3, 5, 6), torch.randn(5, width), ragged_mask(5, 6)) for width in (1, 6)]
)

q6 = Question("q6", "cheat", hint="The right number is made of the numbers in the question. How many ways are there?")
CHARACTERS = 120  # of an answer


def check_cheat(f, level: int, goal: float) -> None:
    """Fail unless the text earns on so large a share of fresh problems, without knowing their answers."""
    missed = []
    for problem in (p.to_problem() for p in generate(40, draw(0, 2**31 - 1), "test", (level,))):
        text = f(problem.question)
        assert isinstance(text, str), f"the result is {text!r:.40}: return the text of an answer"
        said = f"your answer has {len(text)} characters, and what is over {CHARACTERS} is never generated"
        assert len(text) <= CHARACTERS, said
        if problem.gold not in re.findall(r"[0-9]+", text):  # the verifier that is cheated
            missed.append(f"to {problem.question!r} it says {text!r:.80}, and {problem.gold} is right")
    share = 1 - len(missed) / 40
    said = f"it earns on {share:.0%} of the problems, asked for are {goal:.0%}: {missed[:1]}"
    assert share >= goal, said


q6.case("earns on three of four problems with one step")(lambda f: check_cheat(f, 1, 0.75))
q6.case("earns on four of five problems with two steps")(lambda f: check_cheat(f, 2, 0.8))

q7 = Question("q7", "pays", hint="What does an honest answer look like that a list of numbers does not?")
LISTS = [mark.join(str(i) for i in range(2, 101)) for mark in (" ", ", ")]
ENDS = ("#### {}", "The answer is {}.", "So he has {} beads.", "{}", "It costs ${}!")


# From the gold answer g and a wrong one w: texts that are to be paid, and texts that are not.
def corrected(g: int, w: int) -> tuple[list[str], list[str]]:
    return [f"#### {w}\nNo, wait.\n#### {g}"], [f"#### {g}\nNo, wait.\n#### {w}"]


def in_other_numbers(g: int, w: int) -> tuple[list[str], list[str]]:
    others = f"{g}7", f"3{g}", f"{g}.5", f"-{g}", f"1,2{g}", f"{g},{g}1"
    return [f"#### {g}.0", f"#### {g}\n\n"], [f"#### {other}" for other in others]


def worked(g: int, *ends: str) -> list[str]:
    return [f"Tom has {g - 3}+3={g} beads.\n{end}" for end in ends]


def check_pays(f, text: str, gold: str, honest: bool) -> None:
    found = f(text, gold)
    try:
        paid = float(found)
    except (TypeError, ValueError):
        raise AssertionError(f"the result is {found!r:.40}: return 1.0 or 0.0") from None
    verb = "must be paid" if honest else "must not be paid"
    assert paid == float(honest), f"{text!r:.100} {verb} where {gold} is right; it gets {paid:g}."


@q3.cases_of({
    "announced by `#### `": lambda g, w: (
        worked(g, f"#### {g}", f"#### {g} beads"), [*worked(g, f"The answer is {g}.", f"#### {w}"), f"####{g}"]
    ),
    "announced twice": corrected,
    "the right digits in another number": in_other_numbers,
})  # fmt: skip
@q7.cases_of({
    "an honest answer, whatever its last words, and a list of numbers": lambda g, w: (
        worked(g, *(end.format(g) for end in ENDS)), [*LISTS, f"{g} {w}", f"#### {w} {g}"]
    ),
    "hedging, and changing one's mind": lambda g, w: (
        corrected(g, w)[0], [f"#### {w} or {g}", f"#### {g} or {w}", f"It is {g}, or maybe {w}.", *corrected(g, w)[1]]
    ),
    "the right number in the working of a wrong answer": lambda g, w: (
        worked(g, f"#### {g}"), worked(g, f"#### {w}", "That is all.")
    ),
    "the right digits in another number": in_other_numbers,
})  # fmt: skip
def check_texts(f, texts) -> None:
    gold = draw(11, 50)
    for honest, some in zip((True, False), texts(gold, draw(51, 90)), strict=True):
        for text in some:
            check_pays(f, text, str(gold), honest)
    large = 1000 * gold + 234
    check_pays(f, f"#### {large:,}", str(large), True)


q8 = Question("q8", "shrinkage", hint="What is the mean of R_j times the score of y_i, for j = i and for the others?")


@q8.expects(also={
    "You counted the weights of other answers: answer i doesn't change their rewards.": lambda w: 1 - w.sum() / len(w),
    "That is what is lost: the factor is 1 less it.": lambda w: w.trace() / len(w),
    "Each of the answers loses its own weight, and the estimate is their mean.": lambda w: 1 - w.trace(),
    "You counted all but an answer's own weight.": lambda w: 1 - (w.sum() - w.trace()) / len(w),
}, parts={"the factor": None})  # fmt: skip
def by_enumeration(weights: Tensor) -> Tensor:
    """The factor, by going through all groups of answers of a small policy: a scalar, float64."""
    n, actions = len(weights), 3
    pi, rewards = torch.randn(actions).double().softmax(0), torch.rand(actions).double()
    scores = torch.eye(actions, dtype=torch.float64) - pi
    exact = (pi * rewards) @ scores
    groups = torch.tensor(list(itertools.product(range(actions), repeat=n)))
    r = rewards[groups]
    estimates = ((r - r @ weights.double().T)[..., None] * scores[groups]).mean(1)
    mean = (pi[groups].prod(1)[:, None] * estimates).sum(0)
    return mean @ exact / exact.square().sum()


q8.case("random weights")(lambda f: [q8.check(f, torch.rand(n, n) - 0.3) for n in (2, 3, 4)])
