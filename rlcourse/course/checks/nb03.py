"""Checks of the exercises of lesson 03: group advantages, groups without signal, the GRPO loss, its mean gradient."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

EPS = 1e-4

q1 = Question("q1", "group_normalized", hint="Groups as rows of a matrix; less their mean, over their deviation + eps.")


def by_group(rewards: Tensor, n: int, eps: float) -> Tensor:
    """GRPO's advantages by a loop: [rows], float64."""
    found = []
    for start in range(0, len(rewards), n):
        group = rewards[start : start + n].double().tolist()
        mean = sum(group) / n
        deviation = (sum((r - mean) ** 2 for r in group) / (n - 1)) ** 0.5
        same_all = all(r == group[0] for r in group)
        found += [0.0 if same_all else (r - mean) / (deviation + eps) for r in group]
    return torch.tensor(found, dtype=torch.float64)


def advantage_mistakes(rewards: Tensor, n: int, eps: float) -> dict[str, Tensor]:
    """What usual mistakes give: [rows]."""
    groups, batch = rewards.double().view(-1, n), rewards.double()
    centered, std = groups - groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    strided = by_group(rewards.view(n, -1).T.flatten(), n, eps).view(-1, n).T.flatten()
    return {
        "You did not divide by the deviation: that is Dr. GRPO.": centered.flatten(),
        "You divided by n inside the deviation: GRPO here takes that of a sample, n - 1.": (
            centered / (groups.std(1, correction=0, keepdim=True) + eps)
        ).flatten(),
        "You took mean and deviation of the whole batch: a group is one prompt.": (batch - batch.mean())
        / (batch.std() + eps),
        "You divided by the variance: take its square root.": (centered / (std**2 + eps)).flatten(),
        "You added eps under the root: add it to the deviation.": (centered / (std**2 + eps).sqrt()).flatten(),
        "eps is not added to the deviation.": (centered / std).nan_to_num(0.0).flatten(),
        "You divided the rewards by the deviation, but did not take their mean off.": (groups / (std + eps)).flatten(),
        "Your groups are not the right rows: row i belongs to prompt i // num_generations.": strided,
        "You left the own reward out of the mean.": (centered * n / (n - 1) / (std + eps)).flatten(),
        "The sign is wrong: better than the group must be positive.": -by_group(rewards, n, eps),
        "The result is [prompts, num_generations]: flatten it to [rows].": by_group(rewards, n, eps).view(-1, n),
    }


def check_advantages(f, rewards: Tensor, n: int, eps: float = EPS) -> None:
    compare(f(rewards, n, eps), by_group(rewards, n, eps), advantage_mistakes(rewards, n, eps))


@q1.case("random rewards in groups of 3, 2 and 8")
def _(f):
    for n in (3, 2, 8):
        check_advantages(f, torch.rand(4 * n), n)


@q1.case("right and wrong: rewards 1 and 0")
def _(f):
    rewards = (torch.rand(24) < 0.5).float()
    rewards[:8] = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
    check_advantages(f, rewards, 4)
    check_advantages(f, torch.tensor([0.0, 1, 0, 0, 0]), 5)


@q1.case("a large eps, and none")
def _(f):
    check_advantages(f, torch.rand(8), 4, eps=0.5)
    check_advantages(f, torch.rand(8), 4, eps=0.0)


@q1.case("a group of identical rewards gets exactly 0, beside one that does not")
def _(f):
    for value, n in ((1.0, 4), (0.1, 3), (0.7, 6), (0.3, 7), (-0.9, 6)):
        rewards = torch.cat([torch.full((n,), value), torch.rand(n)])
        found = torch.as_tensor(f(rewards, n, 1e-8))
        if found.shape == rewards.shape:
            if found.isnan().any():
                raise AssertionError("A group of identical rewards gives nan: 0 / 0. Is eps added before you divide?")
            if found[:n].any():
                raise AssertionError(
                    f"{n} rewards of {value} give {found[0].item():.1e}, not 0: the mean of equal floats may round. "
                    "Subtract the first reward of the group from all of it before the mean."
                )
        check_advantages(f, rewards, n, 1e-8)


q2 = Question("q2", "silent_share", hint="p^G + (1 - p)^G by problem, then the mean; and groups whose rewards agree.")


