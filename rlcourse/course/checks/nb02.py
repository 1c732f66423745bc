"""Checks of the exercises of lesson 02: GAE, the clipped loss, KL estimators, KL in the reward, the value loss."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

DIVIDED = "You divided by all places: take the mean over the real tokens."
UNMASKED = "The mask is not used: padding counts."
BY_ROW = "You took the mean over each row first: take one mean over all real tokens."


def sample_mask(rows: int, length: int) -> Tensor:
    """A mask with a completion of one token, a full one, and others in between: bool [rows, length]."""
    lengths = torch.randint(2, length, (rows,))
    lengths[0], lengths[-1] = 1, length
    return torch.arange(length) < lengths[:, None]


def junk(tensor: Tensor, mask: Tensor, value: float = 5.0) -> Tensor:
    """The tensor with `value` in its padding, where nothing may look."""
    return tensor.masked_fill(~mask, value)


def compare_finite(found, expected: Tensor) -> None:
    """`compare`, and a sentence of its own for nan that came from the padding."""
    if found is not None and torch.as_tensor(found).isnan().any():
        raise AssertionError("nan: 0 * nan and inf - inf are nan, so fill the padding before you compute.")
    compare(found, expected)


q1 = Question("q1", "gae", hint="From the last token backwards: delta_t plus gamma * lam times what you carry.")


def gae_sums(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, carry: float | None = None):
    """GAE as a double sum over the real tokens: [rows, length]. carry: the factor in place of gamma * lam."""
    carry = gamma * lam if carry is None else carry
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        n = int(mask[row].sum())
        r, v = rewards[row].double().tolist(), [*values[row, :n].double().tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            found[row, t] = sum(carry ** (k - t) * deltas[k] for k in range(t, n))
    return found


def gae_mistakes(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> dict[str, Tensor]:
    """What usual mistakes give: [rows, length]."""
    right, every = gae_sums(rewards, values, mask, gamma, lam), torch.ones_like(mask)
    flat = gae_sums(rewards, values, mask, 1.0, lam, carry=gamma * lam)
    deltas = rewards + gamma * torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1) - values
    padded = gae_sums(deltas, torch.zeros_like(values), mask, 1.0, gamma * lam)
    forward = gae_sums(deltas.flip(1), torch.zeros_like(values), every, 1.0, gamma * lam).flip(1)
    return {
        "You returned advantages plus values: these are the returns.": right + values.masked_fill(~mask, 0.0),
        "You used the value in the padding: after the last real token the value is 0.": padded,
        "The padding has advantages: they must be 0 where mask is False.": gae_sums(rewards, values, every, gamma, lam),
        "You ran forwards: an advantage holds what comes later, so start at the end.": forward,
        "The sign of the values is wrong: r_t + gamma V_{t+1} - V_t.": gae_sums(rewards, -values, mask, gamma, lam),
        "The TD error lacks its gamma: r_t + gamma V_{t+1} - V_t.": flat,
        "These are the TD errors alone: carry the advantage.": gae_sums(rewards, values, mask, gamma, 0.0),
        "You carried it with lam alone, not gamma * lam.": gae_sums(rewards, values, mask, gamma, lam, carry=lam),
        "lam is not used: you carried it with gamma alone.": gae_sums(rewards, values, mask, gamma, 1.0),
    }


def check_gae(f, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> None:
    expected = gae_sums(rewards, values, mask, gamma, lam)
    compare(f(rewards, values, mask, gamma, lam), expected, gae_mistakes(rewards, values, mask, gamma, lam))


@q1.case("completions of one token, of some, and of full length; then lam = 0 and lam = 1")
def _(f):
    mask = sample_mask(5, 6)
    rewards, values = junk(torch.randn(5, 6), mask), junk(torch.randn(5, 6), mask)
    for gamma, lam in ((0.9, 0.7), (1.0, 0.0), (1.0, 1.0)):
        check_gae(f, rewards, values, mask, gamma, lam)


@q1.case("an empty completion, and a batch of one token")
def _(f):
    mask = torch.tensor([[False, False, False], [True, True, False]])
    check_gae(f, junk(torch.randn(2, 3), mask), junk(torch.randn(2, 3), mask), mask, 0.9, 0.5)
    check_gae(f, torch.randn(1, 1), torch.randn(1, 1), torch.ones(1, 1, dtype=torch.bool), 0.9, 0.5)


@q1.case("nan in the padding does no harm")
def _(f):
    mask = sample_mask(3, 4)
    rewards, values = torch.randn(3, 4), torch.randn(3, 4)
    found = f(junk(rewards, mask, torch.nan), junk(values, mask, torch.nan), mask, 0.9, 0.7)
    compare_finite(found, gae_sums(rewards, values, mask, 0.9, 0.7))


q2 = Question("q2", "clipped_loss", hint="ratio = exp(new - old); minus the smaller of ratio A and clipped ratio A.")


def clipped_by_hand(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float):
    """Loss and its gradient in the log-probs, token by token: scalar and [rows, length], float64."""
    total, gradient, count = 0.0, torch.zeros(mask.shape, dtype=torch.float64), int(mask.sum())
    for i, t in mask.nonzero().tolist():
        a, r = advantages[i, t].item(), (new[i, t].double() - old[i, t].double()).exp().item()
        cut = r > 1 + high if a > 0 else r < 1 - low
        total -= a * ((1 + high if a > 0 else 1 - low) if cut else r) / count
        gradient[i, t] = 0.0 if cut else -a * r / count
    return torch.tensor(total, dtype=torch.float64), gradient


def clip_mistakes(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> dict:
    """Losses of usual mistakes: scalars."""
    log, a = new.double() - old.double(), advantages.double()
    limited = log.exp().clamp(1 - low, 1 + high) * a

    def smaller(r: Tensor, low: float = low, high: float = high) -> Tensor:
        return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)

    right = smaller(log.exp())
    wrong = {
        "The sign is wrong: optimizers minimise.": -right,
        "You took the larger of the two: the smaller, and then the minus.": torch.maximum(log.exp() * a, limited),
        "You left the minimum out: a ratio far off on the wrong side is never called back.": limited,
        "Nothing is clipped.": log.exp() * a,
        "The ratio is upside down: exp(logprobs - old_logprobs).": smaller((-log).exp()),
        "You used the difference of the log-probs as the ratio: take its exponential.": smaller(log),
        "clip_low and clip_high are swapped: 1 - clip_low to 1 + clip_high.": smaller(log.exp(), high, low),
    }
    wrong = {sentence: -values[mask].mean() for sentence, values in wrong.items()}
    rows = torch.stack([right[i][mask[i]].mean() for i in range(len(mask))])
    return wrong | {DIVIDED: -right[mask].sum() / mask.numel(), UNMASKED: -right.mean(), BY_ROW: -rows.mean()}


def sample_step(rows: int, length: int, spread: float = 0.4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probs, advantages, mask, with junk in the padding."""
    mask = sample_mask(rows, length)
    old = -torch.rand(rows, length) - 0.5
    new = old + spread * torch.randn(rows, length)
    return junk(new, mask, -0.3), junk(old, mask, -2.0), junk(torch.randn(rows, length), mask, 3.0), mask


