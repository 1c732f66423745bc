"""The checks of lesson 01 pass what is right, kill what is wrong, and name the mistake."""

import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from answers import common_tests

from rlcourse.course.checks.nb01 import PLANTED, QUESTIONS, by_enumeration, sloppy

# q1: a loss with four mistakes -----------------------------------------------------------------------------------


def loss_with(logits, ids, rewards, n, eos_id, wrong=()):
    """The loss of the exercise with some of its mistakes left in."""
    is_end = (ids == eos_id).long()
    mask = ids != eos_id if "end" in wrong else is_end.cumsum(1) - is_end == 0
    token = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    of_answers = (token * mask).sum(1)
    if "mean" in wrong:
        of_answers = of_answers / mask.sum(1).clamp(min=1)
    baseline = rewards.view(-1, n).mean(1).repeat_interleave(n)
    if "groups" in wrong:
        baseline = rewards.view(n, -1).mean(0).repeat(n)
    return ((rewards - baseline) * of_answers).mean() * (1 if "sign" in wrong else -1)


def cross_entropy_loss(logits, ids, rewards, n, eos_id):
    losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    alive = torch.cat([torch.ones_like(ids[:, :1]), (ids != eos_id).long().cumprod(1)[:, :-1]], dim=1)
    groups = rewards.split(n)
    advantage = torch.cat([group - group.mean() for group in groups])
    return (advantage * (losses * alive).sum(1)).sum() / len(rewards)


def loss_by_loops(logits, ids, rewards, n, eos_id):
    total = torch.zeros(())
    for i, tokens in enumerate(ids.tolist()):
        group = rewards[i // n * n : i // n * n + n]
        for t, token in enumerate(tokens):
            log_pi = logits[i, t, token] - torch.logsumexp(logits[i, t], 0)
            total = total - (rewards[i] - group.mean()) * log_pi / len(ids)
            if token == eos_id:
                break
    return total


def from_the_lesson(logits, ids, rewards, n, eos_id):
    """What a reader pastes who takes the lesson's line for it: rewards as they are, divided by the token limit."""
    is_end = (ids == eos_id).long()
    return -(rewards * log_pi(logits, ids, is_end.cumsum(1) - is_end == 0)).sum() / (len(rewards) * 80)


def log_pi(logits, ids, mask):
    return (-F.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * mask).sum(1)


def centered(rewards, n):
    return rewards - rewards.view(-1, n).mean(1).repeat_interleave(n)


def without_baseline(logits, ids, rewards, n, eos_id):
    is_end = (ids == eos_id).long()
    return -(rewards * log_pi(logits, ids, is_end.cumsum(1) - is_end == 0)).mean()


def without_the_end(logits, ids, rewards, n, eos_id):
    return -(centered(rewards, n) * log_pi(logits, ids, (ids != eos_id).long().cumprod(1))).mean()


def scaled(logits, ids, rewards, n, eos_id):
    deviation = rewards.view(-1, n).std(1).repeat_interleave(n) + 1e-4
    return loss_with(logits, ids, centered(rewards, n) / deviation, n, eos_id)


def leave_one_out_loss(logits, ids, rewards, n, eos_id):
    return loss_with(logits, ids, rewards, n, eos_id) * n / (n - 1)


SUBSETS = [wrong for count in (1, 2, 3, 4) for wrong in itertools.combinations(PLANTED, count)]

# q2: a cheat -----------------------------------------------------------------------------------------------------

WORDS = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}
WORDS |= {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}


def in_question(question):
    return [int(n) for n in re.findall(r"\d+", question)] + [n for word, n in WORDS.items() if word in question]


def fitting(numbers, limit=120):
    text = ""
    for number in dict.fromkeys(numbers):
        if len(text) + len(str(number)) + 1 <= limit:
            text += f",{number}" if text else str(number)
    return text


