"""Checks of the exercises of lesson 01: a loss to mend, a verifier to cheat and to close, what a baseline costs."""

import itertools
import re

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.builders import Names, compare_loss, sentences
from rlcourse.tasks.minigsm import generate

EOS = 2

q1 = Question("q1", "mended_loss", hint="Which of the curves goes down? Begin with the mistake that explains it.")

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "sign": "its sign: optimizers minimise, so what earned more must lower the loss",
    "end": "its mask: it drops the end token, which is a decision too, and lets what comes after it count",
    "mean": "its mean over tokens: the log-prob of an answer is the sum over its tokens",
    "groups": "its groups: row i answers prompt i // num_generations, and only that prompt's rewards are its baseline",
}


LOSS_MISTAKES = {
    "no baseline": "There is no baseline left: subtract the group's mean reward.",
    "deviation": "You divided by the deviation of the group: that is GRPO, two lessons on.",
    "rows": "You added up the rows: take their mean.",
}


def reinforce_loss(logits, ids, rewards, n: int, eos_id: int, wrong: Names = ()) -> Tensor:
    """The loss row by row in float64, with mistakes: a scalar."""
    total, prompts = torch.zeros((), dtype=torch.float64), len(ids) // n
    for i, row in enumerate(ids.tolist()):
        length = row.index(eos_id) + 1 if eos_id in row else len(row)
        kept = [t for t in range(len(row)) if (row[t] != eos_id if "end" in wrong else t < length)]
        own = logits[i].double().log_softmax(-1)[kept, ids[i, kept]].sum()
        own = own / max(1, len(kept)) if "mean" in wrong else own
        group = (rewards[i % prompts :: prompts] if "groups" in wrong else rewards[i // n * n :][:n]).double()
        advantage = rewards[i] - (0 if "no baseline" in wrong else group.mean())
        total = total + (advantage / (group.std() + 1e-4) if "deviation" in wrong else advantage) * own
    return total * (1 if "sign" in wrong else -1) / (1 if "rows" in wrong else len(ids))


def check_loss(f, ids: Tensor, rewards: Tensor, n: int) -> None:
    given, parts = (torch.randn(*ids.shape, 6), ids, rewards, n, EOS), {"the gradient": 0, "the loss": None}
    compare_loss(f, given, reinforce_loss, sentences(PLANTED, LOSS_MISTAKES), parts)


def answers(rows: int, length: int) -> Tensor:
    """Random tokens without an end."""
    return torch.tensor([0, 1, 3, 4, 5])[torch.randint(0, 5, (rows, length))]


q1.case("one prompt, answers that never end")(lambda f: check_loss(f, answers(6, 5), torch.rand(6), 6))


@q1.case("answers that end at different places, with tokens after the end")
def _(f):
    ids = answers(6, 7)
    ids[range(5), [0, 1, 3, 4, 6]] = EOS
    check_loss(f, ids, torch.rand(6), 6)


@q1.case("the end token again after the end, as padding")
def _(f):
    ids = answers(4, 6)
    ids[0, 2:] = EOS
    ids[1, 1], ids[1, 4] = EOS, EOS
    check_loss(f, ids, torch.rand(4), 2)


@q1.case("an easy prompt and hard ones")
def _(f):
    ids = answers(12, 5)
    ids[:, 3] = EOS
    check_loss(f, ids, torch.rand(12) + torch.tensor([2.0] * 4 + [0.0] * 8), 4)
    check_loss(f, ids, torch.rand(12) + torch.tensor([0.0] * 9 + [3.0] * 3), 3)


q2 = Question("q2", "cheat", hint="The right number is made of the numbers in the question. How many ways are there?")

LIMIT = 120  # characters


def sloppy(text: str, gold: str) -> bool:
    """The verifier that is cheated."""
    return gold in re.findall(r"[0-9]+", text)


def check_cheat(f, level: int, goal: float) -> None:
    """Fail unless the text earns on so large a share of fresh problems, without knowing their answers."""
    problems = [p.to_problem() for p in generate(40, draw(0, 2**31 - 1), "test", (level,))]
    earned, missed = 0, None
    for problem in problems:
        text = f(problem.question)
        if not isinstance(text, str):
            raise AssertionError(f"the result is {text!r:.40}: return the text of an answer")
        if len(text) > LIMIT:
            raise AssertionError(f"your answer has {len(text)} characters, and what is over {LIMIT} is never generated")
        if sloppy(text, problem.gold):
            earned += 1
        else:
            missed = missed or (problem, text)
    share = earned / len(problems)
    if share < goal:
        problem, text = missed
        raise AssertionError(
            f"it earns on {share:.0%} of the problems, asked for are {goal:.0%}: to {problem.question!r} it says "
            f"{text!r:.80}, and {problem.gold} is right"
        )


q2.case("earns on three of four problems with one step")(lambda f: check_cheat(f, 1, 0.75))
q2.case("earns on four of five problems with two steps")(lambda f: check_cheat(f, 2, 0.8))

q3 = Question("q3", "pays", hint="What does an honest answer look like that a list of numbers does not?")


LISTS = [mark.join(str(i) for i in range(2, 101)) for mark in (" ", ", ")]
ENDS = ("#### {}", "The answer is {}.", "So he has {} beads.", "{}", "It costs ${}!")
REFUSED = "You refuse an honest answer."
HEDGED, DIGITS = "You pay an answer that hedges.", "You pay for digits inside another number."
TEXTS = {  # case: from the gold answer g and a wrong one w (text, whether it is to be paid, what to say if it isn't so)
    "an honest answer, whatever its last words, and a list of numbers": lambda g, w: [
        *((f"Tom has {g - 3}+3={g} beads.\n{end.format(g)}", True, REFUSED) for end in ENDS),
        *((text, False, "You pay for a list.") for text in (*LISTS, f"{g} {w}", f"#### {w} {g}")),
    ],
    "hedging, and changing one's mind": lambda g, w: [
        *((text, False, HEDGED) for text in (f"#### {w} or {g}", f"#### {g} or {w}", f"It is {g}, or maybe {w}.")),
        (f"#### {w}\nNo, wait.\n#### {g}", True, "You refuse an answer that corrects itself."),
        (f"#### {g}\nNo, wait.\n#### {w}", False, "You pay an answer that took it back."),
    ],
    "the right number in the working of a wrong answer": lambda g, w: [
        (f"Tom has {g - 3}+3={g} beads.\n#### {w}", False, "You pay for a number in the working."),
        (f"Tom has {g - 3}+3={g} beads.\nThat is all.", False, "You pay for an answer without a final number."),
        (f"Tom has {g - 3}+3={g} beads.\n#### {g}", True, REFUSED),
    ],
    "the right digits in another number": lambda g, w: [
        *((f"#### {other}", False, DIGITS) for other in (f"{g}7", f"3{g}", f"{g}.5", f"-{g}", f"{g},{g}1")),
        (f"#### {g}.0", True, "You refuse the same number with a decimal."),
        (f"#### {g}\n\n", True, "You refuse an answer with empty lines after it."),
        (f"#### 1,2{g}", False, "You stop reading at a comma."),
    ],
}


def check_pays(f, text: str, gold: str, honest: bool, sentence: str) -> None:
    """Fail with the sentence unless the text is paid as it should be."""
    found = f(text, gold)
    try:
        paid = float(found)
    except (TypeError, ValueError):
        raise AssertionError(f"the result is {found!r:.40}: return 1.0 or 0.0") from None
    if paid != float(honest):
        verb = "must be paid" if honest else "must not be paid"
        raise AssertionError(f"{sentence} {text!r:.100} {verb} where {gold} is right; it gets {paid:g}.")


def pays_case(name: str, texts) -> None:
    @q3.case(name)
    def _(f):
        gold = draw(11, 50)
        for text, honest, sentence in texts(gold, draw(51, 90)):
            check_pays(f, text, str(gold), honest, sentence)
        large = 1000 * gold + 234
        check_pays(f, f"#### {large:,}", str(large), True, "You refuse a number with a comma in its thousands.")


for case, texts in TEXTS.items():
    pays_case(case, texts)

q4 = Question(
    "q4", "shrinkage", hint="Take the sum apart: what is the mean of R_j times the score of y_i, for j = i and not?"
)


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


def check_factor(f, weights: Tensor) -> None:
    every, own, n = weights.double().sum(), weights.double().trace(), len(weights)
    mistakes = {
        "You counted the weights of the other answers: their rewards do not depend on what answer i is.": 1 - every / n,
        "That is what is lost: the factor is 1 less it.": own / n,
        "Each of the answers loses its own weight, and the estimate is their mean.": 1 - own,
        "You counted the others and left an answer's own weight out: it is the other way round.": 1 - (every - own) / n,
    }
    compare(f(weights), by_enumeration(weights), mistakes, what="the factor")


q4.case("random weights")(lambda f: [check_factor(f, torch.rand(n, n) - 0.3) for n in (2, 3, 4)])


@q4.case("weights on the others alone, and on one's own alone")
def _(f):
    n = draw(3, 4)
    check_factor(f, (torch.ones(n, n) - torch.eye(n)) / (n - 1))
    check_factor(f, torch.diag(torch.rand(n) + 0.1))


@q4.case("the mean of the group, and no baseline")
def _(f):
    for n, part in itertools.product((2, 3), (1, 0, between(0, 1))):
        check_factor(f, torch.full((n, n), part / n))


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
