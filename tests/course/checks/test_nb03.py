"""The checks of lesson 03 pass what is right, kill what is wrong, and name the mistake."""

import itertools

import pytest
import torch
from answers import common_tests

from rlcourse.course.checks.nb03 import QUESTIONS
from rlcourse.course.checks.nb03.q1_whose_log import EPS, TRAINERS, weights_of
from rlcourse.course.checks.nb03.q2_silence import silence
from rlcourse.course.checks.nb03.q4_gradients import gradients_off, group_gradients
from rlcourse.losses import aggregate, kl_estimate, token_loss

# q1: whose log ---------------------------------------------------------------------------------------------------


def candidates(rewards, n, eps=EPS):
    groups, wrong = rewards.view(-1, n), rewards.view(n, -1)
    centered, mixed = groups - groups.mean(1, keepdim=True), wrong - wrong.mean(0)
    return [
        rewards,
        rewards - rewards.mean(),
        centered.flatten(),
        (centered / (groups.std(1, keepdim=True) + eps)).flatten(),
        (mixed / (wrong.std(0) + eps)).flatten(),
    ]


def by_direction(rewards, weights, n, known=range(5), eps=EPS):
    cosines = [torch.cosine_similarity(weights, c, dim=0) for c in candidates(rewards, n, eps)]
    return max(known, key=lambda k: cosines[k].item())


def by_regression(rewards, weights, n):
    """The smallest residual once the best factor is taken; with loops of its own."""
    residuals = []
    for trainer in range(len(TRAINERS)):
        c, w = weights_of(trainer, rewards, n), weights.double()
        residuals.append((w - (w @ c) / (c @ c) * c).norm())
    return torch.stack(residuals).argmin()


def known_factor(rewards, weights, n):
    return min(range(5), key=lambda k: (weights - candidates(rewards, n)[k]).norm().item())


def exact(rewards, weights, n):
    """Divided by the first weight, and without any tolerance for digits."""
    for k, c in enumerate(candidates(rewards, n)):
        if torch.allclose(weights / weights.abs().max(), c / c.abs().max(), atol=1e-6):
            return k
    return 0


def by_sums(rewards, weights, n):
    """Looks at sums alone: cannot tell the last three apart."""
    if weights.view(-1, n).sum(1).abs().max() < 0.02 * weights.abs().sum():
        return 3
    return 1 if weights.sum().abs() < 0.02 * weights.abs().sum() else 0


# q2: a data set --------------------------------------------------------------------------------------------------


def mixture(mean, share, n, least=None, problems=1000):
    least = mean**n + (1 - mean) ** n if least is None else least
    extreme = round(problems * (share - least) / (1 - least))
    solved = round(extreme * mean)
    return torch.tensor([1.0] * solved + [0.0] * (extreme - solved) + [mean] * (problems - extreme))


def by_steps(mean, share, n):
    """Replace problems that are alike by solved and unsolved ones, in turn, until enough groups are silent."""
    success = [mean] * 900
    for i in range(900):
        if silence(torch.tensor(success), n) >= share:
            break
        success[i] = float(sum(success[:i]) < mean * (i + 1) - 0.5)
    return success


# q3: a loss ------------------------------------------------------------------------------------------------------


def colleague(logprobs, old_logprobs, ref_logprobs, advantages, mask, clip, beta):
    ratio = (logprobs - old_logprobs).exp()
    surrogate = ratio.clamp(1 - clip, 1 + clip) * advantages[:, None]
    apart = logprobs - ref_logprobs
    kl = apart.exp() - 1 - apart
    return ((beta * kl - surrogate) * mask).sum() / mask.sum()


def from_the_lesson(log_pi, old, ref, A, mask, clip, beta):
    """The lesson's own cell, which never met padding that is not 0, nor an answer without tokens."""
    ratio, A = (log_pi - old).exp(), A[:, None]
    surrogate = torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    k3 = (ref - log_pi).exp() - 1 - (ref - log_pi)
    by_token = (beta * k3 - surrogate) * mask
    return (by_token.sum(1) / mask.sum(1)).mean()


