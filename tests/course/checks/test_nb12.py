"""The checks of lesson 12 pass what is right, kill what is wrong, and name the mistake."""

import itertools
import re

import pytest
import torch
from answers import common_tests, kernel_from
from thorough import thinned

from rlcourse.course.checks.kernels import Maker
from rlcourse.course.checks.nb12 import KERNELS, QUESTIONS
from rlcourse.course.checks.nb12 import q2_rows_that_fit as fit
from rlcourse.course.checks.nb12 import q3_gradients as slopes
from rlcourse.course.checks.nb12 import q4_spoiled as leaks
from rlcourse.course.checks.nb12 import q6_mended as norms
from rlcourse.course.checks.nb12.q1_wrong_gradient import errors, table
from rlcourse.course.checks.nb12.q5_steps_to_move import UNIT, least
from rlcourse.course.dev import build
from rlcourse.kernels.toolchain import simulate

# q1: one wrong gradient ------------------------------------------------------------------------------------------


def wrong_gradient(steps, plus, minus, claims, worst=torch.amax, over=torch.amin, relative=True, last=torch.argmax):
    slope = (plus.double() - minus.double()) / (2 * steps[:, None])
    off = worst((slope - claims[:, None]).abs(), 2)
    return last(over(off / claims.abs().amax(1, keepdim=True) if relative else off, 1))


def fixed_step(steps, plus, minus, claims, k):
    return wrong_gradient(steps[k : k + 1], plus[:, k : k + 1], minus[:, k : k + 1], claims)


def by_loops(steps, plus, minus, claims):
    """A claim is believed if some step has all of its numbers within 1 % of its largest."""
    for k in range(3):
        near = 0.01 * claims[k].abs().max()
        slope = [(plus[k, s].double() - minus[k, s].double()) / (2 * h) for s, h in enumerate(steps)]
        if not any(((found - claims[k]).abs() < near).all() for found in slope):
            return k
    return 0


# q2: a ledger ----------------------------------------------------------------------------------------------------


def rows_that_fit(budget, n, layers, kept, hidden, vocabulary, prompt, answer, chunk, again, rule=""):
    """Both sides of the bend."""
    room = budget - {"moments": 10, "gradients": 14, "copy": 16}.get(rule, 18) * n
    tokens = answer if rule == "prompts" else prompt + answer
    own = tokens * (4 * hidden * layers + kept * (rule != "one layer") if again else kept * layers)
    logit = (4 if rule == "one copy" else 12) * vocabulary
    of_head = prompt + answer if rule == "all tokens" else answer
    below, beyond = room // (own + of_head * logit), (room - chunk * logit) // own
    return max(0, {"a whole chunk": beyond, "no chunk": below}.get(rule, max(below, beyond)))


def by_bisection(budget, n, layers, kept, hidden, vocabulary, prompt, answer, chunk, again):
    def fits(rows):
        memory = torch.zeros((), dtype=torch.float64) + 18 * n
        memory += rows * (prompt + answer) * (4 * hidden * layers + kept if again else layers * kept)
        return memory + 12 * vocabulary * min(rows * answer, chunk) <= budget

    low, high = 0, 1
    while fits(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return torch.tensor(low)


# q3: gradients without logits ------------------------------------------------------------------------------------


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


def by_tokens(hidden, head, targets, a, b, temperature, chunk):
    """In float64, one token after the other, without log_softmax."""
    hidden, head = hidden.double(), head.double()
    d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head)
    for t, (h, y) in enumerate(zip(hidden, targets, strict=True)):
        z = head @ h / temperature
        e = (z - z.max()).exp()
        p = e / e.sum()
        mean = p @ z  # log p + H = z - mean
        slope = -a[t] * p - b * p * (z - mean)
        slope[y] += a[t]
        d_hidden[t] = slope @ head / temperature
        d_head.addr_(slope / temperature, h)
    return d_hidden, d_head


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


# q4: leaks -------------------------------------------------------------------------------------------------------


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


def by_paths(positions, seen, learned, layers):
    """A state is spoiled if a path of at most `layers` looks, one a layer, ends on another answer."""
    owner = (positions == 0).cumsum(0).tolist()

    def bad(i, left):
        return left > 0 and any(
            owner[j] != owner[i] or (j != i and bad(j, left - 1)) for j in seen[i].nonzero().flatten().tolist()
        )

    found = [t > 0 and bool(learned[t]) and (owner[t] != owner[t - 1] or bad(t - 1, layers)) for t in range(len(owner))]
    return torch.tensor(found)


# q5: weights that do not move ------------------------------------------------------------------------------------


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


def step_by_step(weights, step):
    count, found = 0, torch.zeros(len(weights), dtype=torch.long)
    at_once = torch.arange(1, 4097)
    while (found == 0).any():
        sums = (weights.float()[:, None] + (count + at_once) * step).bfloat16() != weights[:, None]
        first = sums.float().argmax(1) + 1 + count
        found = torch.where((found == 0) & sums.any(1), first, found)
        count += 4096
    return found


# q6: a norm ------------------------------------------------------------------------------------------------------