def results(a, b):
    found = [a + b, abs(a - b), a * b]
    found += [x // y for x, y in ((a, b), (b, a)) if y > 0 and x % y == 0]
    return [n for n in found if 2 <= n <= 100]


def one_step(question):
    return [n for a, b in itertools.combinations(in_question(question), 2) for n in results(a, b)]


def cheat_by_steps(question):
    once = one_step(question)
    return fitting(once + [n for a in once for b in in_question(question) for n in results(a, b)])


def cheat_by_likelihood(question):
    """Without order: what many ways lead to comes first."""
    once, numbers = one_step(question), in_question(question)
    ways = once * 3 + [n for a in once for b in numbers for n in results(a, b)]
    return fitting(sorted(set(ways), key=lambda n: (-ways.count(n), n)))


# q3: a verifier --------------------------------------------------------------------------------------------------

NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"


def last_line(text):
    return text.strip().split("\n")[-1] if text.strip() else ""


def one_claim(text, gold):
    found = re.findall(NUMBER, last_line(text))
    return 1.0 if len(found) == 1 and float(found[0].replace(",", "")) == float(gold) else 0.0


def by_words(text, gold):
    """Without one pattern for numbers: words of the last line that are numbers once their dress is off."""
    claims = []
    for word in last_line(text).split():
        bare = word.strip("#$.!?").replace(",", "") if not word.endswith(",") else word.strip(",$")
        if re.search(r"\d", bare):
            claims.append(bare)
    try:
        return len(claims) == 1 and float(claims[0]) == float(gold)
    except ValueError:
        return False


def strict(text, gold):
    found = re.findall(rf"^#### ({NUMBER})$", text, re.M)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(gold))


# q4: a factor ----------------------------------------------------------------------------------------------------


def by_sampling_nothing(weights):
    """The mean over answers of what is left of each."""
    return (1 - torch.diagonal(weights)).mean()


def by_indicator(weights):
    eye = torch.eye(len(weights))
    return ((eye - eye * weights).sum() / len(weights)).item()


