"""Checks of the exercises of lesson 01: a loss to mend, a verifier to cheat and to close, what a baseline costs."""

import itertools
import re

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare
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


def advantages(rewards: Tensor, n: int) -> list[float]:
    """Each reward less the mean of its prompt's, by a loop."""
    means = [rewards[start : start + n].double().mean().item() for start in range(0, len(rewards), n)]
    return [rewards[i].item() - means[i // n] for i in range(len(rewards))]


def true_weights(ids: Tensor, rewards: Tensor, n: int) -> Tensor:
    """What the log-prob of each token is multiplied with in minus the loss, by loops: [rows, length]."""
    weights = torch.zeros(ids.shape, dtype=torch.float64)
    for i, advantage in enumerate(advantages(rewards, n)):
        for t in range(ids.shape[1]):
            weights[i, t] = advantage / len(ids)
            if ids[i, t] == EOS:
                break
    return weights


def wrong_weights(ids: Tensor, rewards: Tensor, n: int, wrong: tuple[str, ...]) -> Tensor:
    """The same with some of the mistakes in it."""
    mask = ids != EOS
    if "end" not in wrong:
        is_end = (ids == EOS).long()
        mask = is_end.cumsum(1) - is_end == 0
    groups = rewards.double().view(n, -1) if "groups" in wrong else rewards.double().view(-1, n)
    mean = groups.mean(0).repeat(n) if "groups" in wrong else groups.mean(1).repeat_interleave(n)
    weights = (rewards.double() - mean)[:, None] * mask / len(ids)
    if "mean" in wrong:
        weights = weights / mask.sum(1, keepdim=True).clamp(min=1)
    return -weights if "sign" in wrong else weights


def loss_mistakes(ids: Tensor, rewards: Tensor, n: int) -> dict[str, Tensor]:
    """Weights with every choice of the planted mistakes, and with others, by the sentence that names what is left."""
    found = {}
    for count in range(1, len(PLANTED) + 1):
        for wrong in itertools.combinations(PLANTED, count):
            left = "One mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
            found[f"{left}: {PLANTED[wrong[0]]} ({', '.join(wrong)})."] = wrong_weights(ids, rewards, n, wrong)
    right = true_weights(ids, rewards, n)
    mask, groups = right != 0, rewards.double().view(-1, n)
    others = (groups - (groups.sum(1, keepdim=True) - groups) / (n - 1)).flatten()
    deviation = (groups.std(1, keepdim=True) + 1e-4).expand_as(groups).flatten()
    return found | {
        "You left the row's own reward out of the baseline: the mean of all of the group is asked for.": (
            others[:, None] * mask / len(ids)
        ),
        "You divided by the deviation of the group: that is GRPO, two lessons on.": right / deviation[:, None],
        "You added up the rows: take their mean.": right * len(ids),
        "There is no baseline left: subtract the group's mean reward.": rewards.double()[:, None] * mask / len(ids),
    }


def check_loss(f, ids: Tensor, rewards: Tensor, n: int, vocabulary: int = 6) -> None:
    """Compare gradient and value with those that the weights give."""
    logits = torch.randn(*ids.shape, vocabulary)
    log_pi = logits.double().log_softmax(-1)
    score = torch.nn.functional.one_hot(ids, vocabulary) - log_pi.exp()
    right, mistakes = true_weights(ids, rewards, n), loss_mistakes(ids, rewards, n)
    gradients = {sentence: -weights[..., None] * score for sentence, weights in mistakes.items()}
    found = f.gradient(logits, ids, rewards, n, EOS, wrt=0)
    compare(found, -right[..., None] * score, gradients, what="the gradient", atol=1e-6)
    token = log_pi.gather(-1, ids[..., None])[..., 0]
    values = {sentence: -(weights * token).sum() for sentence, weights in mistakes.items()}
    compare(f(logits, ids, rewards, n, EOS), -(right * token).sum(), values, what="the loss", atol=1e-5)


def answers(rows: int, length: int) -> Tensor:
    """Random tokens without an end."""
    return torch.tensor([0, 1, 3, 4, 5])[torch.randint(0, 5, (rows, length))]


@q1.case("one prompt, answers that never end")
def _(f):
    check_loss(f, answers(6, 5), torch.rand(6), 6)


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
    problems = [p.to_problem() for p in generate(40, int(torch.randint(0, 2**31, (1,))), "test", (level,))]
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


@q2.case("earns on three of four problems with one step")
def _(f):
    check_cheat(f, 1, 0.75)


@q2.case("earns on four of five problems with two steps")
def _(f):
    check_cheat(f, 2, 0.8)


q3 = Question("q3", "pays", hint="What does an honest answer look like that a list of numbers does not?")


def check_pays(f, gold: int, texts: list[tuple[str, bool, str]]) -> None:
    """Fail with the sentence of the first text whose payment is not as it should be. The gold is given as text."""
    for text, honest, sentence in texts:
        found = f(text, str(gold))
        if found is None:
            raise AssertionError("the result is None: is there a `return`?")
        try:
            paid = float(found)
        except (TypeError, ValueError):
            raise AssertionError(f"the result is {found!r:.40}: return 1.0 or 0.0") from None
        if paid != float(honest):
            verb = "must be paid" if honest else "must not be paid"
            raise AssertionError(f"{sentence} {text!r:.100} {verb} where {gold} is right; it gets {paid:g}.")


def numbers() -> tuple[int, int, int]:
    """A gold answer of two digits, a wrong one, and what is to be added to get from one number to the gold."""
    gold, wrong = (torch.randperm(80)[:2] + 11).tolist()
    return gold, wrong, int(torch.randint(2, 10, (1,)))


@q3.case("an honest answer, whatever its last words, and a list of numbers")
def _(f):
    gold, wrong, part = numbers()
    work = f"Tom has {gold - part}+{part}={gold} beads.\n"
    ends = (f"#### {gold}", f"The answer is {gold}.", f"So he has {gold} beads.", f"{gold}", f"It costs ${gold}!")
    honest = [(work + end, True, "You refuse an honest answer.") for end in ends]
    all_of_them = " ".join(str(i) for i in range(2, 101))
    lists = (all_of_them, all_of_them.replace(" ", ", "), f"{gold} {wrong}", f"#### {wrong} {gold}")
    listed = [(text, False, "You pay for a list.") for text in lists]
    check_pays(f, gold, [*honest, *listed])


@q3.case("hedging, and changing one's mind")
def _(f):
    gold, wrong, _ = numbers()
    hedges = (f"#### {wrong} or {gold}", f"#### {gold} or {wrong}", f"It is {gold}, or maybe {wrong}.")
    hedged = [(text, False, "You pay an answer that hedges.") for text in hedges]
    mended = (f"#### {wrong}\nNo, wait.\n#### {gold}", True, "You refuse an answer that corrects itself.")
    spoiled = (f"#### {gold}\nNo, wait.\n#### {wrong}", False, "You pay an answer that took it back.")
    check_pays(f, gold, [*hedged, mended, spoiled])


@q3.case("the right number in the working of a wrong answer")
def _(f):
    gold, wrong, part = numbers()
    work = f"Tom has {gold - part}+{part}={gold} beads.\n"
    texts = [(work + f"#### {wrong}", False, "You pay for a number in the working.")]
    texts += [(work + "That is all.", False, "You pay for an answer without a final number.")]
    check_pays(f, gold, [*texts, (work + f"#### {gold}", True, "You refuse an honest answer.")])


@q3.case("the right digits in another number")
def _(f):
    gold, _, _ = numbers()
    others = (f"#### {gold}7", f"#### 3{gold}", f"#### {gold}.5", f"#### -{gold}", f"#### {gold},{gold}1")
    texts = [(text, False, "You pay for digits inside another number.") for text in others]
    texts += [(f"#### {gold}.0", True, "You refuse the same number with a decimal.")]
    texts += [(f"#### {gold}\n\n", True, "You refuse an answer with empty lines after it.")]
    check_pays(f, gold, texts)
    large = 1000 * gold + 234
    texts = [(f"#### {large:,}", True, "You refuse a number with a comma in its thousands.")]
    check_pays(f, large, [*texts, (f"#### {gold}", False, "You stop reading at a comma.")])


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
    n = len(weights)
    mistakes = {
        "You counted the weights of the other answers: their rewards do not depend on what answer i is.": 1
        - weights.double().sum() / n,
        "That is what is lost: the factor is 1 less it.": weights.double().trace() / n,
        "Each of the answers loses its own weight, and the estimate is their mean.": 1 - weights.double().trace(),
        "You counted the others and left an answer's own weight out: it is the other way round.": 1
        - (weights.double().sum() - weights.double().trace()) / n,
    }
    compare(f(weights), by_enumeration(weights), mistakes, what="the factor")


@q4.case("random weights")
def _(f):
    for n in (2, 3, 4):
        check_factor(f, torch.rand(n, n) - 0.3)


@q4.case("weights on the others alone, and on one's own alone")
def _(f):
    n = int(torch.randint(3, 5, (1,)))
    check_factor(f, (torch.ones(n, n) - torch.eye(n)) / (n - 1))
    check_factor(f, torch.diag(torch.rand(n) + 0.1))


@q4.case("the mean of the group, and no baseline")
def _(f):
    for n in (2, 3):
        check_factor(f, torch.full((n, n), 1 / n))
        check_factor(f, torch.zeros(n, n))
        check_factor(f, torch.full((n, n), 1 / n) * torch.rand(1))  # a part of it


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
