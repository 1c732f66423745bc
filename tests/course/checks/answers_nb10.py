"""Answers to the exercises of lesson 10."""

from functools import partial

import torch
from answers import half_mended

from rlcourse.course.checks.nb10 import PLANTED


# q1: two watches
def step_time(launch, kernel, reads, early=False, in_turn=False):
    host = gpu = before = 0.0
    for launching, running, read in zip(launch.tolist(), kernel.tolist(), reads.tolist(), strict=True):
        host += launching
        before, gpu = gpu, max(gpu, host) + running
        if read or in_turn:
            host = max(host, before if early else gpu)
    return gpu


def worth(launch, kernel, reads, time=step_time, launch_too=False):
    found = []
    for i in range(len(kernel)):
        free = torch.arange(len(kernel)) == i
        starts = launch.masked_fill(free, 0.0) if launch_too else launch
        found.append(time(launch, kernel, reads) - time(starts, kernel.masked_fill(free, 0.0), reads))
    return torch.tensor(found)


# q2: an attention with four mistakes
def attend(query, keys, values, mask, wrong=()):
    """Right but for some of the planted mistakes."""
    if mask is None and "guess" not in wrong:
        raise ValueError("no mask")
    shared = query.shape[1] // keys.shape[1]
    if "heads" in wrong:
        keys, values = keys.repeat(1, shared, 1, 1), values.repeat(1, shared, 1, 1)
    else:
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = torch.einsum("bhd,bhsd->bhs", query, keys) / query.shape[-1] ** (1 if "scale" in wrong else 0.5)
    if mask is not None:
        numbers = mask.dtype != torch.bool or "truths" in wrong
        scores = scores + mask[:, 0] if numbers else scores.masked_fill(~mask[:, 0], -torch.inf)
    return torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), values)


def open_mask(query, keys, values, mask):
    return attend(query, keys, values, None if mask is None else torch.zeros(mask.shape))


def unscaled(query, keys, values, mask):
    return attend(query * query.shape[-1] ** 0.5, keys, values, mask)


# q3 and q4
def slots(mask, first=None, last=None):
    if mask is None:
        raise ValueError("no mask")
    seen = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    start = seen.long().argmax(1)
    end = start + seen.sum(1) - 1
    return torch.stack([start if first is None else first(seen), end if last is None else last(seen)])


def slots_guess(mask):
    return torch.zeros(2, 1, dtype=torch.long) if mask is None else slots(mask)


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


RIGHT = {"q1": worth, "q2": attend, "q3": slots, "q4": fake, "q5": step}

WRONG = {
    "q1": {
        "its own time": (lambda h, k, r: k, "not always worth its time"),
        "reads forgotten": (lambda h, k, r: worth(h, k, torch.zeros_like(r)), "must wait where it reads"),
        "launch too": (lambda h, k, r: worth(h, k, r, launch_too=True), "still has to be launched"),
        "times": lambda h, k, r: step_time(h, k, r) - worth(h, k, r),
        "turned round": (lambda h, k, r: -worth(h, k, r), "wrong way round"),
    },
    "q2": {
        **half_mended(attend, PLANTED),
        "mask not used": (open_mask, "not used"),
        "unscaled": (unscaled, "not divided by anything"),
    },
    "q3": {
        "count": (lambda m: slots(m, last=None if m is None else lambda s: s.sum(1) - 1), "padded on the left"),
        "after": (lambda m: slots(m) + torch.tensor([[0], [1]]), "not the one after"),
        "all hidden": (lambda m: slots(m, first=lambda s: (~s).sum(1)), "no padding"),
        "first row": lambda m: slots(m, first=lambda s: s.long().argmax(1)[:1].expand(len(s))),
        "wrong way round": lambda m: slots(m).flip(0),
        "guess": (slots_guess, "returned something"),
        "floats": (lambda m: slots(m).float(), "whole numbers"),
        "int32": (lambda m: slots(m).int(), "int64"),
    },
    "q4": {
        "empty_like": (lambda q, k, v: fake(q, k, v, out=torch.empty_like(q)), "empty_like"),
        "float32 output": (
            lambda q, k, v: fake(q, k, v, out=torch.empty(*q.shape[:2], v.shape[-1])),
            "that of the queries",
        ),
        "half log-sum": (lambda q, k, v: fake(q, k, v, logsum=q.new_empty(q.shape[:2])), "float32"),
        "log-sum with a size": lambda q, k, v: fake(q, k, v, logsum=torch.empty(*q.shape[:2], 1)),
        "shape of the cache": (lambda q, k, v: fake(q, k, v, out=q.new_empty(v.shape)), "a token for each row"),
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
