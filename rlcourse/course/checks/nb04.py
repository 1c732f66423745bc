"""Checks of exercise 04, Dr. GRPO. The references are loops over single tokens, in float64, or closed forms."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

HOWS = ("sequence_mean", "token_mean", "constant")

q1 = Question("q1", "aggregate", hint="Set what is masked to 0 first; then the three differ in what divides the sum.")
q2 = Question("q2", "token_weights", hint="How often does a token's log-prob enter the loss, and divided by what?")
q3 = Question("q3", "group_weights", hint="With p = k / n: k answers have |A| = 1 - p, the other n - k have |A| = p.")
q4 = Question("q4", "dr_grpo_loss", hint="Advantages by group, ratio, clipped surrogate, then the sum over a constant.")
q5 = Question("q5", "sequence_ratio", hint="A geometric mean of ratios is exp of the mean of their logarithms.")


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """bool [rows, width], True on the first tokens of each row."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def tokens(mask: Tensor) -> list[tuple[int, int]]:
    """Places of the tokens that count."""
    return [tuple(place) for place in mask.nonzero().tolist()]


# q1 --------------------------------------------------------------------------------------------------------------


def aggregate_by_loop(values: Tensor, mask: Tensor, how: str, max_new_tokens: int) -> Tensor:
    rows, count = len(mask), mask.sum().item()
    total = 0.0
    for i, t in tokens(mask):
        by = {
            "sequence_mean": rows * mask[i].sum().item(),
            "token_mean": count,
            "constant": rows * max_new_tokens,
        }[how]
        total += values[i, t].item() / by
    return torch.tensor(total)


def check_aggregate(f, how: str, mistakes) -> None:
    """Three rows of unequal length with numbers at the padding, and a limit beyond the width of the batch."""
    values, mask, limit = torch.randn(3, 6), lengths_mask([2, 6, 3], 6), 9
    values[~mask] = 50.0
    named = {"You counted the padding: what is masked must add 0.": padded(values, mask, how, limit)}
    compare(f(values, mask, how, limit), aggregate_by_loop(values, mask, how, limit), named | mistakes(values, mask))


def padded(values: Tensor, mask: Tensor, how: str, limit: int) -> Tensor:
    """The aggregation of all columns, padding included."""
    return aggregate_by_loop(values, torch.ones_like(mask), how, limit)


@q1.case("sequence_mean: the mean of each row over its own tokens, then over rows")
def _(f):
    def mistakes(values, mask):
        kept = values * mask
        return {
            "You divided by the padded width: divide each row by its own number of tokens.": kept.mean(),
            "You took one mean over all tokens: that is token_mean (DAPO).": kept.sum() / mask.sum(),
            "You added up the row means: divide by the number of rows.": (kept.sum(1) / mask.sum(1)).sum(),
        }

    check_aggregate(f, "sequence_mean", mistakes)


@q1.case("token_mean: one mean over all tokens of the batch")
def _(f):
    def mistakes(values, mask):
        kept = values * mask
        return {
            "You took the mean of the row means: that is sequence_mean (GRPO).": (kept.sum(1) / mask.sum(1)).mean(),
            "You divided by all places, padding included: divide by the number of real tokens.": kept.mean(),
        }

    check_aggregate(f, "token_mean", mistakes)


@q1.case("constant: the sum over rows * max_new_tokens, whatever the lengths are")
def _(f):
    def mistakes(values, mask):
        kept = values * mask
        return {
            "You divided by the width of this batch: the constant is max_new_tokens, the same for every batch.": (
                kept.mean()
            ),
            "You forgot to divide by the number of rows.": kept.sum() / 9,
            "You forgot to divide by max_new_tokens.": kept.sum() / 3,
            "You divided by the number of real tokens: that is token_mean (DAPO).": kept.sum() / mask.sum(),
        }

    check_aggregate(f, "constant", mistakes)


