"""Checks of the exercises of lesson 01: log-prob of an answer, REINFORCE loss, its moments, leave-one-out."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

EOS = 2

q1 = Question("q1", "sequence_logprobs", hint="log_softmax, gather the tokens that are there, sum up to the first end.")


def answer_logprobs(logits: Tensor, ids: Tensor, eos_id: int) -> Tensor:
    """Log-prob of each answer by a loop over its tokens: [rows], float64."""
    sums = []
    for row, tokens in enumerate(ids.tolist()):
        length = tokens.index(eos_id) + 1 if eos_id in tokens else len(tokens)
        chosen = [logits[row, t, tokens[t]].double() - logits[row, t].double().logsumexp(0) for t in range(length)]
        sums.append(sum(chosen))
    return torch.stack(sums)


def logprob_mistakes(logits: Tensor, ids: Tensor, eos_id: int) -> dict[str, Tensor]:
    """What usual mistakes give: [rows]."""
    token = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    is_eos = ids == eos_id
    seen = is_eos.cumsum(1)
    mask = seen - is_eos.long() == 0
    raw = logits.double().gather(-1, ids[..., None])[..., 0]
    early = torch.cat([logits.new_zeros(len(ids), 1).double(), _predicted_next(logits, ids)], dim=1)
    return {
        "You left the end token out: to stop is a decision of the policy, too.": (token * (seen == 0)).sum(1),
        "You let tokens behind the end count.": token.sum(1),
        "Your mask leaves out every end token and lets what is behind count.": (token * ~is_eos).sum(1),
        "You took the mean over tokens: the log-prob of an answer is the sum.": (token * mask).sum(1) / mask.sum(1),
        "You added up probabilities: take their logarithms.": (token.exp() * mask).sum(1),
        "You added up logits: they are no log-probs before log_softmax.": (raw * mask).sum(1),
        "You shifted by one, but logits[:, t] predict ids[:, t] already.": (early * mask).sum(1),
        "You took the most probable token, not the one that is there.": (
            logits.double().log_softmax(-1).amax(-1) * mask
        ).sum(1),
    }


def _predicted_next(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of ids[:, 1:] under logits[:, :-1]."""
    return logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def check_logprobs(f, logits: Tensor, ids: Tensor) -> None:
    expected = answer_logprobs(logits, ids, EOS)
    compare(f(logits, ids, EOS), expected, logprob_mistakes(logits, ids, EOS), atol=1e-4)


@q1.case("answers that end, and padding behind them")
def _(f):
    ids = torch.randint(3, 9, (5, 7))
    ids[range(5), [1, 2, 3, 4, 5]] = EOS
    check_logprobs(f, torch.randn(5, 7, 9), ids)


@q1.case("no end token: every place counts")
def _(f):
    check_logprobs(f, torch.randn(3, 6, 9), torch.randint(3, 9, (3, 6)))


@q1.case("the end token at once, and one row of one token")
def _(f):
    ids = torch.randint(3, 9, (2, 5))
    ids[:, 0] = EOS
    check_logprobs(f, torch.randn(2, 5, 9), ids)
    check_logprobs(f, torch.randn(1, 1, 9), torch.tensor([[EOS]]))


@q1.case("the end token again behind the end, as padding")
def _(f):
    ids = torch.randint(3, 9, (3, 6))
    ids[0, 2:] = EOS
    ids[1, 1], ids[1, 4] = EOS, EOS
    check_logprobs(f, torch.randn(3, 6, 9), ids)


@q1.case("tokens behind the end get no gradient")
def _(f):
    logits, ids = torch.randn(2, 5, 9), torch.randint(3, 9, (2, 5))
    ids[0, 2] = EOS
    found = f.gradient(logits, ids, EOS, wrt=0)
    onehot = torch.nn.functional.one_hot(ids, 9).float()
    expected = onehot - logits.softmax(-1)  # of log_softmax at the token that is there
    expected[0, 3:] = 0
    behind = "Tokens behind the end get a gradient: nobody chose them."
    compare(found, expected, {behind: onehot - logits.softmax(-1)}, what="the gradient")


@q1.case("very improbable tokens")
def _(f):
    logits = torch.zeros(1, 2, 9)
    logits[0, 0, 4] = 300.0
    check_logprobs(f, logits, torch.tensor([[3, EOS]]))


q2 = Question("q2", "reinforce_loss", hint="One sum a row over its real tokens, weighed with reward less baseline.")


