"""Answers to the exercises of lesson 12."""

import torch
from answers import ruled, solved

from rlcourse.course.checks.nb12 import LEAKS, LEDGER, NORMS, SLOPES, by_autograd, most, norm_gradients, walk


# q1: one wrong gradient
def wrong_gradient(steps, plus, minus, claims, worst=torch.amax, over=torch.amin, relative=True, last=torch.argmax):
    slope = (plus.double() - minus.double()) / (2 * steps[:, None])
    off = worst((slope - claims[:, None]).abs(), 2)
    return last(over(off / claims.abs().amax(1, keepdim=True) if relative else off, 1))


def at_step(k, steps, plus, minus, claims):
    return wrong_gradient(steps[k : k + 1], plus[:, k : k + 1], minus[:, k : k + 1], claims)


# q3: gradients without logits
def gradients(hidden, head, targets, a, b, temperature, chunk, mistake=""):
    d_hidden, d_head = torch.zeros_like(hidden), torch.zeros_like(head)
    for h, y, weight, out in zip(*(t.split(chunk) for t in (hidden, targets, a, d_hidden)), strict=True):
        if mistake == "short" and len(h) < chunk:
            break
        logp = (h @ head.T / temperature).log_softmax(1)
        p = logp.exp()
        slope = weight[:, None] * (torch.nn.functional.one_hot(y, len(head)) - p)
        slope = (slope - b * p * (logp - (p * logp).sum(1, keepdim=True))) / temperature
        out.copy_(slope @ head)
        d_head = slope.T @ h + (0 if mistake == "last chunk" else d_head)
    return d_hidden, d_head


def gradients_with(*given, mistake):
    return by_autograd(*given[:-1], mistake)


def all_logits(hidden, head, targets, a, b, temperature, chunk, rule):
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
        found.append(way // abs(step) + 1 if stays else -(-way // abs(step)))
    return torch.tensor(found).long()


RIGHT = {"q1": wrong_gradient, "q3": gradients, "q5": steps_to_move}

WRONG = {
    "q1": {
        "smallest": (lambda *x: at_step(7, *x), "1e-07 alone"),
        "largest": (lambda *x: at_step(0, *x), "Step 1 alone"),
        "mean": (lambda *x: wrong_gradient(*x, worst=torch.mean), "hides one wrong number"),
        "absolute": (lambda *x: wrong_gradient(*x, relative=False), "for its size"),
        "the best": (lambda *x: wrong_gradient(*x, last=torch.argmin), "it fits best"),
        "step 1e-3": (lambda *x: at_step(3, *x), "0.001 alone"),
    },
    "q2": ruled(most, LEDGER, "mistake")
    | {"one more": (solved("nb12", "q2", lambda rows: rows + 1), "One more does not fit")},
    "q3": ruled(gradients_with, SLOPES, "mistake")
    | ruled(gradients, {"short": "", "last chunk": "one chunk's"}, "mistake")
    | {
        "minus": lambda *x: tuple(-each for each in gradients(*x)),
        "mean": lambda *x: tuple(each / len(x[0]) for each in gradients(*x)),
    }
    | ruled(
        all_logits,
        {
            "all at once": "The largest tensor has",
            "chunks in one graph": "what keeps them",
            "a list": "what keeps them",
        },
    ),
    "q4": ruled(walk, LEAKS, "mistake"),
    "q5": ruled(
        steps_to_move,
        {
            "whole": "half of it",
            "ties move": "sometimes that is the weight itself",
            "ties stay": "an odd number gives way",
            "one side": "mind the direction",
            "float16": "",
        },
    ),
    "q6": ruled(norm_gradients, NORMS, "mistake"),
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
        "g alone is summed": (OWN, "mean += g[row, j]", "not over g alone"),
    }
}