@q1.case("a row without a token adds 0 and still counts as a row")
def _(f):
    values, mask = torch.randn(3, 4), lengths_mask([3, 0, 4], 4)
    for how in HOWS:
        kept = values * mask
        full = mask.any(1)
        dropped = {
            "A row without a token was left out: it adds 0 and counts as a row.": (
                (kept[full].sum(1) / mask[full].sum(1)).mean() if how == "sequence_mean" else kept[full].sum() / (2 * 4)
            )
        }
        expected = aggregate_by_loop(values, mask, how, 4)
        compare(
            f(values, mask, how, 4), expected, dropped if how != "token_mean" else {}, what=f"{how} with an empty row"
        )


# q2 --------------------------------------------------------------------------------------------------------------


def weights_by_gradient(mask: Tensor, how: str, max_new_tokens: int) -> Tensor:
    """The derivative of an aggregation with respect to each value, by moving one value at a time."""
    zero = torch.zeros(mask.shape, dtype=torch.float64)
    weights = zero.clone()
    for i, t in tokens(mask):
        moved = zero.clone()
        moved[i, t] = 1.0
        weights[i, t] = aggregate_by_loop(moved, mask, how, max_new_tokens)
    return weights.float()


@q2.case("one short and one long answer: what each aggregation gives a token")
def _(f):
    mask, limit = lengths_mask([1, 4], 4), draw(10, 10**6)
    for how in HOWS:
        expected = weights_by_gradient(mask, how, limit)
        mistakes = {
            "Padding got a weight: it should be 0 there.": expected.where(mask, expected[mask].max()),
            "You forgot to divide by the number of rows.": expected * 2,
            "You gave every token of the batch the same 1 / tokens: only token_mean does.": mask / mask.sum(),
            "The constant is max_new_tokens, not the width of the batch.": mask / (2 * 4),
        }
        compare(f(mask, how, limit), expected, mistakes, what=f"{how}: the weight")


@q2.case("lengths drawn at random")
def _(f):
    mask, limit = lengths_mask(torch.randint(1, 12, (5,)).tolist(), 12), 20
    for how in HOWS:
        compare(f(mask, how, limit), weights_by_gradient(mask, how, limit), what=f"{how}: the weight")


@q2.case("an answer without a token has no weight anywhere, and no nan")
def _(f):
    lengths = [0, *torch.randint(1, 12, (6,)).tolist()]
    mask = lengths_mask(lengths, 12)
    for how in HOWS:
        compare(f(mask, how, 12), weights_by_gradient(mask, how, 12), what=f"{how}: the weight")


# q3 --------------------------------------------------------------------------------------------------------------


def weights_by_group(successes: list[int], n: int, ddof: int = 1) -> Tensor:
    """Sum of |A| of a group with k right answers, centered and divided by the std: from the rewards themselves."""
    rows = []
    for k in successes:
        rewards = [1.0] * k + [0.0] * (n - k)
        mean = sum(rewards) / n
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - ddof))
        total = sum(abs(r - mean) for r in rewards)
        rows.append([total, total / std if std > 0 else 0.0])
    return torch.tensor(rows).T


@q3.case("a group of eight: every number of right answers from 1 to 7")
def _(f):
    k = (1 + torch.randperm(7)).tolist()
    expected = weights_by_group(k, 8)
    p = torch.tensor(k) / 8
    mistakes = {
        "The std is that of a sample: n - 1 in its denominator.": weights_by_group(k, 8, ddof=0),
        "The two rows are in the wrong order: Dr. GRPO first.": expected.flip(0),
        "You took the weight of one answer: add up the group.": expected / 8,
        "You divided by the variance: GRPO divides by its root.": torch.stack(
            [expected[0], expected[0] / (p * (1 - p) * 8 / 7)]
        ),
    }
    compare(f(torch.tensor(k), 8), expected, mistakes)


@q3.case("groups that are all wrong or all right weigh 0 in both")
def _(f):
    n = draw(4, 400)
    k = [0, n, draw(1, n - 1)]
    compare(f(torch.tensor(k), n), weights_by_group(k, n))


@q3.case("other sizes of group")
def _(f):
    for n in (2, 5, draw(64, 400)):
        k = [1, draw(1, n - 1), n - 1]
        compare(f(torch.tensor(k), n), weights_by_group(k, n), what=f"the weight for n = {n}", atol=1e-4)


# q4 --------------------------------------------------------------------------------------------------------------

LIMIT = 10


