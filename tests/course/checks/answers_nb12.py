"""Answers to the exercises of lesson 12."""

import torch
from answers import ruled

from rlcourse.course.checks.nb12 import LEAKS, LEDGER, NORMS, SLOPES


# q1: one wrong gradient
def wrong_gradient(steps, plus, minus, claims, worst=torch.amax, over=torch.amin, relative=True, last=torch.argmax):
    slope = (plus.double() - minus.double()) / (2 * steps[:, None])
    off = worst((slope - claims[:, None]).abs(), 2)
    return last(over(off / claims.abs().amax(1, keepdim=True) if relative else off, 1))


def at_step(k, steps, plus, minus, claims):
    return wrong_gradient(steps[k : k + 1], plus[:, k : k + 1], minus[:, k : k + 1], claims)


# q2: a ledger
def rows_that_fit(budget, n, layers, kept, hidden, vocabulary, prompt, answer, chunk, again, rule=""):
    """Both sides of the bend."""
    room = budget - {"moments": 10, "gradients": 14, "copy": 16}.get(rule, 18) * n
    tokens = answer if rule == "prompts" else prompt + answer
    own = tokens * (4 * hidden * layers + kept * (rule != "one layer") if again else kept * layers)
    logit = (4 if rule == "one copy" else 12) * vocabulary
    of_head = prompt + answer if rule == "all tokens" else answer
    below, beyond = room // (own + of_head * logit), (room - chunk * logit) // own
    return max(0, {"a whole chunk": beyond, "no chunk": below}.get(rule, max(below, beyond)))


# q3: gradients without logits
def gradients(hidden, head, targets, a, b, temperature, chunk, rule=""):
    d_hidden, d_head = torch.zeros_like(hidden), torch.zeros_like(head)
    for h, y, weight, out in zip(*(t.split(chunk) for t in (hidden, targets, a, d_hidden)), strict=True):
        if rule == "short" and len(h) < chunk:
            break
        logp = (h @ head.T / (1 if rule == "temperature" else temperature)).log_softmax(1)
        p = logp.exp()
        total = 0.0 if rule == "no H" else -(p * logp).sum(1, keepdim=True)
        slope = weight[:, None] * (torch.nn.functional.one_hot(y, len(head)) - p)
        slope += {"sign": 1, "log p alone": 0}.get(rule, -1) * b * p * (logp + total)
        slope /= 1 if rule in ("inner", "temperature") else temperature
        out.copy_(slope @ head)
        d_head = slope.T @ h + (0 if rule == "last chunk" else d_head)
    scale = {"mean": 1 / len(hidden), "minus": -1}.get(rule, 1)
    return scale * d_hidden, scale * d_head


def by_autograd(hidden, head, targets, a, b, temperature, chunk, rule="all at once"):
    """The right numbers, and all logits: in one tensor, in the graph of many chunks, or in a list."""
    if rule == "a list":
        kept = [h @ head.T for h in hidden.split(chunk)]
        found = gradients(hidden, head, targets, a, b, temperature, chunk)
        return found if kept else None
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss, size = 0.0, chunk if rule == "chunks in one graph" else len(hidden)
    for h, y, weight in zip(hidden.split(size), targets.split(size), a.split(size), strict=True):
        drawn = torch.distributions.Categorical(logits=h @ head.T / temperature)
        loss = loss + (weight * drawn.log_prob(y)).sum() + b * drawn.entropy().sum()
    return torch.autograd.grad(loss, (hidden, head))


# q4: leaks
def spoiled(positions, seen, learned, layers, rule=""):
    owner = (positions == 0).cumsum(0)
    looks = (seen.T if rule == "turned" else seen).float()
    bad, foreign = torch.zeros(len(owner)), (looks * (owner[:, None] != owner)).sum(1)
    for _ in range({"one layer": 1, "for ever": 99}.get(rule, layers)):
        bad = ((foreign + looks @ bad) > 0).float()
    bad = bad > 0
    before = torch.cat([torch.zeros(1, dtype=torch.bool), bad[:-1]])
    first = torch.cat([torch.zeros(1, dtype=torch.bool), owner[1:] != owner[:-1]])
    if rule == "no shift":
        return bad & learned & (torch.arange(len(owner)) > 0)
    found = before if rule == "first tokens" else before | first
    if rule == "all of it":
        found = torch.isin(owner, owner[found & learned])
    return found if rule == "not learned" else found & learned


