"""Checks of the exercises of lesson 04: Dr. GRPO in the loop, gradients to identify, groups to weigh, a step to mend, a
drift to compute."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.builders import Names, expect_loss, left_in, lengths_mask, policy_loss, said_of
from rlcourse.course.checks.comparison import as_tensor
from rlcourse.course.checks.nb02 import CLIPPED, sample_update

q1 = Question("q1", "dr_grpo", hint="Delete the row means and divide by a constant; the KL goes, too.")
expect_loss(q1, *CLIPPED[1:])
q1.case("a policy that has moved, some tokens clipped, and one that has hardly moved")(
    lambda f: [q1.check(f, *sample_update(moved, False)) for moved in (0.5, 0.1)]
)

q2 = Question("q2", "divisions", hint="Take an unknown factor out first. Which two tokens would you compare?")


def gradient_of(by_length: int, by_std: int, rewards: Tensor, lengths: list[int], n: int) -> Tensor:
    """By token of a loss with these divisions and a drawn factor: [rows, longest]."""
    groups, tokens = rewards.double().view(-1, n), torch.tensor(lengths)[:, None]
    A = groups - groups.mean(1, keepdim=True)
    A = (A / groups.std(1, keepdim=True)).nan_to_num() if by_std else A
    A = A.view(-1, 1) / (tokens.clamp(min=1) if by_length else 1)
    return (-(10 ** between(-4, 0)) * A * lengths_mask(lengths, max(lengths))).float()


def check_kinds(f, rewards: Tensor, lengths: list[int], n: int) -> None:
    kinds, mask = list(itertools.product((0, 1), repeat=2)), lengths_mask(lengths, max(lengths))
    for place in torch.randperm(4).tolist():
        by_length, by_std = kinds[place]
        truth = f"{('not ', '')[by_length]}divided by the length and {('not ', '')[by_std]}by the deviation"
        what = f"the answer for a gradient that was {truth}"
        found = as_tensor(f(gradient_of(by_length, by_std, rewards, lengths, n), rewards, mask, n), what)
        swapped = "The two answers are in the wrong order: first the length, then the deviation."
        mistakes = {swapped: torch.tensor([by_std, by_length])}
        compare(found.double().round().long(), torch.tensor([by_length, by_std]), mistakes, what)


def unlike(n: int, groups: int) -> Tensor:
    """Rewards 0 and 1 of groups whose numbers of right answers all differ, none 0 or n, nor mirrored: [groups * n]."""
    counts = (1 + torch.randperm(n // 2))[:groups]
    return torch.cat([(torch.randperm(n) < k).float() for k in counts.tolist()])


def unlike_lengths(rows: int, high: int = 30) -> list[int]:
    return (2 + torch.randperm(high - 2)[:rows]).tolist()


@q2.case("rewards 0 and 1; groups without signal, the first too; answers to one prompt that are all of one length")
def _(f):
    signal = unlike(6, 2)
    check_kinds(f, torch.cat([torch.ones(6), signal[:6], torch.zeros(6), signal[6:]]), unlike_lengths(24), 6)
    check_kinds(f, unlike(8, 3), [length for length in unlike_lengths(3, 60) for _ in range(8)], 8)


@q2.case("rewards of any size, and an answer without a token")
def _(f):
    lengths = unlike_lengths(12)
    lengths[draw(0, 11)] = 0
    check_kinds(f, torch.cat([0.1 * torch.rand(4), torch.rand(4), 5 * torch.rand(4) - 2]), lengths, 4)


q3 = Question("q3", "group_weights", hint="With p = k / n: k answers have |A| = 1 - p, the other n - k have |A| = p.")


@q3.expects(also={
    "You have p (1 - p) and its root: the right shapes, but not the sums of |A|.": lambda k, n: torch.stack(
        [k / n * (1 - k / n), (k / n * (1 - k / n)).sqrt()]
    ),
    "The std is that of a sample: n - 1 in its denominator.": {"ddof": 0},
    "The two rows are in the wrong order: Dr. GRPO first.": lambda k, n: weights_by_group(k, n).flip(0),
    "You took the weight of one answer: add up the group.": lambda k, n: weights_by_group(k, n) / n,
    "You counted the right answers alone: the wrong ones weigh as much again.": lambda k, n: weights_by_group(k, n) / 2,
}, parts={"the weights": None}, atol=1e-4)  # fmt: skip
def weights_by_group(successes: Tensor, n: int, ddof: int = 1) -> Tensor:
    """Sum of |A| of a group with k right answers, centered and divided by the std: from the rewards themselves."""
    rewards = (torch.arange(n) < successes[:, None]).double()
    total = (rewards - rewards.mean(1, keepdim=True)).abs().sum(1)
    return torch.stack([total, total / rewards.std(1, correction=ddof)]).nan_to_num()


q3.case("groups of 2, 5, 8 and many: every number of right answers but none and all")(
    lambda f: [q3.check(f, 1 + torch.randperm(n - 1), n) for n in (2, 5, 8, draw(64, 400))]
)
q3.case("groups that are all wrong or all right weigh 0 in both")(
    lambda f: [q3.check(f, torch.tensor([0, n, draw(1, n - 1)]), n) for n in (draw(4, 9), draw(10, 400))]
)

q4 = Question("q4", "mended_step", hint="Take the measurements one by one: each points at one line.")

# The planted mistakes, in the order in which a card names those that are left, with the lesson that explains each.
PLANTED = {
    "shift": "the output at a position is compared with the token at the same position; it predicts the next (01)",
    "end": "the mask drops the end token, so nobody is ever paid for stopping (01)",
    "groups": "the groups are mixed: row i answers prompt i // num_generations (01)",
    "minimum": "the clipped product is taken even where the other is smaller, and wrong tokens get away (02)",
    "std": "the advantages are divided by the deviation of the group, which Dr. GRPO deletes (03, 04)",
    "tokens": "the number of tokens of this batch is drawn with the answers and is no constant (04)",
}


def step_loss(logits, ids, starts, lengths, old, rewards, n: int, limit: int, clip: float, wrong: Names = ()) -> Tensor:
    """The loss in float64, with mistakes: a scalar."""
    groups = rewards.double().view(n, -1).T if "groups" in wrong else rewards.double().view(-1, n)
    A = groups - (0 if "no baseline" in wrong else groups.mean(1, keepdim=True))
    A = A / (groups.std(1, keepdim=True) + 1e-4) if "std" in wrong else A
    A = (A.T if "groups" in wrong else A).reshape(-1, 1)
    at = torch.arange(1, ids.shape[1])
    mask = (at >= starts[:, None]) & (at < (starts + lengths - int("end" in wrong))[:, None])
    new = (logits[:, 1:] if "shift" in wrong else logits[:, :-1]).double().log_softmax(-1)
    new = new.gather(-1, ids[:, 1:, None])[..., 0]
    return policy_loss(new, old, old, A, mask, wrong, clip=clip, limit=limit)


def check_step(f, moved: float, n: int = 3, clip: float = 0.2) -> None:
    """Two prompts, answers of at least two tokens; the policy has moved by about `moved` since it sampled."""
    rows, width = 2 * n, 9
    starts = torch.tensor([draw(1, 3), draw(1, 3)]).repeat_interleave(n)
    lengths, ids = torch.randint(2, 6, (rows,)), torch.randint(0, 5, (rows, width))
    logits = torch.randn(rows, width, 5)
    old = (logits[:, :-1] + moved * torch.randn(rows, width - 1, 5)).log_softmax(-1)
    old = old.gather(-1, ids[:, 1:, None])[..., 0]
    rewards = torch.rand(rows) * 2 + torch.tensor([0.0, 3.0]).repeat_interleave(n)
    q4.check(f, logits, ids, starts, lengths, old, rewards, n, draw(10, 90), clip)


q4.expects(said_of("lengths", "width", "rows", "sum", "sign", "upside down", "no clip") | {
    ("no baseline",): "There is no baseline left: subtract the group's mean reward.",
}, also=left_in(step_loss, PLANTED), parts={"the gradient": 0, "the loss": None}, atol=1e-6)(step_loss)  # fmt: skip
q4.case("a policy that has moved, some tokens clipped")(lambda f: [check_step(f, 0.6), check_step(f, 0.3, 4, 0.1)])

q5 = Question("q5", "drift", hint="How probable is an answer of L tokens, and what is the derivative of its log-prob?")


@q5.expects({
    "no cut": "You left out the answers that are cut off: they have no end token, but they have a score.",
    "cut as ended": "An answer that is cut off never stopped: its score is that of going on, limit times.",
    "by q": "That is the derivative with respect to q. Asked for is theta, with q = sigmoid(theta).",
    "mean of tokens": "The weights are those of each token already: don't divide by the length once more.",
    "not weighed by chance": "You added up the answers as if all were equally likely: weigh each by its probability.",
    "sign": "The sign is wrong: positive means that the policy learns to stop more often.",
}, parts={"the drift": None}, atol=1e-6)  # fmt: skip
def drift_by_loop(weights: Tensor, cut: float, q: float, wrong: str = "") -> float:
    """The drift by going through all answers, each token's score by itself; `wrong` names a usual mistake."""
    limit, total = len(weights), 0.0
    cases = [(length, True, weights[length - 1].item()) for length in range(1, limit + 1)] + [(limit, False, cut)]
    for length, ended, weight in cases:
        chance = (1 - q) ** (length - 1) * (q if ended else 1 - q)
        stops = ended or wrong == "cut as ended"
        score = sum(1 - q if stops and t == length else -q for t in range(1, length + 1))
        factors = {"by q": 1 / (q * (1 - q)), "mean of tokens": 1 / length, "not weighed by chance": 1 / chance}
        factors |= {"sign": -1, "no cut": ended}
        total += chance * weight * score * factors.get(wrong, 1)
    return total


q5.case("any weights, a short limit")(
    lambda f: [q5.check(f, torch.rand(n) + 0.1, between(0, 1), between(0.1, 0.6)) for n in (1, 2, 5)]
)


@q5.case("a constant, whatever it is: no drift, unless answers that are cut off have another")
def _(f):
    constant, q, limit = between(0.1, 1.1), between(0.05, 0.55), draw(3, 40)
    for cut in (constant, constant / 2, 0.0):
        q5.check(f, torch.full((limit,), constant), cut, q)