def loss_by_package(
    logprobs, old, ref, advantages, mask, clip, beta, ratio="token", how="sequence_mean", estimator="k3", sign=1
):
    new = logprobs
    loss, _ = token_loss(new, old, advantages, mask, surrogate="clip", ratio=ratio, clip_low=clip, clip_high=clip)
    kl = kl_estimate(new.masked_fill(~mask, 0.0), ref.masked_fill(~mask, 0.0), estimator)
    counts = {"rows": len(mask), "tokens": int(mask.sum()), "max_new_tokens": mask.shape[1]}
    return aggregate(loss + sign * beta * kl, mask, how, **counts)


def loss_by_rows(new, old, ref, a, mask, clip, beta, gain=None, kl=None, empty=True, over=None):
    """Row by row. gain(ratio, advantage), kl(log-prob less the reference's): others than the right ones; over: what is
    divided by in place of the row's tokens."""
    rows = []
    for i in range(len(mask)):
        n, o, f = (x[i][mask[i]] for x in (new, old, ref))
        r, d = (n - o).exp(), n - f
        earned = torch.minimum(r * a[i], r.clamp(1 - clip, 1 + clip) * a[i]) if gain is None else gain(r, a[i])
        price = (-d).exp() - 1 + d if kl is None else kl(d)
        if len(n) or empty:
            rows.append((beta * price - earned).sum() / (max(len(n), 1) if over is None else over))
    return torch.stack(rows).mean()


def clip_alone(*x):
    return loss_by_rows(*x, gain=lambda r, a: r.clamp(1 - x[5], 1 + x[5]) * a)


def half_mended(new, old, ref, a, mask, clip, beta):
    """The padding and the KL are right, the two others are left."""
    new, old, ref = (x.masked_fill(~mask, 0.0) for x in (new, old, ref))
    by_token = beta * ((ref - new).exp() - 1 - (ref - new)) - (new - old).exp().clamp(1 - clip, 1 + clip) * a[:, None]
    return by_token.masked_fill(~mask, 0.0).sum() / mask.sum()


def where_at_the_end(new, old, ref, a, mask, clip, beta):
    """The value is right, and the gradient is nan."""
    r, d = (new - old).exp(), new - ref
    by_token = -torch.minimum(r * a[:, None], r.clamp(1 - clip, 1 + clip) * a[:, None]) + beta * ((-d).exp() - 1 + d)
    return (torch.where(mask, by_token, 0.0).sum(1) / mask.sum(1).clamp(min=1)).mean()


def divided_by_zero(new, old, ref, *rest):
    mask = rest[1]
    return from_the_lesson(*(x.masked_fill(~mask, 0.0) for x in (new, old, ref)), *rest)


# q4: expected gradients ------------------------------------------------------------------------------------------


def gradients(logits, rewards, n, advantage=None, second=True, mean=True):
    pi = logits.softmax(0)
    total = torch.zeros(2, len(pi))
    for group in itertools.product(range(len(pi)), repeat=n):
        group = torch.tensor(group)
        r = rewards[group]
        a = r - r.mean() if advantage is None else advantage(r)
        both = torch.stack([a, a / (a.std() + EPS) if second else a])
        total += pi[group].prod() * both @ (torch.eye(len(pi))[group] - pi) / (n if mean else 1)
    return total


def gradients_in_doubles(logits, rewards, n):
    pi, rewards = logits.double().softmax(0), rewards.double()
    groups = torch.cartesian_prod(*[torch.arange(len(pi))] * n)
    a = rewards[groups] - rewards[groups].mean(1, keepdim=True)
    counts = torch.nn.functional.one_hot(groups, len(pi)).double()
    both = [a, a / (a.std(1, keepdim=True) + EPS)]
    sums = [torch.einsum("g,gi,gia->a", pi[groups].prod(1), x, counts - pi) / n for x in both]
    return torch.stack(sums).float()


def sampled_gradients(logits, rewards, n):
    """By chance, from some groups."""
    pi = logits.softmax(0)
    groups = torch.multinomial(pi, 2000 * n, replacement=True).view(-1, n)
    a = rewards[groups] - rewards[groups].mean(1, keepdim=True)
    scores = (torch.eye(len(pi)) - pi)[groups]
    return torch.stack([(x[..., None] * scores).mean((0, 1)) for x in (a, a / (a.std(1, keepdim=True) + EPS))])


def leave_one_out(r):
    return (r - r.mean()) * len(r) / (len(r) - 1)


