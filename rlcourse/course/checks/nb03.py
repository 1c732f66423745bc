"""Checks of the exercises of lesson 03: whose log it is, a silent data set, a loss to mend, the mean of an estimate."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

EPS = 1e-4

q1 = Question("q1", "whose_log", hint="Which numbers does each trainer make of these rewards, up to a factor?")

TRAINERS = ("rewards as they are", "less the batch mean", "less the group mean", "GRPO", "GRPO on the wrong groups")


def weights_of(trainer: int, rewards: Tensor, n: int) -> Tensor:
    """What a trainer multiplies the log-probs with, by loops over groups: [rows], float64."""
    rows = rewards.double().tolist()
    if trainer == 0:
        return torch.tensor(rows, dtype=torch.float64)
    if trainer == 1:
        return torch.tensor([r - sum(rows) / len(rows) for r in rows], dtype=torch.float64)
    prompts, found = len(rows) // n, [0.0] * len(rows)
    for k in range(prompts):
        members = range(k, len(rows), prompts) if trainer == 4 else range(k * n, k * n + n)
        group = [rows[i] for i in members]
        mean = sum(group) / n
        deviation = (sum((r - mean) ** 2 for r in group) / (n - 1)) ** 0.5
        for i in members:
            found[i] = (rows[i] - mean) / (1.0 if trainer == 2 else deviation + EPS)
    return torch.tensor(found, dtype=torch.float64)


def check_log(f, rewards: Tensor, n: int, factors: tuple[float, float]) -> None:
    """Write a log of each trainer, each with its own unknown factor, and ask whose it is; in drawn order."""
    low, high = factors
    for trainer in torch.randperm(len(TRAINERS)).tolist():
        factor = low * (high / low) ** torch.rand(()).item()
        exact = factor * weights_of(trainer, rewards, n)
        step = 10.0 ** torch.floor(torch.log10(exact.abs().max()) - 2)  # three digits of the largest
        log = ((exact / step).round() * step).float()
        found = f(rewards, log, n)
        if found is None:
            raise AssertionError("the result is None: is there a `return`?")
        try:
            number = torch.as_tensor(found)
            number = int(number) if number.numel() == 1 and number == number.round() else -1
        except (TypeError, ValueError, RuntimeError):
            number = -1
        if not 0 <= number < len(TRAINERS):
            raise AssertionError(f"the result is {found!r:.40}: return a number from 0 to {len(TRAINERS) - 1}")
        if number != trainer:
            said = f"a log of trainer {trainer} ({TRAINERS[trainer]}), you say {number} ({TRAINERS[number]})"
            raise AssertionError(f"{said}. {told_apart(trainer, number)}")


def told_apart(trainer: int, number: int) -> str:
    """A sentence on what tells two trainers apart."""
    pair = {trainer, number}
    if pair == {0, 1}:
        return "Both keep the order of all rewards; look at what the weights add up to."
    if pair <= {0, 1, 2}:
        return "Look at the sum of the weights in each group."
    if pair == {2, 3}:
        return "The weights of every group add up to 0 in both; compare the sizes of the groups."
    return "Remember that the factor is unknown and the digits are few: compare directions, and take the nearest."


@q1.case("rewards of 0 and 1")
def _(f):
    for n in (4, 8):
        counts = torch.tensor([1, n // 2, n // 2, n - 1, n, draw(0, n)])[torch.randperm(6)]  # right answers of a group
        order = torch.rand(6, n).argsort(1)
        check_log(f, (order < counts[:, None]).float().flatten(), n, (0.5, 2.0))


@q1.case("partial credit, spread differently from prompt to prompt")
def _(f):
    for prompts, n in ((3, 5), (8, 4)):
        spread = torch.linspace(0.1, 1.0, prompts)[torch.randperm(prompts), None]
        rewards = torch.rand(prompts, 1) + spread * torch.rand(prompts, n)
        check_log(f, rewards.flatten(), n, (0.5, 2.0))


@q1.case("a factor from a thousandth to a thousand")
def _(f):
    for prompts in (4, 6):
        n = draw(3, 7)
        spread = torch.linspace(0.1, 1.0, prompts)[torch.randperm(prompts), None]
        check_log(f, (torch.rand(prompts, 1) + spread * torch.rand(prompts, n)).flatten(), n, (1e-3, 1e3))


q2 = Question(
    "q2", "data_set", hint="Which problems are silent whatever the group size? And which as rarely as can be?"
)

MOST, CLOSE = 1000, 0.01


def silence(success: Tensor, n: int) -> float:
    """Expected share of silent groups, by a loop over problems."""
    found = [p**n + (1 - p) ** n for p in success.double().tolist()]
    return sum(found) / len(found)


def check_data(f, mean: float, n: int, share: float) -> None:
    found = f(mean, share, n)
    if found is None:
        raise AssertionError("the result is None: is there a `return`?")
    try:
        found = torch.as_tensor(found).double()
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"the result should be a tensor, not {type(found).__name__}") from None
    if found.dim() != 1 or not 1 <= len(found) <= MOST:
        raise AssertionError(f"the result has shape {list(found.shape)}: return 1 to {MOST} success rates")
    if not ((found >= 0) & (found <= 1)).all():
        raise AssertionError("a success rate is a probability: all must lie between 0 and 1")
    wanted = f"asked for are mean {mean:.3f} and {share:.1%} silent groups of {n}"
    got_mean, got = found.mean().item(), silence(found, n)
    if abs(got_mean - mean) > CLOSE:
        swapped = " That is the share that was asked for." if abs(got_mean - share) < CLOSE else ""
        mirrored = " That is 1 less the mean." if abs(got_mean - (1 - mean)) < CLOSE else ""
        raise AssertionError(f"your problems have a mean success rate of {got_mean:.3f}; {wanted}.{swapped}{mirrored}")
    if abs(got - share) > CLOSE:
        least = mean**n + (1 - mean) ** n
        why = ""
        if abs(got - least) < 1e-3:
            why = " Problems that are all alike are as rarely silent as a data set of this mean can be."
        elif got > 1 - 1e-3:
            why = " Problems that are always or never solved are always silent: you need others, too."
        elif abs(got - (share + (1 - share) * least)) < CLOSE:
            why = " The problems in between are silent sometimes, too: you counted only those at the ends."
        raise AssertionError(f"{got:.1%} of your groups are silent; {wanted}.{why}")


def a_mean() -> float:
    """Between 0.25 and 0.42 or between 0.58 and 0.75."""
    mean = 0.25 + 0.17 * torch.rand(()).item()
    return mean if torch.rand(()) < 0.5 else 1 - mean


def a_share(mean: float, n: int, low: float, high: float) -> float:
    """Between what is possible: a part `low` to `high` of the way from the least share to 1."""
    least = mean**n + (1 - mean) ** n
    return least + (1 - least) * (low + (high - low) * torch.rand(()).item())


@q2.case("half of the way from the fewest silent groups to all")
def _(f):
    for n in (8, 4):
        mean = a_mean()
        check_data(f, mean, n, a_share(mean, n, 0.35, 0.65))


@q2.case("pairs, where even the middle is often silent")
def _(f):
    for _ in range(2):
        mean = a_mean()
        check_data(f, mean, 2, a_share(mean, 2, 0.3, 0.7))


@q2.case("nearly all groups silent, and few of them")
def _(f):
    for low, high in ((0.9, 0.96), (0.08, 0.15)):
        mean = a_mean()
        check_data(f, mean, 8, a_share(mean, 8, low, high))


q3 = Question("q3", "mended_loss", hint="Begin with the nan: what stands behind the end of an answer?")


def loss_off(logprobs, old, ref, advantages, mask, clip, beta, wrong: str = "") -> Tensor:
    """The GRPO loss in float64, a differentiable scalar, without what is masked; with mistakes, named "one+another"."""
    rows, tokens, names = [], 0, wrong.split("+")

    def chosen(options: dict, right):
        return next((options[name] for name in names if name in options), right)

    for i in range(mask.shape[0]):
        keep = mask[i]
        new, was, start = logprobs[i][keep].double(), old[i][keep].double(), ref[i][keep].double()
        a = advantages[i].double()
        apart = new - chosen({"ref in ratio": start}, was)
        apart = chosen({"inverse": -apart, "one": new - new.detach(), "sequence": apart.sum()}, apart)
        ratio = chosen({"log": apart}, apart.exp())
        free, near = ratio * a, ratio.clamp(1 - clip, 1 + clip) * a
        gain = torch.minimum(free, near)
        gain = chosen({"no clip": free, "clip alone": near, "max": torch.maximum(free, near)}, gain)
        d = new - chosen({"old in kl": was}, start)
        kl = (-d).exp() - 1 + d
        options = {"k1": d, "k2": d**2 / 2, "mirrored": d.exp() - 1 - d, "kl sign": -kl, "no kl": 0 * kl}
        by_token = (beta * chosen(options, kl) - gain) * torch.ones_like(new)
        whole = by_token.sum()
        rows.append(chosen({"tokens": whole, "sum": whole, "constant": whole}, whole / max(1, len(new))))
        tokens += len(new)
    counts = {"tokens": tokens, "rows added": 1, "real rows": int(mask.any(1).sum()), "constant": mask.numel()}
    total = torch.stack(rows).sum() / chosen(counts, len(rows))
    return -total if "sign" in names else total


LOSS_MISTAKES = {
    "sign": "The sign is wrong: optimizers minimise, and rows of positive advantage must become more probable.",
    "kl sign": "The KL has the wrong sign: it is a price, so it is added to the loss.",
    "no kl": "The KL is missing.",
    "tokens": "You take the mean over all tokens: that is DAPO. GRPO takes the mean of each row first.",
    "sum": "You added up the tokens of a row: take their mean.",
    "constant": "You divide by all places of the matrix: GRPO takes the mean over the real tokens of each row.",
    "rows added": "You added up the rows: take their mean.",
    "real rows": "You took the mean over rows that have tokens: an empty row adds 0 and still counts as a row.",
    "no clip": "The clip is missing.",
    "clip alone": "A token that has moved far the wrong way has no gradient: take the min of rho A and clip(rho) A.",
    "max": "You took the larger of rho A and clip(rho) A: the clip is pessimistic, it takes the smaller.",
    "inverse": "Your ratio is upside down: the new policy stands above the old one.",
    "log": "The ratio is exp(logprobs - old_logprobs), not their difference.",
    "sequence": "Your ratio is that of the whole row: each token has its own.",
    "ref in ratio": "Your ratio is taken to the reference: it belongs to the policy that sampled, old_logprobs.",
    "old in kl": "Your KL is taken to old_logprobs: it belongs to the reference.",
    "k1": "That KL is k1, the plain difference: take k3.",
    "k2": "That KL is k2, half the square: take k3.",
    "mirrored": "Your k3 is mirrored: it is steep where a token has become less probable than in the reference.",
    "one": "Your ratio is always 1: it lacks old_logprobs.",
}
PLANTED = ("clip alone", "mirrored", "tokens")  # by the colleague, beside the padding
for left in (2, 3):
    for names in itertools.combinations(PLANTED, left):
        sentence = f"{left} mistakes are left ({', '.join(names)}). {LOSS_MISTAKES[names[0]]}"
        LOSS_MISTAKES["+".join(names)] = sentence
# With advantages of 0 a wrong sign of the whole and of the KL are the same.
KL_ALONE = LOSS_MISTAKES | {"sign": LOSS_MISTAKES["kl sign"]}


def batch(rows: int = 5, length: int = 6, apart: float = 0.4) -> tuple[Tensor, ...]:
    """Log-probs of three policies, `apart` from each other, advantages of both signs, rows of different lengths."""
    new = -torch.rand(rows, length) * 2 - 0.1
    old, ref = new + apart * torch.randn(rows, length), new + apart * torch.randn(rows, length)
    lengths = torch.randint(1, length, (rows,))
    lengths[:2] = torch.tensor([1, length])
    advantages = torch.randn(rows) + torch.tensor([1.0, -1.0] + [0.0] * (rows - 2))
    return new, old, ref, advantages, torch.arange(length) < lengths[:, None]


def check_loss(f, tensors: tuple[Tensor, ...], clip: float, beta: float, sentences=LOSS_MISTAKES) -> None:
    """Value and gradient."""
    new, *rest = tensors
    found = {}
    for name in ("", *sentences):
        leaf = new.double().requires_grad_()
        with torch.enable_grad():
            value = loss_off(leaf, *rest, clip, beta, wrong=name)
            [slope] = torch.autograd.grad(value, leaf)
        found[name] = (value.detach(), slope)
    for i, what in enumerate(("the loss", "the gradient in logprobs")):
        result = f(new, *rest, clip, beta) if i == 0 else f.gradient(new, *rest, clip, beta, wrt=0)
        if result is not None and torch.as_tensor(result).isnan().any():
            raise AssertionError(f"{what} is nan: 0 * inf is nan, so fill the masked places before any arithmetic.")
        compare(result, found[""][i], {sentences[k]: v[i] for k, v in found.items() if k}, what=what)
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
    check_loss(f, (new, old, ref, torch.zeros_like(advantages), mask), 0.2, 0.1, KL_ALONE)


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


def gradients_off(logits: Tensor, rewards: Tensor, n: int, wrong: str) -> Tensor:
    """The same by going through groups, with a mistake: [2, actions], float64."""
    pi, rewards = logits.double().softmax(0), rewards.double()
    choose = {"combinations": itertools.combinations, "repeats": itertools.combinations_with_replacement}.get(wrong)
    every = list(choose(range(len(pi)), n) if choose else itertools.product(range(len(pi)), repeat=n))
    if not every:
        return torch.zeros(2, len(pi), dtype=torch.float64)
    groups = torch.tensor(every)
    chance = torch.ones(len(groups)).double() / len(groups) if wrong == "alike" else pi[groups].prod(1)
    a = rewards[groups] - rewards[groups].mean(1, keepdim=True)
    if wrong == "no baseline":
        a = rewards[groups]
    std = a.std() if wrong == "all" else a.std(1, correction=int(wrong != "population"), keepdim=True)
    scores = (torch.eye(len(pi)).double() - pi)[groups]  # [groups, n, actions]
    estimates = [(x[..., None] * scores).mean(1) for x in (a, a / (std + EPS))]
    return torch.stack([(chance[:, None] * estimate).sum(0) for estimate in estimates])


def gradient_mistakes(logits: Tensor, rewards: Tensor, n: int) -> dict[str, Tensor]:
    """What usual mistakes give: [2, actions]."""
    right = group_gradients(logits, rewards, n)
    named = {
        "combinations": "You went through combinations: draws are independent, so the same action may come twice, and "
        "every order is a group of its own.",
        "repeats": "You went through each collection of actions once: every order in which it is drawn is a group of "
        "its own.",
        "all": "You divided by one deviation over all groups: each group is divided by its own.",
        "population": "You divided by n inside the deviation: that of a sample has n - 1.",
        "alike": "You gave all groups the same probability: it is the product of their actions' probabilities.",
        "no baseline": "You did not take the mean of the group off.",
    }
    return {
        "The rows are the wrong way round: first centred, then normalised.": right.flip(0),
        "You added up over the group: take the mean of its answers.": right * n,
        "The first row leaves the own reward out of the mean.": torch.stack([right[0] * n / (n - 1), right[1]]),
        "You did not divide by the deviation in the second row.": right[:1].repeat(2, 1),
        "The sign is wrong: this is the gradient of the expected reward, to be climbed.": -right,
    } | {sentence: gradients_off(logits, rewards, n, wrong) for wrong, sentence in named.items()}


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