def silent(success: Tensor, rewards: Tensor, n: int) -> Tensor:
    """Expected and measured share of groups without signal, by loops: [2], float64."""
    expected = [p**n + (1 - p) ** n for p in success.double().tolist()]
    groups = [rewards[i : i + n].tolist() for i in range(0, len(rewards), n)]
    measured = [float(len(set(group)) == 1) for group in groups]
    return torch.tensor([sum(expected) / len(expected), sum(measured) / len(measured)], dtype=torch.float64)


def silent_mistakes(success: Tensor, rewards: Tensor, n: int) -> dict[str, Tensor]:
    """What usual mistakes give: [2]. Each is wrong in one of the two numbers."""
    p, right, groups = success.double(), silent(success, rewards, n), rewards.view(-1, n)
    strided = (rewards.view(n, -1) == rewards.view(n, -1)[:1]).all(0)
    expected = {
        "expected: you took the mean of p first: powers first.": p.mean() ** n + (1 - p.mean()) ** n,
        "expected: you counted groups that are all right alone: all wrong are silent, too.": (p**n).mean(),
        "expected: you counted groups that are all wrong alone: all right are silent, too.": ((1 - p) ** n).mean(),
        "expected: that is the share of groups WITH signal.": 1 - right[0],
    }
    measured = {
        "measured: you counted groups that are all wrong alone.": (groups == 0).all(1).double().mean(),
        "measured: you counted groups that are all right alone.": (groups == 1).all(1).double().mean(),
        "measured: rewards may be other numbers than 0 and 1.": (groups == 0).all(1).double().mean()
        + (groups == 1).all(1).double().mean(),
        "measured: that is the share of groups WITH signal.": 1 - right[1],
        "measured: row i belongs to prompt i // num_generations.": strided.double().mean(),
        "measured: that is a number of groups: divide by how many there are.": right[1] * len(groups),
    }
    both = {"Both are the share of groups WITH signal.": 1 - right, "The two numbers are swapped.": right.flip(0)}
    named = both | {sentence: torch.stack([torch.as_tensor(v).double(), right[1]]) for sentence, v in expected.items()}
    return named | {sentence: torch.stack([right[0], torch.as_tensor(v)]) for sentence, v in measured.items()}


def check_silent(f, success: Tensor, rewards: Tensor, n: int) -> None:
    compare(f(success, rewards, n), silent(success, rewards, n), silent_mistakes(success, rewards, n))


@q2.case("some silent groups among others, groups of 2, 3 and 4")
def _(f):
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1])
    for n in (2, 3, 4):
        check_silent(f, torch.rand(6), rewards, n)


@q2.case("random rewards at given success rates")
def _(f):
    for n in (2, 4, 8):
        success = torch.rand(30)
        check_silent(f, success, (torch.rand(30, n) < success[:, None]).float().flatten(), n)


@q2.case("problems that are never or always solved are always silent")
def _(f):
    success = torch.cat([torch.tensor([0.0, 1.0, 1.0]), torch.rand(1)])
    check_silent(f, success, torch.tensor([0.0] * 4 + [1.0] * 8 + [1.0, 0, 0, 1]), 4)


@q2.case("rewards with other values: 0.1 for the format")
def _(f):
    rewards = torch.tensor(
        [0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0, 1.0, 1.0, 1.0, 0.1, 0.0, 0.1, -1.0, -1.0, -1.0]
    )
    check_silent(f, torch.rand(2), rewards, 3)


q3 = Question("q3", "grpo_loss", hint="min(r A, clip(r) A) less beta k3 by token; mean of each row, mean of the rows.")