def mended(x, weight, g, eps, rule=""):
    eps = 0.0 if rule == "eps" else eps
    w = weight if rule == "no one" else 1 + weight
    s = 1 / ((x * x).mean(-1, keepdim=True) + eps).sqrt()
    along = ((g if rule == "hers" else g * w) * x).sum((-2, -1) if rule == "all heads" else -1, keepdim=True)
    dx = s * g * w - (0 if rule == "held still" else s**3 * x * along / x.shape[-1])
    dw = s * g * x
    return dx, dw.mean((0, 1)) if rule == "a mean" else dw.sum((0, 1))


def by_jacobian(x, weight, g, eps):
    """Row by row, with all partial derivatives of y by x."""
    dx, dw, d = torch.zeros_like(x), torch.zeros_like(weight), x.shape[-1]
    for i, j in itertools.product(*map(range, x.shape[:2])):
        row = x[i, j]
        s = (row.square().mean() + eps) ** -0.5
        jacobian = (1 + weight)[:, None] * (s * torch.eye(d) - s**3 / d * row[:, None] * row)
        dx[i, j] = g[i, j] @ jacobian
        dw += s * g[i, j] * row
    return dx, dw


def ruled(function, rules):
    return {rule: lambda *x, rule=rule: function(*x, rule=rule) for rule in rules}


RIGHT = {
    "q1": [wrong_gradient, by_loops],
    "q2": [rows_that_fit, by_bisection],
    "q3": [gradients, by_tokens],
    "q4": [spoiled, by_paths],
    "q5": [steps_to_move, step_by_step],
    "q6": [mended, by_jacobian],
}

WRONG = {
    "q1": {
        "smallest": lambda s, p, m, c: errors(p, m, c)[:, -1].argmax(),
        "largest": lambda s, p, m, c: errors(p, m, c)[:, 0].argmax(),
        "absolute": lambda *x: wrong_gradient(*x, relative=False),
        "the best": lambda *x: wrong_gradient(*x, last=torch.argmin),
        "mean of steps": lambda *x: wrong_gradient(*x, over=torch.mean),
        "best number": lambda *x: wrong_gradient(*x, worst=torch.amin),
        "always the first": lambda *x: 0,
        **{f"step 1e-{k}": lambda *x, k=k: fixed_step(*x, k) for k in range(1, 7)},
    },
    "q2": ruled(rows_that_fit, fit.LEDGER)
    | {"one more": lambda *x: rows_that_fit(*x) + 1, "none": lambda *x: 0, "ten": lambda *x: 10},
    "q3": ruled(gradients, [*slopes.MISTAKES, "short", "last chunk"])
    | ruled(by_autograd, ["all at once", "chunks in one graph", "a list"]),
    "q4": ruled(spoiled, leaks.MISTAKES) | {"nothing": lambda p, s, learned, n: torch.zeros_like(learned)},
    "q5": ruled(steps_to_move, ["whole", "ties move", "ties stay", "one side", "float16", "rounded each step"]),
    "q6": ruled(mended, norms.MISTAKES),
}

NAMED = {
    ("q1", "smallest"): "rounding is all",
    ("q1", "largest"): "curvature",
    ("q1", "absolute"): "for its size",
    ("q1", "the best"): "it fits best",
    **{("q1", f"step 1e-{k}"): "No one step tells" for k in (3, 4)},
    **{("q2", rule): sentence for rule, sentence in fit.LEDGER.items()},
    ("q2", "one more"): "One more does not fit",
    **{("q3", rule): sentence for rule, sentence in slopes.MISTAKES.items()},
    ("q3", "last chunk"): "one chunk's",
    ("q3", "all at once"): "The largest tensor has",
    ("q3", "chunks in one graph"): "what keeps them",
    ("q3", "a list"): "what keeps them",
    **{("q4", rule): sentence for rule, sentence in leaks.MISTAKES.items()},
    ("q5", "whole"): "half of it",
    ("q5", "ties move"): "sometimes that is the weight itself",
    ("q5", "ties stay"): "an odd number gives way",
    ("q5", "one side"): "mind the direction",
    ("q5", "float16"): "float16 has 11",
    **{("q6", rule): sentence for rule, sentence in norms.MISTAKES.items()},
}

globals().update(common_tests(QUESTIONS | KERNELS, RIGHT, WRONG, NAMED))

# q7: a kernel to mend --------------------------------------------------------------------------------------------

