"""The checks of lesson 10 pass what is right, kill what is wrong, and name the mistake."""

import itertools

import torch
import torch.nn.functional as F
from answers import common_tests

from rlcourse.course.checks.nb10 import PLANTED, QUESTIONS

# q1: two watches -------------------------------------------------------------------------------------------------


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


def by_chains(launch, kernel, reads):
    """The step as the longest way through a graph: from `launched` and `ended` of each kernel to the next."""

    def time(launch, kernel, reads):
        n = len(kernel)
        longest = torch.zeros(2 * n, dtype=torch.float64)
        for _ in range(2 * n):  # as often as a way can be long
            for i in range(n):
                before = [longest[i - 1]] * (i > 0) + [longest[n + i - 1]] * (i > 0 and bool(reads[i - 1]))
                longest[i] = launch[i] + max(before, default=0.0)
                longest[n + i] = kernel[i] + max([longest[i]] + [longest[n + i - 1]] * (i > 0))
        return longest[-1].item()

    return worth(launch.double(), kernel.double(), reads, time)


def two_sums(launch, kernel, reads):
    return max(launch.sum().item(), kernel.sum().item())


# q2: an attention with four mistakes -----------------------------------------------------------------------------


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


def by_torch(query, keys, values, mask):
    if mask is None:
        raise ValueError("no mask")
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]