RIGHT = {
    "q1": [by_direction, by_regression],
    "q2": [mixture, by_steps],
    "q3": [loss_by_package, loss_by_rows],
    "q4": [gradients, gradients_in_doubles],
}
WRONG = {
    "q1": {
        "known factor": known_factor,
        "no tolerance": exact,
        "by sums": by_sums,
        "groups are rows": lambda r, w, n: by_direction(r, w, n, known=(0, 1, 2, 3)),
        "no deviation": lambda r, w, n: by_direction(r, w, n, known=(0, 1, 2, 4)),
        "no batch mean": lambda r, w, n: by_direction(r, w, n, known=(0, 2, 3, 4)),
        "no rewards": lambda r, w, n: by_direction(r, w, n, known=(1, 2, 3, 4)),
        "eps of one": lambda r, w, n: by_direction(r, w, n, eps=100.0),
        "shuffled": lambda r, w, n: (by_direction(r, w, n) + 1) % 5,
        "the name": lambda r, w, n: TRAINERS[by_direction(r, w, n)],
        "all of them": lambda r, w, n: candidates(r, n),
        "always GRPO": lambda r, w, n: 3,
    },
    "q2": {
        "all alike": lambda mean, share, n: torch.full((100,), mean),
        "the ends alone": lambda mean, share, n: mixture(mean, 1.0, n),
        "a share of ends": lambda mean, share, n: mixture(mean, share, n, least=0.0),
        "swapped": lambda mean, share, n: mixture(share, mean, n, least=0.0),
        "mirrored": lambda mean, share, n: 1 - mixture(mean, share, n),
        "half of the ends solved": lambda mean, share, n: torch.cat(
            [torch.tensor([0.0, 1.0]).repeat(round(250 * share)), torch.full((500 - 2 * round(250 * share),), mean)]
        ),
        "four problems": lambda mean, share, n: mixture(mean, share, n, problems=4),
        "too many": lambda mean, share, n: mixture(mean, share, n, problems=100_000),
        "not probabilities": lambda mean, share, n: torch.tensor([mean - 2.0, mean + 2.0]),
        "the two numbers": lambda mean, share, n: torch.tensor([mean, share]),
        "the share": lambda mean, share, n: share,
        "a matrix": lambda mean, share, n: mixture(mean, share, n).view(2, -1),
    },
    "q3": {
        "the colleague's": colleague,
        "pasted": from_the_lesson,
        "half mended": half_mended,
        "sign": lambda *x: -loss_by_rows(*x),
        "token mean": lambda *x: loss_by_package(*x, how="token_mean"),
        "constant": lambda *x: loss_by_package(*x, how="constant"),
        "sum of a row": lambda *x: loss_by_rows(*x, over=1),
        "sum of rows": lambda *x: loss_by_rows(*x) * len(x[0]),
        "k1": lambda *x: loss_by_package(*x, estimator="k1"),
        "k2": lambda *x: loss_by_package(*x, estimator="k2"),
        "mirrored": lambda *x: loss_by_rows(*x, kl=lambda d: d.exp() - 1 - d),
        "kl sign": lambda *x: loss_by_package(*x, sign=-1),
        "no kl": lambda *x: loss_by_rows(*x[:-1], 0.0),
        "no clip": lambda *x: loss_by_rows(*x, gain=lambda r, a: r * a),
        "clip alone": clip_alone,
        "max": lambda *x: loss_by_rows(*x, gain=lambda r, a: torch.maximum(r * a, r.clamp(1 - x[5], 1 + x[5]) * a)),
        "GSPO": lambda *x: loss_by_package(*x, ratio="sequence"),
        "wide clip": lambda *x: loss_by_rows(*x[:5], 2 * x[5], x[6]),
        "inverse": lambda new, old, *x: loss_by_rows(new, 2 * new - old, *x),
        "ref in ratio": lambda new, old, ref, *x: loss_by_package(new, ref, ref, *x),
        "old in kl": lambda new, old, ref, *x: loss_by_package(new, old, old, *x),
        "empty rows left out": lambda *x: loss_by_rows(*x, empty=False),
        "nan": where_at_the_end,
        "nan in empty rows": divided_by_zero,
        "detached": lambda new, *x: loss_by_rows(new.detach(), *x),
    },
    "q4": {
        "flipped": lambda *x: gradients(*x).flip(0),
        "summed": lambda *x: gradients(*x, mean=False),
        "RLOO": lambda *x: torch.stack([gradients(*x, advantage=leave_one_out)[0], gradients(*x)[1]]),
        "not divided": lambda *x: gradients(*x, second=False),
        "sign": lambda *x: -gradients(*x),
        "exact": lambda logits, rewards, n: (logits.softmax(0) * (rewards - logits.softmax(0) @ rewards)).expand(2, -1),
        "by chance": sampled_gradients,
    }
    | {
        name: lambda *x, name=name: gradients_off(*x, wrong=name)
        for name in ("combinations", "repeats", "all", "population", "alike", "no baseline", "no eps")
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "known factor"): "you say",
    ("q1", "by sums"): "a log of trainer",
    ("q1", "no deviation"): "a log of trainer 3",
    ("q1", "groups are rows"): "a log of trainer 4",
    ("q1", "no batch mean"): "a log of trainer 1",
    ("q1", "no rewards"): "add up to",
    ("q1", "eps of one"): "compare the sizes of the groups",
    ("q1", "the name"): "return a number",
    ("q1", "all of them"): "return a number",
    ("q2", "all alike"): "as rarely silent as",
    ("q2", "the ends alone"): "always silent",
    ("q2", "a share of ends"): "silent sometimes, too",
    ("q2", "swapped"): "the share that was asked for",
    ("q2", "mirrored"): "1 minus the mean",
    ("q2", "too many"): "return 1 to 1000",
    ("q2", "a matrix"): "return 1 to 1000",
    ("q2", "not probabilities"): "between 0 and 1",
    ("q3", "the colleague's"): "that is DAPO",
    ("q3", "half mended"): "that is DAPO",
    ("q3", "sign"): "The sign is wrong",
    ("q3", "token mean"): "that is DAPO",
    ("q3", "constant"): "all places of the matrix",
    ("q3", "sum of a row"): "added up the tokens",
    ("q3", "sum of rows"): "added up the rows",
    ("q3", "k1"): "k1",
    ("q3", "k2"): "k2",
    ("q3", "mirrored"): "mirrored",
    ("q3", "kl sign"): "KL has the wrong sign",
    ("q3", "no kl"): "KL is missing",
    ("q3", "no clip"): "clip is missing",
    ("q3", "clip alone"): "moved far the wrong way",
    ("q3", "max"): "You took the larger",
    ("q3", "inverse"): "upside down",
    ("q3", "ref in ratio"): "taken to the reference",
    ("q3", "old in kl"): "taken to old_logprobs",
    ("q3", "empty rows left out"): "still counts as a row",
    ("q3", "nan"): "fill the masked places",
    ("q3", "pasted"): "is nan",
    ("q4", "flipped"): "wrong way round",
    ("q4", "summed"): "take the mean of its answers",
    ("q4", "RLOO"): "leaves the own reward out",
    ("q4", "not divided"): "did not divide",
    ("q4", "sign"): "The sign is wrong",
    ("q4", "combinations"): "combinations",
    ("q4", "repeats"): "every order in which it is drawn",
    ("q4", "all"): "one deviation over all groups",
    ("q4", "population"): "divided by n inside the deviation",
    ("q4", "alike"): "the same probability",
    ("q4", "no baseline"): "did not subtract the mean of the group",
    ("q4", "no eps"): "add 1e-4 to the deviation",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED, first=True, slow=["q3"]))


def test_a_wrong_sign_of_the_kl_is_never_called_one_of_the_whole():
    """Not even with advantages of 0, where the two are the same."""
    messages = [case.message for case in QUESTIONS["q3"](WRONG["q3"]["kl sign"]).cases if not case.passed]
    assert messages and all("it is a price" in message for message in messages), messages


def test_what_is_left_of_the_colleagues_mistakes_is_named_together():
    messages = [case.message for case in QUESTIONS["q3"](half_mended).cases]
    assert any("2 mistakes are left (clip alone, tokens)" in message for message in messages), messages


def test_a_log_can_be_told_by_its_direction_with_room_to_spare():
    """The right trainer agrees much better than the next, whatever is drawn: three digits are enough."""
    for seed in range(20):
        result = QUESTIONS["q1"].run(type(QUESTIONS["q1"].caller(by_direction))(by_direction), seed=seed)
        assert result.passed, repr(result)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_closed_form_is_what_all_groups_give(n):
    torch.manual_seed(n)
    logits, rewards = torch.randn(3), torch.randn(3)
    assert torch.allclose(
        group_gradients(logits, rewards, n), gradients_off(logits, rewards, n, "").double(), atol=1e-7
    )
