"""The checks of lesson 01 pass what is right, kill what is wrong, and name the mistake."""

import torch
import torch.nn.functional as F
from answers import common_tests

from rlcourse.course.checks.nb01 import QUESTIONS


def token(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def upto_end(ids, eos_id):
    return (ids == eos_id).cumsum(1) - (ids == eos_id).long() == 0


def cross_entropy(logits, ids, eos_id):
    losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    alive = torch.cat([torch.ones_like(ids[:, :1]), (ids != eos_id).long().cumprod(1)[:, :-1]], dim=1)
    return -(losses * alive).sum(1)


def row_by_row(logits, ids, eos_id):
    found = []
    for row, tokens in zip(logits, ids.tolist(), strict=True):
        total = torch.zeros(())
        for scores, chosen in zip(row, tokens, strict=True):
            total = total + scores[chosen] - torch.logsumexp(scores, 0)
            if chosen == eos_id:
                break
        found.append(total)
    return torch.stack(found)


def shifted(logits, ids, eos_id):
    mask = upto_end(ids, eos_id)[:, 1:]
    return (token(logits[:, :-1], ids[:, 1:]) * mask).sum(1)


def loss_selected(logprobs, mask, rewards, baseline):
    rows = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    return -((rewards - baseline)[rows] * logprobs[mask]).sum() / len(mask)


def loss_where(logprobs, mask, rewards, baseline):
    weights = (baseline - rewards)[:, None].expand_as(mask)
    return torch.where(mask, weights * torch.where(mask, logprobs, 0.0), 0.0).sum(1).mean()


def rows_of(logprobs, mask):
    return logprobs.masked_fill(~mask, 0.0).sum(1)


def per_row_mean(logprobs, mask, rewards, baseline):
    return -((rewards - baseline) * rows_of(logprobs, mask) / mask.sum(1)).mean()


def per_token_mean(logprobs, mask, rewards, baseline):
    return -((rewards - baseline) * rows_of(logprobs, mask)).sum() / mask.sum()


def normalised_loss(logprobs, mask, rewards, baseline):
    advantage = rewards - baseline
    return -(advantage / (advantage.std() + 1e-4) * rows_of(logprobs, mask)).mean()


def table(logits, rewards, baseline):
    return (rewards - baseline)[:, None] * (torch.eye(len(logits)) - logits.softmax(0))


def weighted(pi, values):
    mean = pi @ values
    return torch.stack([mean, pi @ (values - mean) ** 2])


def by_autograd(logits, rewards, baseline):
    with torch.enable_grad():
        leaf = logits.clone().requires_grad_()
        rows = [torch.autograd.grad(leaf.log_softmax(0)[a], leaf)[0] for a in range(len(leaf))]
    return weighted(logits.softmax(0), torch.stack(rows) * (rewards - baseline)[:, None])


def by_loops(logits, rewards, baseline):
    pi, n = logits.softmax(0).tolist(), len(logits)
    g = [[(rewards[a].item() - baseline) * ((a == j) - pi[j]) for j in range(n)] for a in range(n)]
    mean = [sum(pi[a] * g[a][j] for a in range(n)) for j in range(n)]
    return torch.tensor([mean, [sum(pi[a] * (g[a][j] - mean[j]) ** 2 for a in range(n)) for j in range(n)]])


def squares(logits, rewards, baseline):
    pi, values = logits.softmax(0), table(logits, rewards, baseline)
    return torch.stack([pi @ values, pi @ values**2])


def alike(logits, rewards, baseline):
    values = table(logits, rewards, baseline)
    return torch.stack([values.mean(0), values.var(0, correction=0)])


def without_pi(logits, rewards, baseline):
    return weighted(logits.softmax(0), (rewards - baseline)[:, None] * torch.eye(len(logits)))


def groups_of(rewards, n):
    return rewards.view(-1, n)


def loo(groups):
    n = groups.shape[1]
    return groups - (groups.sum(1, keepdim=True) - groups) / (n - 1)


def loo_scaled(rewards, n):
    groups = groups_of(rewards, n)
    return ((groups - groups.mean(1, keepdim=True)) * n / (n - 1)).flatten()


def loo_matrix(rewards, n):
    others = (torch.ones(n, n) - torch.eye(n)) / (n - 1)
    return torch.cat([r - others @ r for r in rewards.split(n)])


def centered(rewards, n):
    return groups_of(rewards, n) - groups_of(rewards, n).mean(1, keepdim=True)


RIGHT = {
    "q1": [cross_entropy, row_by_row],
    "q2": [loss_selected, loss_where],
    "q3": [by_autograd, by_loops],
    "q4": [loo_scaled, loo_matrix],
}
WRONG = {
    "q1": {
        "without the end": lambda logits, ids, eos: (token(logits, ids) * ((ids == eos).cumsum(1) == 0)).sum(1),
        "everything": lambda logits, ids, eos: token(logits, ids).sum(1),
        "not the end token": lambda logits, ids, eos: (token(logits, ids) * (ids != eos)).sum(1),
        "mean": lambda logits, ids, eos: (token(logits, ids) * upto_end(ids, eos)).sum(1) / upto_end(ids, eos).sum(1),
        "probabilities": lambda logits, ids, eos: (token(logits, ids).exp() * upto_end(ids, eos)).sum(1),
        "logits": lambda logits, ids, eos: (logits.gather(-1, ids[..., None])[..., 0] * upto_end(ids, eos)).sum(1),
        "shifted": shifted,
        "most probable": lambda logits, ids, eos: (logits.log_softmax(-1).amax(-1) * upto_end(ids, eos)).sum(1),
        "log of softmax": lambda logits, ids, eos: (
            logits.softmax(-1).gather(-1, ids[..., None])[..., 0].log() * upto_end(ids, eos)
        ).sum(1),
        "one number": lambda logits, ids, eos: (token(logits, ids) * upto_end(ids, eos)).sum(),
        "detached": lambda logits, ids, eos: row_by_row(logits.detach(), ids, eos),
    },
    "q2": {
        "sign": lambda *a: -loss_selected(*a),
        "mean over a row": per_row_mean,
        "mean over tokens": per_token_mean,
        "sum over rows": lambda logprobs, *a: loss_selected(logprobs, *a) * len(logprobs),
        "no mask": lambda logprobs, mask, rewards, b: -((rewards - b) * logprobs.sum(1)).mean(),
        "no baseline": lambda logprobs, mask, rewards, b: loss_selected(logprobs, mask, rewards, 0.0),
        "baseline added": lambda logprobs, mask, rewards, b: loss_selected(logprobs, mask, rewards, -b),
        "nan": lambda logprobs, mask, rewards, b: -((rewards - b) * (logprobs * mask).sum(1)).mean(),
        "own baseline": lambda logprobs, mask, rewards, b: loss_selected(logprobs, mask, rewards, rewards.mean()),
        "normalised": normalised_loss,
    },
    "q3": {
        "squares": squares,
        "deviation": lambda *a: torch.stack([by_loops(*a)[0], by_loops(*a)[1].clamp(min=0).sqrt()]),
        "flipped": lambda *a: by_loops(*a).flip(0),
        "alike": alike,
        "without pi": without_pi,
        "no baseline": lambda logits, rewards, b: by_loops(logits, rewards, 0.0),
        "transposed": lambda logits, rewards, b: weighted(logits.softmax(0), table(logits, rewards, b).T),
        "mean alone": lambda *a: by_loops(*a)[0],
        "total variance": lambda *a: torch.stack([by_loops(*a)[0], by_loops(*a)[1].sum().expand(len(a[0]))]),
    },
    "q4": {
        "own reward in": lambda r, n: centered(r, n).flatten(),
        "GRPO": lambda r, n: (centered(r, n) / (groups_of(r, n).std(1, keepdim=True) + 1e-4)).flatten(),
        "divided by n": lambda r, n: (
            groups_of(r, n) - (groups_of(r, n).sum(1, keepdim=True) - groups_of(r, n)) / n
        ).flatten(),
        "sum of the others": lambda r, n: (2 * groups_of(r, n) - groups_of(r, n).sum(1, keepdim=True)).flatten(),
        "whole batch": lambda r, n: loo(r[None])[0],
        "strided": lambda r, n: loo(r.view(n, -1).T).T.flatten(),
        "baseline": lambda r, n: r - loo_scaled(r, n),
        "sign": lambda r, n: -loo_scaled(r, n),
        "as groups": lambda r, n: loo(groups_of(r, n)),
        "batch mean": lambda r, n: r - r.mean(),
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "without the end"): "left the end token out",
    ("q1", "everything"): "behind the end count",
    ("q1", "not the end token"): "leaves out every end token",
    ("q1", "mean"): "mean over tokens",
    ("q1", "probabilities"): "added up probabilities",
    ("q1", "logits"): "added up logits",
    ("q1", "shifted"): "shifted by one",
    ("q1", "most probable"): "most probable token",
    ("q1", "log of softmax"): "not finite",
    ("q2", "sign"): "The sign is wrong",
    ("q2", "mean over a row"): "divided each row by its length",
    ("q2", "mean over tokens"): "mean over all tokens",
    ("q2", "sum over rows"): "added up the rows",
    ("q2", "no mask"): "mask is not used",
    ("q2", "no baseline"): "baseline is not taken off",
    ("q2", "baseline added"): "added the baseline",
    ("q2", "nan"): "0 * -inf is nan",
    ("q3", "squares"): "mean of the squares",
    ("q3", "deviation"): "standard deviation",
    ("q3", "flipped"): "wrong way round",
    ("q3", "alike"): "weighed all actions alike",
    ("q3", "without pi"): "lack the - pi_j",
    ("q3", "no baseline"): "baseline is not taken off",
    ("q3", "transposed"): "transpose",
    ("q4", "own reward in"): "contains the row's own reward",
    ("q4", "GRPO"): "that is GRPO",
    ("q4", "divided by n"): "there are n - 1",
    ("q4", "sum of the others"): "take their mean",
    ("q4", "whole batch"): "whole batch",
    ("q4", "strided"): "not the right rows",
    ("q4", "baseline"): "That is the baseline",
    ("q4", "sign"): "The sign is wrong",
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS, RIGHT, WRONG, NAMED, first=True, slow=["q1"])
)