def from_the_lesson(query, keys, values, mask):
    """Its `naive`, pasted: right but for the guess."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask)[:, :, 0]


def folded(query, keys, values, mask):
    """Query heads as rows of their key-value head, visible scores alone."""
    if mask is None:
        raise ValueError("no mask")
    rows, heads, size = query.shape
    seen = mask[:, :, 0] if mask.dtype == torch.bool else mask[:, :, 0] > -1
    scores = query.view(rows, keys.shape[1], -1, size) @ keys.mT * size**-0.5
    weights = scores.where(seen[:, :, None], torch.tensor(-1e30)).exp2() * 0  # only the shape is used
    weights = (scores - scores.amax(-1, keepdim=True)).exp().where(seen[:, :, None], torch.zeros(())) + weights
    return (weights / weights.sum(-1, keepdim=True) @ values).reshape(rows, heads, size)


def inverted(query, keys, values, mask):
    return attend(query, keys, values, ~mask if mask is not None and mask.dtype == torch.bool else mask)


def open_mask(query, keys, values, mask):
    return attend(query, keys, values, None if mask is None else torch.zeros(mask.shape))


def late(query, keys, values, mask):
    """Hidden slots lose their weight after the softmax."""
    if mask is None:
        raise ValueError("no mask")
    seen = mask if mask.dtype == torch.bool else mask == 0
    shared = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    weights = (torch.einsum("bhd,bhsd->bhs", query, keys) * query.shape[-1] ** -0.5).softmax(-1) * seen[:, 0]
    return torch.einsum("bhs,bhsd->bhd", weights, values)


def unscaled(query, keys, values, mask):
    return attend(query * query.shape[-1] ** 0.5, keys, values, mask)


SUBSETS = [wrong for count in (1, 2, 3, 4) for wrong in itertools.combinations(PLANTED, count)]

# q3 and q4 -------------------------------------------------------------------------------------------------------


def slots(mask, first=None, last=None):
    if mask is None:
        raise ValueError("no mask")
    seen = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    start = seen.long().argmax(1)
    end = start + seen.sum(1) - 1
    return torch.stack([start if first is None else first(seen), end if last is None else last(seen)])


def slots_by_nonzero(mask):
    if mask is None:
        raise ValueError("no mask")
    rows = [row.nonzero() if row.dtype == torch.bool else (row > -1).nonzero() for row in mask[:, 0, 0]]
    return torch.tensor([[int(row[0]) for row in rows], [int(row[-1]) for row in rows]])


def slots_guess(mask):
    return torch.zeros(2, 1, dtype=torch.long) if mask is None else slots(mask)


def slots_as_truth(mask):
    if mask is None:
        raise ValueError("no mask")
    return slots(mask.bool())


def fake(q, keys, values, **change):
    shape = (*q.shape[:2], values.shape[-1])
    out = change.get("out", q.new_empty(shape))
    logsum = change.get("logsum", q.new_empty(shape[:2], dtype=torch.float32))
    return out, logsum, list(out.stride())


def fake_zeros(q, keys, values):
    rows, heads, _ = q.shape
    out = torch.zeros(rows, heads, values.shape[-1], dtype=q.dtype)
    return out, torch.zeros(rows, heads), out.stride()


RIGHT = {
    "q1": [worth, by_chains],
    "q2": [attend, by_torch, folded],
    "q3": [slots, slots_by_nonzero],
    "q4": [fake, fake_zeros],
}

WRONG = {
    "q1": {
        "its own time": lambda h, k, r: k,
        "in turn": lambda h, k, r: worth(h, k, r, lambda *x: step_time(*x, in_turn=True)),
        "reads forgotten": lambda h, k, r: worth(h, k, torch.zeros_like(r)),
        "reads too early": lambda h, k, r: worth(h, k, r, lambda *x: step_time(*x, early=True)),
        "launch too": lambda h, k, r: worth(h, k, r, launch_too=True),
        "two sums": lambda h, k, r: worth(h, k, r, two_sums),
        "times": lambda h, k, r: step_time(h, k, r) - worth(h, k, r),
        "turned round": lambda h, k, r: -worth(h, k, r),
        "nothing": lambda h, k, r: torch.zeros_like(k),
    },
    "q2": {
        **{" ".join(wrong): lambda *x, wrong=wrong: attend(*x, wrong=wrong) for wrong in SUBSETS},
        "from the lesson": from_the_lesson,
        "inverted": inverted,
        "mask not used": open_mask,
        "late": late,
        "unscaled": unscaled,
    },
    "q3": {
        "count": lambda m: slots(m, last=None if m is None else lambda s: s.sum(1) - 1),
        "after": lambda m: slots(m) + torch.tensor([[0], [1]]),
        "end of the cache": lambda m: slots(m, last=lambda s: torch.full((len(s),), s.shape[1] - 1)),
        "all hidden": lambda m: slots(m, first=lambda s: (~s).sum(1)),
        "first row": lambda m: slots(m, first=lambda s: s.long().argmax(1)[:1].expand(len(s))),
        "no padding": lambda m: slots(m, first=lambda s: torch.zeros(len(s), dtype=torch.long)),
        "wrong way round": lambda m: slots(m).flip(0),
        "numbers as truths": slots_as_truth,
        "guess": slots_guess,
        "floats": lambda m: slots(m).float(),
        "int32": lambda m: slots(m).int(),
    },
    "q4": {
        "empty_like": lambda q, k, v: fake(q, k, v, out=torch.empty_like(q)),
        "strides of q": lambda q, k, v: fake(q, k, v, out=q.new_empty(q.shape[1], len(q), v.shape[-1]).transpose(0, 1)),
        "float32 output": lambda q, k, v: fake(q, k, v, out=torch.empty(*q.shape[:2], v.shape[-1])),
        "half log-sum": lambda q, k, v: fake(q, k, v, logsum=q.new_empty(q.shape[:2])),
        "log-sum with a size": lambda q, k, v: fake(q, k, v, logsum=torch.empty(*q.shape[:2], 1)),
        "heads of the cache": lambda q, k, v: fake(q, k, v, out=q.new_empty(len(q), v.shape[1], v.shape[-1])),
        "shape of the cache": lambda q, k, v: fake(q, k, v, out=q.new_empty(v.shape)),
        "output alone": lambda q, k, v: fake(q, k, v)[0],
        "no strides": lambda q, k, v: fake(q, k, v)[:2],
    },
}

# The sentence, or a part of it, that a wrong implementation must be told.
NAMED = {
    ("q1", "its own time"): "not always worth its time",
    ("q1", "in turn"): "not always worth its time",
    ("q1", "reads forgotten"): "must wait where it reads",
    ("q1", "reads too early"): "not for the one before",
    ("q1", "launch too"): "still has to be launched",
    ("q1", "two sums"): "two sums",
    ("q1", "times"): "whole steps",
    ("q1", "turned round"): "wrong way round",
    **{("q2", " ".join(wrong)): PLANTED[wrong[0]] for wrong in SUBSETS if len(wrong) == 1},
    ("q2", "truths heads scale"): "All of its mistakes",
    ("q2", "heads scale"): "heads, scale",
    ("q2", "from the lesson"): "returned something",
    ("q2", "inverted"): "You hide what is seen",
    ("q2", "mask not used"): "not used",
    ("q2", "late"): "after the softmax",
    ("q2", "unscaled"): "not divided by anything",
    ("q3", "count"): "padded on the left",
    ("q3", "after"): "not the one after",
    ("q3", "end of the cache"): "holds nothing yet",
    ("q3", "all hidden"): "no padding",
    ("q3", "first row"): "first row",
    ("q3", "no padding"): "Padding is forgotten",
    ("q3", "wrong way round"): "wrong way round",
    ("q3", "numbers as truths"): "-inf is hidden",
    ("q3", "guess"): "returned something",
    ("q3", "floats"): "whole numbers",
    ("q3", "int32"): "int64",
    ("q4", "empty_like"): "empty_like",
    ("q4", "float32 output"): "that of the queries",
    ("q4", "half log-sum"): "float32",
    ("q4", "heads of the cache"): "as many heads",
    ("q4", "shape of the cache"): "one token a row",
    ("q4", "output alone"): "return three things",
}

globals().update(common_tests(QUESTIONS, RIGHT, WRONG, NAMED))
