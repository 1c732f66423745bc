"""Answers to the exercises of lesson 12."""

import torch
from answers import ruled


# q3: gradients without logits
def all_logits(hidden, head, targets, a, b, temperature, chunk, rule):
    """The right numbers, and all logits: in one tensor, or in the graph of many chunks."""
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss, size = 0.0, chunk if rule == "chunks in one graph" else len(hidden)
    for h, y, weight in zip(hidden.split(size), targets.split(size), a.split(size), strict=True):
        drawn = torch.distributions.Categorical(logits=h @ head.T / temperature)
        loss = loss + (weight * drawn.log_prob(y)).sum() + b * drawn.entropy().sum()
    return torch.autograd.grad(loss, (hidden, head))


WRONG = {
    "q3": ruled(all_logits, {"all at once": "The largest tensor has", "chunks in one graph": "what keeps them"}),
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