# q5: weights that do not move
def steps_to_move(weights, step, rule=""):
    found = []
    for weight in weights:
        mantissa, exponent = torch.frexp(weight.double().abs())  # weight = mantissa 2^exponent, mantissa from 0.5
        gap = 2.0 ** (exponent.item() - 8)
        if rule != "one side" and mantissa == 0.5 and weight * step < 0:
            gap /= 2
        number = weight.double().abs().item() / 2.0 ** (exponent.item() - 8)
        stays = {"ties move": False, "ties stay": True}.get(rule, number % 2 == 0)
        way = {"whole": gap, "float16": gap / 16}.get(rule, gap / 2)
        if rule == "rounded each step":
            moves = float((weight.float() + step).bfloat16()) != float(weight)
            found.append(1 if moves else -1)
            continue
        found.append(way // abs(step) + 1 if stays else -(-way // abs(step)))
    return torch.tensor(found).long()


# q6: a norm
def mended(x, weight, g, eps, rule=""):
    eps = 0.0 if rule == "eps" else eps
    w = weight if rule == "no one" else 1 + weight
    s = 1 / ((x * x).mean(-1, keepdim=True) + eps).sqrt()
    along = ((g if rule == "hers" else g * w) * x).sum((-2, -1) if rule == "all heads" else -1, keepdim=True)
    dx = s * g * w - (0 if rule == "held still" else s**3 * x * along / x.shape[-1])
    dw = s * g * x
    return dx, dw.mean((0, 1)) if rule == "a mean" else dw.sum((0, 1))


RIGHT = {"q1": wrong_gradient, "q2": rows_that_fit, "q3": gradients, "q4": spoiled, "q5": steps_to_move, "q6": mended}

WRONG = {
    "q1": {
        "smallest": (lambda *x: at_step(7, *x), "rounding is all"),
        "largest": (lambda *x: at_step(0, *x), "curvature"),
        "absolute": (lambda *x: wrong_gradient(*x, relative=False), "for its size"),
        "the best": (lambda *x: wrong_gradient(*x, last=torch.argmin), "it fits best"),
        "always the first": lambda *x: 0,
        "step 1e-3": (lambda *x: at_step(3, *x), "No one step tells"),
    },
    "q2": ruled(rows_that_fit, LEDGER)
    | {
        "one more": (lambda *x: rows_that_fit(*x) + 1, "One more does not fit"),
        "none": lambda *x: 0,
    },
    "q3": ruled(gradients, SLOPES | {"short": "", "last chunk": "one chunk's"})
    | ruled(
        by_autograd,
        {
            "all at once": "The largest tensor has",
            "chunks in one graph": "what keeps them",
            "a list": "what keeps them",
        },
    ),
    "q4": ruled(spoiled, LEAKS)
    | {
        "nothing": lambda p, s, learned, n: torch.zeros_like(learned),
    },
    "q5": ruled(
        steps_to_move,
        {
            "whole": "half of it",
            "ties move": "sometimes that is the weight itself",
            "ties stay": "an odd number gives way",
            "one side": "mind the direction",
            "float16": "float16 has 11",
            "rounded each step": "",
        },
    ),
    "q6": ruled(mended, NORMS),
}


# q7: a kernel to mend
POWER, OWN = (
    "cute.math.exp(z[row, j] - log_sum[row])",
    f"mean += {'cute.math.exp(z[row, j] - log_sum[row])'} * g[row, j]",
)
SUM = "            mean = cute.arch.warp_reduction_sum(mean)\n"
EDITS = {
    "q7": {
        "powers of 2": (POWER, "cute.math.exp2((z[row, j] - log_sum[row]) * 1.4426950408889634)", None),
        "a shuffle in the loop": (
            OWN,
            f"mean += cute.arch.warp_reduction_sum({POWER} * g[row, j])",
            "others that never",
        ),
        "no condition": ("if row < z.shape[0]:", "if row >= 0:", "beyond a tensor"),
        "a quotient of powers": (POWER, "cute.math.exp(z[row, j]) / cute.math.exp(log_sum[row])", "infinity is lost"),
        "a lane's own": (SUM, "", "add up over all lanes"),
        "the first loop too short": (
            "range(lane, z.shape[1], 32)",
            "range(lane, z.shape[1] // 32 * 32, 32)",
            "no part in",
        ),
        "no sum": ("(g[row, j] - mean)", "g[row, j]", "sum over the row is missing"),
        "a sum that is added": ("(g[row, j] - mean)", "(g[row, j] + mean)", "taken off"),
        "no probability in front": (f"{POWER} * (g[row, j] - mean)", "g[row, j] - mean", "in front is missing"),
        "g alone is summed": (OWN, "mean += g[row, j]", "not over g alone"),
        "a mean over n": (
            "warp_reduction_sum(mean)",
            "warp_reduction_sum(mean) / Float32(z.shape[1])",
            "not divided by n",
        ),
    }
}