@q2.case("its value and its gradient, also with a wider range above than below")
def _(f):
    for low, high in ((0.1, 0.4), (0.2, 0.2)):
        step = sample_step(6, 7)
        expected, gradient = clipped_by_hand(*step, low, high)
        compare(f(*step, low, high), expected, clip_mistakes(*step, low, high), what="the loss")
        compare(f.gradient(*step, low, high, wrt=0), gradient, what="the gradient")


@q2.case("the four corners: A above and below 0, ratio far up and far down")
def _(f):
    new, old = torch.tensor([[0.7, -0.7, 0.7, -0.7]]) * (1 + torch.rand(4)), torch.zeros(1, 4)
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4, dtype=torch.bool)
    for t in range(4):
        step = [x[:, t : t + 1] for x in (new, old, advantages, mask)]
        mistakes = clip_mistakes(*step, 0.2, 0.3)
        compare(f(*step, 0.2, 0.3), clipped_by_hand(*step, 0.2, 0.3)[0], mistakes, what="the loss")


@q2.case("-inf in the padding does no harm")
def _(f):
    new, old, advantages, mask = sample_step(4, 5)
    value, gradient = clipped_by_hand(new, old, advantages, mask, 0.2, 0.2)
    step = (junk(new, mask, -torch.inf), junk(old, mask, -torch.inf), advantages, mask, 0.2, 0.2)
    compare_finite(f(*step), value)
    compare_finite(f.gradient(*step, wrt=0), gradient)


