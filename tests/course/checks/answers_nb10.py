"""Answers to the exercises of lesson 10."""

from functools import partial

import torch
from answers import solution, solved

from rlcourse.course.checks.nb10 import attention_by_loops


# q2: attention
def unmasked(query, keys, values, mask):
    everything = torch.zeros(len(query), 1, 1, keys.shape[2])
    return attention_by_loops(query, keys, values, everything if mask is None else mask)


# q3: slots
def guessed(mask):
    return torch.zeros(2, 1, dtype=torch.long) if mask is None else solution("nb10", "q3")(mask)


# q4: a fake
def fake(q, keys, values, **change):
    shape = (*q.shape[:2], values.shape[-1])
    out = change.get("out", q.new_empty(shape))
    logsum = change.get("logsum", q.new_empty(shape[:2], dtype=torch.float32))
    return out, logsum, list(out.stride())


# q5: a step in one graph
def kernel(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    hidden = torch.arange(keys.shape[1]) > position[:, None]
    scores = torch.einsum("bd,bsd->bs", q, keys).div(q.shape[1] ** 0.5).masked_fill(hidden, -torch.inf)
    return torch.einsum("bs,bsd->bd", scores.softmax(1), values)


operation = torch.library.custom_op("answers10::kernel", kernel, mutates_args=())
operation.register_fake(lambda q, *_: torch.empty_like(q))


def step(x, weights, keys, values, position, attend=operation, reads=False, asks=False):
    for weight, k, v in zip(weights, keys, values, strict=True):
        x = layer(x, weight, k, v, position, attend, reads, asks)
    return x


def layer(x, weight, k, v, position, attend, reads, asks):
    if reads:
        longest = position.max().item() + 1
        k, v = k[:, :longest], v[:, :longest]
    out = attend(x @ weight, k, v, position)
    if asks and out.abs().max() > 1e4:
        raise ValueError("overflow")
    return x + out


@torch.compiler.disable
def hidden(*given):
    return kernel(*given)


def in_a_loop(x, weights, keys, values, position):
    for weight, k, v in zip(weights, keys, values, strict=True):
        x = x + hidden(x.mul(1) @ weight, k, v, position)
    return x


RIGHT = {"q4": fake, "q5": step}

WRONG = {
    "q1": {"turned round": solved("nb10", "q1", lambda saved: -saved)},
    "q2": {"guess": (unmasked, "without a mask it must raise ValueError")},
    "q3": {
        "first row": solved("nb10", "q3", lambda f: torch.stack([f[0, :1].expand(len(f[0])), f[1]])),
        "wrong way round": solved("nb10", "q3", lambda f: f.flip(0)),
        "guess": (guessed, "returned something"),
        "floats": (solved("nb10", "q3", lambda f: f.float()), "whole numbers"),
    },
    "q4": {
        "empty_like": (lambda q, k, v: fake(q, k, v, out=torch.empty_like(q)), "empty_like"),
        "float32 output": (
            lambda q, k, v: fake(q, k, v, out=torch.empty(*q.shape[:2], v.shape[-1])),
            "the kernel gives torch",
        ),
        "half log-sum": (lambda q, k, v: fake(q, k, v, logsum=q.new_empty(q.shape[:2])), "float32"),
        "log-sum with a size": lambda q, k, v: fake(q, k, v, logsum=torch.empty(*q.shape[:2], 1)),
        "shape of the cache": (lambda q, k, v: fake(q, k, v, out=q.new_empty(v.shape)), "the kernel gives"),
        "output alone": (lambda q, k, v: fake(q, k, v)[0], "return three things"),
    },
    "q5": {
        "hidden kernel": (partial(step, attend=torch.compiler.disable(kernel)), "can't look"),
        "plain PyTorch": (partial(step, attend=kernel), "keep the kernel"),
        "reads": (partial(step, reads=True), "where does the host need"),
        "asks": (partial(step, asks=True), "where does the host need"),
        "breaks in a loop": (in_a_loop, "compiled nothing"),
        "one slot less": lambda x, w, k, v, p: step(x, w, k, v, p - 1),
    },
}