POWER, OWN = (
    "cute.math.exp(z[row, j] - log_sum[row])",
    f"mean += {'cute.math.exp(z[row, j] - log_sum[row])'} * g[row, j]",
)
SUM = "            mean = cute.arch.warp_reduction_sum(mean)\n"
EDITS = {  # what is put in place of a piece of the solution, and a part of what the card says; None if it is right
    "as it is": ("", "", None),
    "powers of 2": (POWER, "cute.math.exp2((z[row, j] - log_sum[row]) * 1.4426950408889634)", None),
    "the sum in two halves": (
        SUM,
        "            mean = cute.arch.warp_reduction_sum(mean, threads_in_group=16)\n"
        "            mean += cute.arch.shuffle_sync_bfly(mean, offset=16)\n",
        None,
    ),
    "a shuffle in the loop": (OWN, f"mean += cute.arch.warp_reduction_sum({POWER} * g[row, j])", "others that never"),
    "no condition": ("if row < z.shape[0]:", "if row >= 0:", "beyond a tensor"),
    "a row too many": ("if row < z.shape[0]:", "if row <= z.shape[0]:", "beyond a tensor"),
    "a quotient of powers": (POWER, "cute.math.exp(z[row, j]) / cute.math.exp(log_sum[row])", "infinity is lost"),
    "a lane's own": (SUM, "", "add up over all lanes"),
    "half of a warp": (SUM, SUM.replace("(mean)", "(mean, threads_in_group=16)"), ""),
    "the first loop too short": ("range(lane, z.shape[1], 32)", "range(lane, z.shape[1] // 32 * 32, 32)", "no part in"),
    "no sum": ("(g[row, j] - mean)", "g[row, j]", "sum over the row is missing"),
    "a sum that is added": ("(g[row, j] - mean)", "(g[row, j] + mean)", "taken off"),
    "no probability in front": (f"{POWER} * (g[row, j] - mean)", "g[row, j] - mean", "in front is missing"),
    "g alone is summed": (OWN, "mean += g[row, j]", "not over g alone"),
    "a mean over n": ("warp_reduction_sum(mean)", "warp_reduction_sum(mean) / Float32(z.shape[1])", "not divided by n"),
}


def kernel_source(name: str) -> str:
    """The cell of the master that holds this class, and what it needs."""
    cells = (build.ROOT / "exercises" / "_src" / "12_update_phase.py").read_text().split("\n# %%")
    (chosen,) = [cell for cell in cells if re.search(rf"^class {name}\b", cell, re.M)]
    imports = "from dataclasses import dataclass\nimport torch\nfrom rlcourse.kernels.arguments import Argument\n"
    imports += "from rlcourse.kernels.dsl import Float32, cute\nfrom rlcourse.kernels.toolchain import simulate\n"
    return imports + chosen.partition("\n")[2].partition('\nprint("her test')[0]


@pytest.mark.parametrize("name", thinned(EDITS, every=10))
def test_kernels_with_one_mistake_are_killed_and_others_pass(name, tmp_path, monkeypatch):
    old, new, said = EDITS[name]
    head, own, tail = kernel_source("SoftmaxBackward").rpartition("# BEGIN SOLUTION")
    assert old in tail, "this mistake can no longer be made: write another one"
    edited = head + own + (tail.replace(old, new) if old == POWER else tail.replace(old, new, 1))
    result = KERNELS["q7"].run(Maker(kernel_from(edited, "SoftmaxBackward", tmp_path, monkeypatch)), seed=0)
    assert result.passed == (said is None), repr(result)
    messages = [case.message for case in result.cases if not case.passed]
    assert said is None or any(said in message for message in messages), messages


def test_the_colleague_passes_her_own_test_and_each_of_her_mistakes_is_told(tmp_path, monkeypatch):
    colleague = kernel_from(kernel_source("Hers"), "Hers", tmp_path, monkeypatch)
    z, g = torch.randn(4, 64), torch.randn(4, 64)
    dz, p = torch.empty_like(z), z.double().softmax(1)
    simulate(colleague(), z, z.logsumexp(1), g, dz)
    assert (dz - p * (g - (p * g).sum(1, keepdim=True))).abs().max() < 1e-5
    result = KERNELS["q7"].run(Maker(colleague), seed=0)
    assert [case.passed for case in result.cases] == [True, False, False, False], repr(result)


@pytest.mark.parametrize(
    "scales, offset, curved",
    [
        ([1.0, 1.0, 1.0], [0.0] * 3, [6.0] * 3),
        ([1.0, 3.0, 9.0], [60.0] * 3, [0.7] * 3),
        ([1.0, 1.0, 1.0], [0.0, 1000.0, 0.0], [600.0, 0.7, 1.0]),
    ],
)
def test_a_right_claim_is_far_nearer_than_the_wrong_one(scales, offset, curved):
    for seed in range(50):
        torch.manual_seed(seed)
        plus, minus, claims, place = table(scales, offset, curved)
        best = errors(plus, minus, claims).amin(1)
        assert best[place] > 0.02 and best[torch.arange(3) != place].max() < 0.01


def test_the_ledger_of_the_check_never_falls():
    for seed in range(20):
        torch.manual_seed(seed)
        sizes = fit.shape((100, 5000), seed % 2 == 0)
        assert fit.needed(0, *sizes) == 18 * sizes[0]
        needs = [fit.needed(rows, *sizes) for rows in range(60)]
        assert needs == sorted(needs)


def test_weights_of_the_check_move_when_it_says():
    weights = torch.tensor([0.02, -0.02, 0.5, -0.5, 1.0]).bfloat16()
    for step in (3 * UNIT, -5 * UNIT):
        count = least(weights, step)
        assert ((weights.double() + count * step).float().bfloat16() != weights).all()
        assert ((weights.double() + (count - 1) * step).float().bfloat16() == weights).all()