def loss_by_loop(
    logprobs, old_logprobs, rewards, mask, n, limit, clip=0.2, std=False, how="constant", low=True, group=True
) -> Tensor:
    """The loss token by token in float64. The last four switches turn it into those of usual mistakes."""
    total = 0.0
    rewards = rewards.double()
    for i, t in tokens(mask):
        peers = rewards[i // n * n : i // n * n + n] if group else rewards
        advantage = rewards[i] - peers.mean()
        if std:
            advantage = advantage / (peers.std() + 1e-4)
        ratio = (logprobs[i, t].double() - old_logprobs[i, t].double()).exp()
        clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
        surrogate = torch.minimum(ratio * advantage, clipped) if low else clipped
        by = {
            "constant": len(mask) * limit,
            "sequence_mean": len(mask) * mask[i].sum(),
            "token_mean": mask.sum(),
        }[how]
        total = total - surrogate / by
    return torch.as_tensor(total).float()


def drawn(moved: float):
    """Six answers in two groups of three; the policy has moved by about `moved` since it sampled."""
    mask = lengths_mask([3, 7, 1, 5, 2, 7], 7)
    old = -torch.rand(6, 7) * 3
    return (old + moved * torch.randn(6, 7)) * mask, old * mask, torch.tensor([1.0, 1, 0, 0, 1, 0]), mask, 3, LIMIT


def loss_mistakes(arguments) -> dict[str, Tensor]:
    logprobs, old, rewards, mask, n, limit = arguments
    across = rewards.view(n, -1) - rewards.view(n, -1).mean(1, keepdim=True) + 0.0
    wide = loss_by_loop(logprobs, old, rewards, mask, n, mask.shape[1])
    return {
        "You divided the advantages by the std of the group: that is GRPO, and the second deletion.": loss_by_loop(
            *arguments, std=True
        ),
        "You divided each answer by its own length: that is GRPO, and the first deletion.": loss_by_loop(
            *arguments, how="sequence_mean"
        ),
        "Both biases of GRPO are still there: the std of the group and the length of the answer.": loss_by_loop(
            *arguments, std=True, how="sequence_mean"
        ),
        "You divided by the number of tokens: that is DAPO's mean, which changes from batch to batch.": loss_by_loop(
            *arguments, how="token_mean"
        ),
        "You divided by the width of the batch: the constant is max_new_tokens.": wide,
        "The baseline is the mean of the batch: take the mean of each group.": loss_by_loop(*arguments, group=False),
        "The clipped ratio is used everywhere: take the minimum of the two products.": loss_by_loop(
            *arguments, low=False
        ),
        "The ratio is upside down: it is new over old.": loss_by_loop(old, logprobs, rewards, mask, n, limit),
        "The sign is wrong: the loss is minus what should grow.": -loss_by_loop(*arguments),
        "You forgot to divide by the number of rows.": loss_by_loop(*arguments) * len(mask),
        "Groups are neighbours: reshape the rewards to [prompts, num_generations].": from_advantages(
            arguments, across.flatten()
        ),
    }


def from_advantages(arguments, advantages: Tensor) -> Tensor:
    """The loss for given advantages [rows]."""
    logprobs, old, _, mask, _, limit = arguments
    ratio, a = (logprobs - old).exp(), advantages[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)[mask].sum() / (len(mask) * limit)


@q4.case("a policy that has moved: the value, some tokens clipped")
def _(f):
    arguments = drawn(0.4)
    compare(f(*arguments), loss_by_loop(*arguments), loss_mistakes(arguments), atol=1e-6)


@q4.case("a policy that has not moved: the gradient of each token is -A / (rows * max_new_tokens)")
def _(f):
    _, old, rewards, mask, n, limit = drawn(0.0)
    advantages = rewards - rewards.view(-1, n).mean(1).repeat_interleave(n)
    expected = -advantages[:, None] * mask / (len(mask) * limit)
    mistakes = {
        "The gradient is that of GRPO: each token of a long answer still weighs less.": (
            -advantages[:, None] * mask / (len(mask) * mask.sum(1, keepdim=True))
        ),
        "Padding has a gradient: mask it.": (-advantages[:, None] / (len(mask) * limit)).expand(mask.shape),
    }
    found = f.gradient(old, old, rewards, mask, n, limit, wrt=0)
    compare(found, expected, mistakes, what="the gradient", atol=1e-6)


@q4.case("clipped tokens have no gradient, by the clip that is asked for")
def _(f):
    old = torch.zeros(2, 4)
    logprobs = torch.tensor([0.5, 0.15, -0.5, -0.05]) * (1 + 0.15 * torch.rand(2, 4))
    mask, rewards = torch.ones(2, 4, dtype=torch.bool), torch.tensor([1.0, 0.0])
    ratio = logprobs.exp()
    live = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 1]])  # up from 1 + clip for A > 0, down from 1 - clip for A < 0
    expected = -torch.tensor([[0.5], [-0.5]]) * ratio * live / (2 * 4)
    found = f.gradient(logprobs, old, rewards, mask, 2, 4, 0.1, wrt=0)
    everywhere = -torch.tensor([[0.5], [-0.5]]) * ratio * torch.tensor([0, 0, 0, 1]) / (2 * 4)
    mistakes = {
        "A clipped token lost its gradient where it should keep it: take the minimum of the two products.": everywhere,
        "No token is clipped: is the minimum taken with the clipped product?": (
            -torch.tensor([[0.5], [-0.5]]) * ratio / (2 * 4)
        ),
    }
    compare(found, expected, mistakes, what="the gradient", atol=1e-6)