def loss_gradient(mask: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """The gradient of the loss in the log-probs: -(R - b) / rows on real tokens. [rows, length]"""
    expected = torch.zeros(mask.shape)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                expected[i, t] = -(rewards[i].item() - baseline) / mask.shape[0]
    return expected


def loss_mistakes(mask: Tensor, rewards: Tensor, baseline: float) -> dict[str, Tensor]:
    """Gradients of usual mistakes: [rows, length]."""
    right, rows = loss_gradient(mask, rewards, baseline), mask.shape[0]
    lengths = mask.sum(1, keepdim=True)
    advantage = (rewards - baseline)[:, None]
    divided = "You divided each row by its length: the log-prob of an answer is the sum over its tokens."
    return {
        "The sign is wrong: optimizers minimise, and right answers must become more probable.": -right,
        divided: right / lengths,
        "You took the mean over all tokens: take the sum over tokens, then the mean over rows.": right
        * rows
        / mask.sum(),
        "You added up the rows: take their mean.": right * rows,
        "The mask is not used: tokens behind the end get a gradient.": (-advantage / rows).expand(mask.shape),
        "The baseline is not taken off.": loss_gradient(mask, rewards, 0.0),
        "You added the baseline: take it off.": loss_gradient(mask, rewards, -baseline),
    }


def sample_batch(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, a mask with answers of different lengths, rewards."""
    lengths = torch.randint(1, length, (rows,))
    lengths[0], lengths[1] = 1, length
    mask = torch.arange(length) < lengths[:, None]
    rewards = torch.rand(rows) + torch.tensor([1.0, *[0.0] * (rows - 1)])
    return -torch.rand(rows, length) - 0.1, mask, rewards


@q2.case("its gradient is minus the estimate")
def _(f):
    for baseline in (0.3, 0.0, -1.5):
        logprobs, mask, rewards = sample_batch(5, 6)
        found = f.gradient(logprobs, mask, rewards, baseline, wrt=0)
        mistakes = loss_mistakes(mask, rewards, baseline)
        compare(found, loss_gradient(mask, rewards, baseline), mistakes, what="the gradient")


@q2.case("its value")
def _(f):
    logprobs, mask, rewards = sample_batch(4, 5)
    expected = (logprobs * loss_gradient(mask, rewards, 0.4)).sum()
    wrong = {k: (logprobs * v).sum() for k, v in loss_mistakes(mask, rewards, 0.4).items()}
    compare(f(logprobs, mask, rewards, 0.4), expected, wrong, what="the loss")


@q2.case("a reward equal to the baseline teaches nothing")
def _(f):
    logprobs, mask, _ = sample_batch(3, 4)
    found = f.gradient(logprobs, mask, torch.full((3,), 0.5), 0.5, wrt=0)
    compare(found, torch.zeros(3, 4), what="the gradient")


@q2.case("-inf behind the end does no harm")
def _(f):
    logprobs, mask, rewards = sample_batch(4, 5)
    expected = loss_gradient(mask, rewards, 0.2)
    logprobs = logprobs.masked_fill(~mask, -torch.inf)
    value = (logprobs.masked_fill(~mask, 0.0) * expected).sum()
    for found, right in (
        (f(logprobs, mask, rewards, 0.2), value),
        (f.gradient(logprobs, mask, rewards, 0.2), expected),
    ):
        if found is not None and torch.as_tensor(found).isnan().any():
            raise AssertionError("The result is nan: 0 * -inf is nan, so fill the masked places before you multiply.")
        compare(found, right, what="the loss or its gradient")


q3 = Question("q3", "estimator_moments", hint="A table of the estimates of all actions; then means weighed with pi.")


def moments(logits: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """Mean and variance of the estimate from moments: E[g] and E[g^2] - E[g]^2 by loops, float64. [2, actions]"""
    pi = (logits.double() - logits.double().logsumexp(0)).exp()
    first, second = torch.zeros_like(pi), torch.zeros_like(pi)
    for a in range(len(pi)):
        for j in range(len(pi)):
            g = (rewards[a].double() - baseline) * (float(a == j) - pi[j])
            first[j] += pi[a] * g
            second[j] += pi[a] * g * g
    return torch.stack([first, second - first**2])


def moments_mistakes(logits: Tensor, rewards: Tensor, baseline: float) -> dict[str, Tensor]:
    """What usual mistakes give: [2, actions]."""
    right = moments(logits, rewards, baseline)
    pi, count = logits.double().softmax(0), len(logits)
    advantage = (rewards.double() - baseline)[:, None]
    table = advantage * (torch.eye(count, dtype=torch.float64) - pi)
    no_pi = advantage * torch.eye(count, dtype=torch.float64)
    unnormalised = "The scores lack the - pi_j: the derivative of log softmax is [a = j] - pi_j."
    weighed = "You weighed all actions alike: action a comes with probability pi_a."
    return {
        "The second row is the mean of the squares: take the square of the mean off.": torch.stack(
            [right[0], right[1] + right[0] ** 2]
        ),
        "The second row is the standard deviation: its square was asked for.": torch.stack(
            [right[0], right[1].clamp(min=0).sqrt()]
        ),
        "The rows are the wrong way round: first the mean, then the variance.": right.flip(0),
        weighed: torch.stack([table.mean(0), table.var(0, correction=0)]),
        weighed + " ": torch.stack([table.mean(0), table.var(0)]),
        unnormalised: _weighted_moments(pi, no_pi),
        "The baseline is not taken off.": moments(logits, rewards, 0.0),
        "You gave the transpose of the table its weights: rows are actions.": _weighted_moments(pi, table.T),
    }


def _weighted_moments(pi: Tensor, table: Tensor) -> Tensor:
    mean = (pi[:, None] * table).sum(0)
    return torch.stack([mean, (pi[:, None] * (table - mean) ** 2).sum(0)])


def check_moments(f, logits: Tensor, rewards: Tensor, baseline: float) -> None:
    compare(
        f(logits, rewards, baseline), moments(logits, rewards, baseline), moments_mistakes(logits, rewards, baseline)
    )


@q3.case("random policies, rewards and baselines")
def _(f):
    for actions in (2, 3, 6):
        check_moments(f, torch.randn(actions), torch.rand(actions) + 0.2, 0.35)


@q3.case("rewards 0 and 1 without a baseline")
def _(f):
    check_moments(f, torch.tensor([0.5, -1.0, 0.2]), torch.tensor([0.0, 1.0, 0.0]), 0.0)


@q3.case("baselines below, among and above the rewards: the mean is the same")
def _(f):
    logits, rewards = torch.randn(4), torch.rand(4)
    for baseline in (-1.0, 0.5, 2.0):
        check_moments(f, logits, rewards, baseline)


@q3.case("a policy without doubt, and rewards all alike")
def _(f):
    check_moments(f, torch.tensor([80.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]), 0.5)
    check_moments(f, torch.randn(3), torch.full((3,), 0.7), 0.7)


q4 = Question("q4", "leave_one_out", hint="Groups as rows of a matrix; the others are the sum of all less one's own.")


def others_off(rewards: Tensor, num_generations: int) -> Tensor:
    """Each reward less the mean of the others of its group, by a loop: [rows], float64."""
    found = []
    for i in range(len(rewards)):
        start = i // num_generations * num_generations
        others = [rewards[j].item() for j in range(start, start + num_generations) if j != i]
        found.append(rewards[i].item() - sum(others) / len(others))
    return torch.tensor(found, dtype=torch.float64)


def advantage_mistakes(rewards: Tensor, n: int) -> dict[str, Tensor]:
    """What usual mistakes give: [rows]."""
    groups = rewards.double().view(-1, n)
    centered = groups - groups.mean(1, keepdim=True)
    total = groups.sum(1, keepdim=True)
    strided = rewards.double().view(n, -1)
    strided = strided - (strided.sum(0) - strided) / (n - 1)
    deviation = groups.std(1, keepdim=True) + 1e-4
    normalised = "You divided by the standard deviation of the group: that is GRPO."
    return {
        "Your baseline contains the row's own reward: leave it out.": centered.flatten(),
        normalised: (centered / deviation).flatten(),
        normalised + " ": ((groups - (total - groups) / (n - 1)) / deviation).flatten(),
        "You divided the sum of the others by n: there are n - 1 of them.": (groups - (total - groups) / n).flatten(),
        "You took the sum of the others: take their mean.": (groups - (total - groups)).flatten(),
        "You took the baseline over the whole batch: only the same prompt's answers count.": others_off(
            rewards, groups.numel()
        ),
        "Your groups are not the right rows: row i belongs to prompt i // num_generations.": strided.flatten(),
        "That is the baseline: take it off the reward.": ((total - groups) / (n - 1)).flatten(),
        "The sign is wrong: better than the others must be positive.": -others_off(rewards, n),
    }


def check_advantages(f, rewards: Tensor, n: int) -> None:
    compare(f(rewards, n), others_off(rewards, n), advantage_mistakes(rewards, n))


@q4.case("random rewards in groups of 2, 3 and 8")
def _(f):
    for n in (3, 2, 8):
        check_advantages(f, torch.rand(4 * n), n)


@q4.case("right and wrong: rewards 1 and 0")
def _(f):
    check_advantages(f, torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), 4)


@q4.case("one prompt alone")
def _(f):
    check_advantages(f, torch.rand(5), 5)


@q4.case("a group of equal rewards gets 0")
def _(f):
    found = f(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 3)
    compare(found, torch.zeros(6))


@q4.case("a constant added to every reward changes nothing")
def _(f):
    rewards = torch.rand(12)
    compare(f(rewards + 3, 4), others_off(rewards, 4), atol=1e-4)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4}