def loss_off(logprobs, old, ref, advantages, mask, clip, beta, wrong: str = "") -> Tensor:
    """The GRPO loss in float64, a differentiable scalar; with a mistake if one is named. What is masked is left out."""
    rows, tokens = [], 0
    for i in range(mask.shape[0]):
        keep = mask[i]
        new, was, start = logprobs[i][keep].double(), old[i][keep].double(), ref[i][keep].double()
        a = advantages[i].double()
        apart = new - (start if wrong == "ref in ratio" else was)
        apart = {"inverse": -apart, "one": new - new.detach(), "sequence": apart.sum()}.get(wrong, apart)
        ratio = apart if wrong == "log" else apart.exp()
        free, near = ratio * a, ratio.clamp(1 - clip, 1 + clip) * a
        surrogate = torch.minimum(free, near)
        surrogate = {"no clip": free, "clip alone": near, "max": torch.maximum(free, near)}.get(wrong, surrogate)
        d = new - (was if wrong == "old in kl" else start)
        kl = {"k1": d, "k2": d**2 / 2, "mirrored": d.exp() - 1 - d}.get(wrong, (-d).exp() - 1 + d)
        kl = -kl if wrong == "kl sign" else 0 * kl if wrong == "no kl" else kl
        per_token = (-surrogate + beta * kl) * torch.ones_like(new)
        rows.append(per_token.sum() if wrong in ("tokens", "sum") else per_token.sum() / max(1, len(new)))
        tokens += len(new)
    total = torch.stack(rows).sum()
    real = int(mask.any(1).sum())
    total = total / {"tokens": tokens, "rows added": 1, "real rows": real}.get(wrong, len(rows))
    return -total if wrong == "sign" else total


LOSS_MISTAKES = {
    "sign": "The sign is wrong: optimizers minimise, and rows of positive advantage must become more probable.",
    "kl sign": "The KL has the wrong sign: it is a price, so it is added to the loss.",
    "no kl": "The KL is missing.",
    "tokens": "You took the mean over all tokens: that is DAPO. GRPO takes the mean of each row first.",
    "sum": "You added up the tokens of a row: take their mean.",
    "rows added": "You added up the rows: take their mean.",
    "real rows": "You took the mean over rows that have tokens: an empty row adds 0 and still counts as a row.",
    "no clip": "The clip is missing.",
    "clip alone": "Take the smaller of r A and clip(r) A, not the clipped one alone.",
    "max": "You took the larger of r A and clip(r) A: the clip is pessimistic, it takes the smaller.",
    "inverse": "Your ratio is upside down: the new policy stands above the old one.",
    "log": "The ratio is exp(logprobs - old_logprobs), not their difference.",
    "sequence": "Your ratio is that of the whole row: each token has its own.",
    "ref in ratio": "Your ratio is taken to the reference: it belongs to the policy that sampled, old_logprobs.",
    "old in kl": "Your KL is taken to old_logprobs: it belongs to the reference.",
    "k1": "That KL is k1, the plain difference: take k3.",
    "k2": "That KL is k2, half the square: take k3.",
    "mirrored": "Your k3 is mirrored: with d = logprobs - ref_logprobs it is exp(-d) - 1 + d.",
    "one": "Your ratio is always 1: it lacks old_logprobs.",
}


def batch(rows: int = 5, length: int = 6, apart: float = 0.4) -> tuple[Tensor, ...]:
    """Log-probs of three policies, `apart` from each other, advantages of both signs, rows of different lengths."""
    new = -torch.rand(rows, length) * 2 - 0.1
    old, ref = new + apart * torch.randn(rows, length), new + apart * torch.randn(rows, length)
    lengths = torch.randint(1, length, (rows,))
    lengths[:2] = torch.tensor([1, length])
    advantages = torch.randn(rows) + torch.tensor([1.0, -1.0] + [0.0] * (rows - 2))
    return new, old, ref, advantages, torch.arange(length) < lengths[:, None]


def check_loss(f, tensors: tuple[Tensor, ...], clip: float, beta: float) -> None:
    """Value and gradient."""
    new, *rest = tensors
    found = {}
    for name in ("", *LOSS_MISTAKES):
        leaf = new.double().requires_grad_()
        with torch.enable_grad():
            value = loss_off(leaf, *rest, clip, beta, wrong=name)
            [slope] = torch.autograd.grad(value, leaf)
        found[name] = (value.detach(), slope)
    for i, what in enumerate(("the loss", "the gradient in logprobs")):
        result = f(new, *rest, clip, beta) if i == 0 else f.gradient(new, *rest, clip, beta, wrt=0)
        if result is not None and torch.as_tensor(result).isnan().any():
            raise AssertionError(f"{what} is nan: 0 * inf is nan, so fill the masked places before any arithmetic.")
        compare(result, found[""][i], {LOSS_MISTAKES[k]: v[i] for k, v in found.items() if k}, what=what)
        found = {k: v for k, v in found.items() if torch.allclose(v[0], found[""][0])}  # the value was right