q3 = Question("q3", "kl_estimators", hint="With d = logprobs - ref_logprobs: d, d squared over 2, exp(-d) - 1 + d.")


def estimators(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1, k2, k3 from the ratio of the probabilities, float64: [3, tokens]."""
    ratio = ref_logprobs.double().exp() / logprobs.double().exp()
    return torch.stack([-ratio.log(), ratio.log() ** 2 / 2, ratio - 1 - ratio.log()])


def kl_mistakes(logprobs: Tensor, ref_logprobs: Tensor) -> dict[str, Tensor]:
    """What usual mistakes give: [3, tokens]."""
    right, other = estimators(logprobs, ref_logprobs), estimators(ref_logprobs, logprobs)
    k1, k2, k3 = right
    return {
        "You swapped policy and reference: d is logprobs - ref_logprobs.": other,
        "The sign of k1 is wrong: logprobs - ref_logprobs.": torch.stack([other[0], k2, k3]),
        "k2 lacks its half.": torch.stack([k1, 2 * k2, k3]),
        "The ratio in k3 is upside down: it is exp(ref_logprobs - logprobs).": torch.stack([k1, k2, other[2]]),
        "k3 is exp(-d) - 1 plus d: the sign of the last term is wrong.": torch.stack([k1, k2, k3 - 2 * k1]),
        "k3 lacks its - 1.": torch.stack([k1, k2, k3 + 1]),
        "k1 may be negative: leave its sign alone.": torch.stack([k1.abs(), k2, k3]),
        "k1 may be negative: do not cut it off at 0.": torch.stack([k1.clamp(min=0), k2, k3]),
        "Give a number for each token: take no mean.": right.mean(1),
        "The rows are tokens: give [3, tokens].": right.T,
    }


def check_estimators(f, logprobs: Tensor, ref_logprobs: Tensor) -> None:
    compare(f(logprobs, ref_logprobs), estimators(logprobs, ref_logprobs), kl_mistakes(logprobs, ref_logprobs))


@q3.case("random log-probs")
def _(f):
    check_estimators(f, -2 * torch.rand(8), -2 * torch.rand(8))


@q3.case("one token, policies that agree, and a token that the reference finds far less probable")
def _(f):
    check_estimators(f, torch.tensor([-0.3]), -0.9 - torch.rand(1))
    apart = torch.cat([-8.0 - torch.rand(1), torch.tensor([-1.0])])
    check_estimators(f, torch.tensor([-0.1, -1.0]), apart)


@q3.case("their gradients in the log-probs: 1, d and 1 - exp(-d)")
def _(f):
    logprobs, ref_logprobs = -torch.rand(5), -torch.rand(5)
    d = logprobs - ref_logprobs
    compare(f.gradient(logprobs, ref_logprobs, wrt=0), 1 + d + 1 - (-d).exp(), what="the gradient of their sum")


q4 = Question("q4", "rewards_with_kl", hint="-beta (logprobs - ref_logprobs) on real tokens; the reward on the last.")


def rewards_by_hand(rewards: Tensor, new: Tensor, ref: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Token rewards by a loop: [rows, length]."""
    found = torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        found[i, t] = -beta * (new[i, t] - ref[i, t])
        if t == int(mask[i].sum()) - 1:
            found[i, t] += rewards[i]
    return found


def reward_mistakes(rewards: Tensor, new: Tensor, ref: Tensor, mask: Tensor, beta: float) -> dict[str, Tensor]:
    """What usual mistakes give: [rows, length]."""
    penalty = rewards_by_hand(torch.zeros_like(rewards), new, ref, mask, beta)
    final = rewards_by_hand(rewards, new, ref, mask, beta) - penalty
    column = torch.zeros_like(penalty)
    column[:, -1] = rewards
    at_the_end = rewards_by_hand(rewards + penalty.sum(1), new, new, mask, 0.0)
    return {
        "The sign of the KL is wrong: moving away from the reference must cost.": final - penalty,
        "The reward stands in the last column: it belongs on the last real token of its row.": column + penalty,
        "Each token got the whole reward: it belongs on the last real token alone.": rewards[:, None] * mask + penalty,
        "There is a penalty in the padding.": final - beta * (new - ref),
        "The reward replaced the penalty of the last token: add the two.": final + penalty.masked_fill(final != 0, 0.0),
        "You took the whole penalty off at the end: each token pays its own.": at_the_end,
        "beta is not used.": final + penalty / (beta or 1.0),
        "The penalty may be negative: take the difference as it is, without abs or clamp.": final - penalty.abs(),
        "The reward is missing.": penalty,
        "The penalty is missing.": final,
    }


def check_rewards(f, rewards: Tensor, new: Tensor, ref: Tensor, mask: Tensor, beta: float) -> None:
    expected = rewards_by_hand(rewards, new, ref, mask, beta)
    compare(f(rewards, new, ref, mask, beta), expected, reward_mistakes(rewards, new, ref, mask, beta))


@q4.case("completions of different lengths; with beta = 0 the reward alone")
def _(f):
    for beta in (0.3, 0.05, 0.0):
        mask = sample_mask(5, 6)
        check_rewards(f, torch.rand(5) + 0.5, -torch.rand(5, 6), -torch.rand(5, 6) - 0.2, mask, beta)


@q4.case("an empty completion gets nothing")
def _(f):
    mask = torch.tensor([[False, False], [True, False], [True, True]])
    check_rewards(f, torch.ones(3), -torch.rand(3, 2), -torch.rand(3, 2), mask, 0.2)


@q4.case("-inf in the padding does no harm")
def _(f):
    mask, rewards, new, ref = sample_mask(3, 4), torch.rand(3), -torch.rand(3, 4), -torch.rand(3, 4)
    found = f(rewards, junk(new, mask, -torch.inf), junk(ref, mask, -torch.inf), mask, 0.2)
    compare_finite(found, rewards_by_hand(rewards, new, ref, mask, 0.2))


q5 = Question("q5", "value_loss", hint="Half the larger of two squared errors, one of a value kept near the old one.")


def value_by_hand(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, pick=max) -> Tensor:
    """The value loss by a loop; `pick` chooses among the error and the clipped error: scalar."""
    errors = []
    for i, t in mask.nonzero().tolist():
        v, o, r = (x[i, t].item() for x in (values, old, returns))
        near = min(max(v, o - clip), o + clip)
        errors.append(0.5 * pick((v - r) ** 2, (near - r) ** 2))
    return torch.tensor(sum(errors) / len(errors))


def value_mistakes(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> dict[str, Tensor]:
    """Losses of usual mistakes: scalars."""
    given = (values, old, returns, mask, clip)
    right, every = value_by_hand(*given), torch.ones_like(mask)
    absolute = torch.maximum((values - returns) ** 2, (values.clamp(-clip, clip) - returns) ** 2)[mask].mean() / 2
    return {
        "You took the smaller error: take the larger.": value_by_hand(*given, min),
        "Nothing is clipped.": value_by_hand(*given, lambda plain, near: plain),
        "You used the clipped error alone: take the larger.": value_by_hand(*given, lambda plain, near: near),
        "The half is missing.": 2 * right,
        "You clipped the value itself: clip how far it moved from old_values.": absolute,
        UNMASKED: value_by_hand(values, old, returns, every, clip),
        DIVIDED: right * mask.sum() / mask.numel(),
    }


@q5.case("its value")
def _(f):
    for clip in (0.2, 0.5):
        step = sample_step(6, 7)
        compare(f(*step, clip), value_by_hand(*step, clip), value_mistakes(*step, clip), what="the loss")


@q5.case("a value that moved too far towards its return, and one that moved away")
def _(f):
    mask = torch.ones(1, 1, dtype=torch.bool)
    for value in (0.9 - 0.2 * torch.rand(()).item(), -0.9 + 0.2 * torch.rand(()).item()):
        step = (torch.tensor([[value]]), torch.zeros(1, 1), torch.ones(1, 1), mask)
        compare(f(*step, 0.2), value_by_hand(*step, 0.2), value_mistakes(*step, 0.2), what="the loss")


@q5.case("its gradient: none for a value that is beyond the clip and nearer to its return")
def _(f):
    values, old, returns, mask = sample_step(5, 6)
    near = old + (values - old).clamp(-0.2, 0.2)
    active = (values - returns).abs() >= (near - returns).abs()
    expected = torch.where(active & mask, (values - returns) / mask.sum(), 0.0)
    compare(f.gradient(values, old, returns, mask, 0.2, wrt=0), expected, what="the gradient")


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5}