@q4.case("a group of identical rewards gives a loss of exactly 0")
def _(f):
    logprobs, old, _, mask, n, limit = drawn(0.4)
    compare(f(logprobs, old, torch.full((6,), 0.25), mask, n, limit), torch.tensor(0.0), atol=1e-9)
    arguments = drawn(0.4)
    compare(f(*arguments), loss_by_loop(*arguments), loss_mistakes(arguments), atol=1e-6)


# q5 --------------------------------------------------------------------------------------------------------------


def ratio_by_root(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The product of the token ratios of each row, to the power of 1 / length; 1 for an empty row."""
    rows = []
    for new, old, keep in zip(logprobs.double(), old_logprobs.double(), mask, strict=True):
        product = math.prod(math.exp(n - o) for n, o in zip(new[keep].tolist(), old[keep].tolist(), strict=True))
        rows.append(product ** (1 / max(1, int(keep.sum()))))
    return torch.tensor(rows)


def moved_rows(lengths: list[int]):
    mask = lengths_mask(lengths, 8)
    old = -torch.rand(len(lengths), 8) * 2
    return old + 0.3 * torch.randn(len(lengths), 8), old, mask


@q5.case("the geometric mean of the token ratios over the tokens of each row")
def _(f):
    new, old, mask = moved_rows([1, 5, 8, 3])
    difference = (new - old) * mask
    mistakes = {
        "You took the mean over the padded width: divide by the row's own number of tokens.": difference.mean(1).exp(),
        "You took the product of the ratios without the root: divide the sum of logs by the length.": (
            difference.sum(1).exp()
        ),
        "You took the arithmetic mean of the ratios: the mean goes inside the exponential.": (
            (difference.exp() * mask).sum(1) / mask.sum(1)
        ),
        "You counted the padding: mask the log-ratios before adding them up.": (new - old).mean(1).exp(),
        "The ratio is upside down: it is new over old.": 1 / ratio_by_root(new, old, mask),
    }
    compare(f(new, old, mask), ratio_by_root(new, old, mask), mistakes)


@q5.case("1 for a policy that has not moved, and for a row without a token")
def _(f):
    new, old, mask = moved_rows([0, 4])
    compare(f(old, old, mask), torch.ones(2), what="the ratio of the same policy")
    compare(f(new, old, mask), ratio_by_root(new, old, mask), what="the ratio with an empty row")


@q5.case("the gradient: ratio / length on each of a row's tokens, 0 on padding")
def _(f):
    new, old, mask = moved_rows([2, 8, 5])
    expected = ratio_by_root(new, old, mask)[:, None] * mask / mask.sum(1, keepdim=True)
    compare(f.gradient(new, old, mask, wrt=0), expected, what="the gradient")


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