RIGHT = {
    "q1": [cross_entropy_loss, loss_by_loops],
    "q2": [cheat_by_steps, cheat_by_likelihood],
    "q3": [one_claim, by_words],
    "q4": [by_sampling_nothing, by_indicator],
}
WRONG = {
    "q1": {"+".join(wrong): functools.partial(loss_with, wrong=wrong) for wrong in SUBSETS}
    | {
        "pasted": from_the_lesson,
        "everything counts": lambda logits, ids, rewards, n, eos: loss_with(logits, ids, rewards, n, -1),
        "the end left out": without_the_end,
        "batch mean": lambda logits, ids, rewards, n, eos: loss_with(logits, ids, rewards, len(rewards), eos),
        "no baseline": without_baseline,
        "leave one out": leave_one_out_loss,
        "GRPO": scaled,
        "sum": lambda logits, ids, rewards, n, eos: loss_with(logits, ids, rewards, n, eos) * len(ids),
        "detached": lambda logits, *rest: loss_with(logits.detach(), *rest),
        "zero": lambda logits, *rest: 0.0 * logits.sum(),
        "nan": lambda logits, *rest: logits.sum() * float("nan"),
        "identity": lambda logits, *rest: logits,
    },
    "q2": {
        "one step": lambda question: fitting(one_step(question)),
        "every number": lambda question: fitting(range(2, 101)),
        "likely numbers": lambda question: fitting(range(2, 100, 2)),
        "no limit": lambda question: fitting(range(2, 101), limit=1000),
        "the question": lambda question: question,
        "its numbers": lambda question: fitting(in_question(question)),
        "a number": lambda question: 14,
        "nothing": lambda question: "",
    },
    "q3": {
        "sloppy": lambda text, gold: float(sloppy(text, gold)),
        "strict": strict,
        "last number": lambda text, gold: float((re.findall(NUMBER, text) or ["nan"])[-1].replace(",", "") == gold),
        "in the last line": lambda text, gold: float(gold in last_line(text)),
        "whole numbers of the last line": lambda text, gold: float(gold in re.findall(r"\d+", last_line(text))),
        "as text": lambda text, gold: float(re.findall(NUMBER, last_line(text)) == [gold]),
        "any line": lambda text, gold: float(any(one_claim(line, gold) for line in text.split("\n"))),
        "no minus": lambda text, gold: one_claim(text.replace("-", ""), gold),
        "no commas": lambda text, gold: float(
            [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", last_line(text))] == [float(gold)]
        ),
        "no decimals": lambda text, gold: float(
            [x.replace(",", "") for x in re.findall(r"-?\d+(?:,\d{3})*", last_line(text))][:1] == [gold]
        ),
        "pays all": lambda text, gold: 1.0,
        "pays nothing": lambda text, gold: 0.0,
        "nan": lambda text, gold: float("nan"),
        "text": lambda text, gold: text,
        "None": lambda text, gold: None,
    },
    "q4": {
        "all weights": lambda weights: 1 - weights.sum() / len(weights),
        "the loss": lambda weights: weights.trace() / len(weights),
        "not the mean": lambda weights: 1 - weights.trace(),
        "others": lambda weights: 1 - (weights.sum() - weights.trace()) / len(weights),
        "one": lambda weights: 1.0,
        "zero": lambda weights: 0.0,
        "nan": lambda weights: float("nan"),
        "identity": lambda weights: weights,
        "first": lambda weights: 1 - weights[0, 0],
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {("q1", "+".join(wrong)): f"({', '.join(wrong)})" for wrong in SUBSETS if len(wrong) == 1}
NAMED |= {
    ("q1", "leave one out"): "own reward out",
    ("q1", "GRPO"): "that is GRPO",
    ("q1", "sum"): "added up the rows",
    ("q1", "no baseline"): "no baseline left",
    ("q1", "detached"): "no gradient flows",
    ("q2", "one step"): "it earns on",
    ("q2", "no limit"): "never generated",
    ("q2", "a number"): "return the text",
    ("q3", "sloppy"): "pay for a list",
    ("q3", "strict"): "refuse an honest answer",
    ("q3", "any line"): "took it back",
    ("q3", "no minus"): "digits inside another number",
    ("q3", "no commas"): "comma in its thousands",
    ("q3", "None"): "is None",
    ("q3", "text"): "return 1.0 or 0.0",
    ("q4", "all weights"): "weights of the other answers",
    ("q4", "the loss"): "what is lost",
    ("q4", "not the mean"): "their mean",
    ("q4", "others"): "the other way round",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))


@pytest.mark.parametrize("wrong", SUBSETS[4:], ids="+".join)
def test_a_half_mended_loss_is_told_one_mistake_that_is_left(wrong):
    """And none that has been mended."""
    result = QUESTIONS["q1"](functools.partial(loss_with, wrong=wrong))
    messages = " ".join(case.message for case in result.cases)
    assert not any(PLANTED[name] in messages for name in PLANTED if name not in wrong), messages
    assert PLANTED[wrong[0]] in messages


def test_no_question_gives_a_point_for_what_needs_no_thought():
    constant = {"q1": ("zero", "nan", "identity"), "q2": ("nothing", "the question"), "q4": ("zero", "nan", "identity")}
    for question, names in (constant | {"q3": ("pays all", "pays nothing", "nan", "text")}).items():
        for name in names:
            assert QUESTIONS[question](WRONG[question][name]).score == 0, (question, name)


def test_the_factor_is_that_of_the_closed_form():
    torch.manual_seed(5)
    for n in (2, 3, 4):
        weights = torch.randn(n, n)
        assert by_enumeration(weights).item() == pytest.approx(1 - weights.trace().item() / n, abs=1e-5)


def test_the_tables_of_the_exercise_are_what_its_verifier_says():
    pay = ["Tom has 6+8=14 beads.\n#### 14", "Tom has 6+8=14 beads.\nThe answer is 14.", "So he has 14 beads.", "14.0"]
    not_pay = ["2 3 4 5 6 7 8 9 10 11 12 13 14 15", "It is 14, or maybe 15.", "Tom has 6+8=14 beads.\n#### 15", "140"]
    assert all(one_claim(text, "14") for text in [*pay, "#### 12\nNo, wait.\n#### 14"]) and one_claim("1,234", "1234")
    assert not any(one_claim(text, "14") for text in [*not_pay, "-14", "14.5", "#### 14\nNo, wait.\n#### 12"])