@q3.case("the first update: all three policies are one")
def _(f):
    new, _, _, advantages, mask = batch()
    check_loss(f, (new, new, new, advantages, mask), 0.2, 0.05)


@q3.case("policies apart, no KL: ratio and clip")
def _(f):
    for clip in (0.2, 0.5):
        check_loss(f, batch(), clip, 0.0)


@q3.case("policies apart, with the KL")
def _(f):
    check_loss(f, batch(), 0.2, 0.5)
    check_loss(f, batch(3, 9, apart=0.1), 0.3, 0.04)


@q3.case("only the KL: all advantages are 0")
def _(f):
    new, old, ref, advantages, mask = batch()
    check_loss(f, (new, old, ref, torch.zeros_like(advantages), mask), 0.2, 0.1)


@q3.case("a row without tokens adds 0 and counts as a row")
def _(f):
    new, old, ref, advantages, mask = batch()
    mask[3] = False
    check_loss(f, (new, old, ref, advantages, mask), 0.2, 0.1)


@q3.case("inf and nan behind the end do no harm")
def _(f):
    new, old, ref, advantages, mask = batch()
    fill = {0: -torch.inf, 1: torch.nan, 2: torch.inf}
    new, old, ref = (x.masked_fill(~mask, fill[i]) for i, x in enumerate((new, old, ref)))
    check_loss(f, (new, old, ref, advantages, mask), 0.2, 0.1)


q4 = Question("q4", "expected_gradients", hint="All actions^G groups, their probabilities, and the estimate of each.")


def group_gradients(logits: Tensor, rewards: Tensor, n: int) -> Tensor:
    """Expected gradients with group-centred and with normalised advantages: [2, actions], float64.

    The first in closed form, (1 - 1/n) pi (R - V); the second by how often each action occurs in a group.
    """
    pi, rewards = logits.double().softmax(0), rewards.double()
    first = (1 - 1 / n) * pi * (rewards - pi @ rewards)
    second = torch.zeros_like(pi)
    for counts in itertools.product(range(n + 1), repeat=len(pi)):
        if sum(counts) == n:
            c = torch.tensor(counts, dtype=torch.float64)
            ways = (torch.lgamma(torch.tensor(n + 1.0).double()) - torch.lgamma(c + 1).sum()).exp()
            mean = c @ rewards / n
            deviation = (c @ (rewards - mean) ** 2 / (n - 1)).sqrt()
            weight = c * (rewards - mean) / (deviation + EPS)  # summed advantage of each action
            second += ways * (pi**c).prod() * (weight - weight.sum() * pi) / n
    return torch.stack([first, second])


def gradient_mistakes(logits: Tensor, rewards: Tensor, n: int) -> dict[str, Tensor]:
    """What usual mistakes give: [2, actions]."""
    right = group_gradients(logits, rewards, n)
    return {
        "The rows are the wrong way round: first centred, then normalised.": right.flip(0),
        "You added up over the group: take the mean of its answers.": right * n,
        "The first row leaves the own reward out of the mean.": torch.stack([right[0] * n / (n - 1), right[1]]),
        "You did not divide by the deviation in the second row.": right[:1].repeat(2, 1),
        "The sign is wrong: this is the gradient of the expected reward, to be climbed.": -right,
    }


def check_gradients(f, logits: Tensor, rewards: Tensor, n: int) -> None:
    compare(f(logits, rewards, n), group_gradients(logits, rewards, n), gradient_mistakes(logits, rewards, n))


def apart(actions: int) -> Tensor:
    """Rewards that differ, all of them eighths: the mean of equal ones does not round."""
    return torch.randperm(33)[:actions] / 8


@q4.case("two actions in groups of 2, 3 and 6")
def _(f):
    for n in (3, 2, 6):
        check_gradients(f, torch.randn(2), torch.tensor([1.0, 0.0]), n)


@q4.case("three and four actions, any rewards")
def _(f):
    check_gradients(f, torch.randn(3), apart(3), 4)
    check_gradients(f, torch.randn(4), apart(4) - 0.5, 3)


@q4.case("rewards all alike: no gradient at all")
def _(f):
    compare(f(torch.randn(3), torch.ones(3), 3), torch.zeros(2, 3), what="the gradient")
    check_gradients(f, torch.randn(3), apart(3), 3)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
