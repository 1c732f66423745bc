"""q3: a loss of GRPO to mend."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

q3 = Question("q3", "mended_loss", hint="Begin with the nan: what is there after the end of an answer?")


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


@q3.case("inf and nan after the end do no harm")
def _(f):
    new, old, ref, advantages, mask = batch()
    fill = {0: -torch.inf, 1: torch.nan, 2: torch.inf}
    new, old, ref = (x.masked_fill(~mask, fill[i]) for i, x in enumerate((new, old, ref)))
    check_loss(f, (new, old, ref, advantages, mask), 0.2, 0.1)
