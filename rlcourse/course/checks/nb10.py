"""Checks of lesson 10: what a kernel is worth, an attention to mend, slots of a mask, a fake, pieces of a step."""

import itertools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, between, compare, draw
from rlcourse.course.checks.builders import Names, left_in, pick
from rlcourse.course.checks.comparison import as_tensor

q1 = Question("q1", "worth", hint="Write the time of a whole step first: one watch for the host, one for the GPU.")


def ends(launch: list[float], kernel: list[float], reads: list[bool]) -> float:
    """When the last kernel has ended: the longest chain of things of which each waits for the one before."""
    launched, ended = [0.0], [0.0]
    for i, (launching, running) in enumerate(zip(launch, kernel, strict=True)):
        launched.append(max(launched[-1], ended[-1] if i and reads[i - 1] else 0.0) + launching)
        ended.append(max(launched[-1], ended[-1]) + running)
    return ended[-1]


@q1.expects(also={
    "A kernel is not always worth its time: the host does not wait for it, unless it reads.": lambda h, k, reads: k,
    "The host must wait where it reads: it launches nothing before that kernel has ended.": {"waits": False},
    "A kernel that takes no time still has to be launched.": {"launch_too": True},
}, atol=1e-3)  # fmt: skip
def saved(launch: Tensor, kernel: Tensor, reads: Tensor, launch_too: bool = False, waits: bool = True) -> Tensor:
    """What each kernel is worth, or with a mistake: [kernels] float64."""
    launching, running, reads, found = launch.double().tolist(), kernel.double().tolist(), (reads & waits).tolist(), []
    for i in range(len(running)):
        free = [0.0 if j == i else k for j, k in enumerate(running)]
        starts = [0.0 if launch_too and j == i else h for j, h in enumerate(launching)]
        found.append(ends(launching, running, reads) - ends(starts, free, reads))
    return torch.tensor(found, dtype=torch.float64)


def random_times(n: int, least: float, most: float) -> Tensor:
    return least + (most - least) * torch.rand(n)


def check_uneven(f, least: float, most: float, often: float) -> None:
    """Kernels of which some take long; the host needs `least` to `most` for a launch, and reads so `often`."""
    n = draw(6, 12)
    kernel = torch.where(torch.rand(n) < 0.3, random_times(n, 20, 40), random_times(n, 1, 8))
    reads = torch.rand(n) < often
    reads[n // 2] = often > 0
    q1.check(f, random_times(n, least, most), kernel, reads)


@q1.case("one graph, launched at once; and two")
def _(f):
    n = draw(4, 8)
    kernel, never = random_times(n, 1, 20), torch.zeros(n, dtype=torch.bool)
    launch = torch.where(torch.arange(n) == 0, between(5, 10), 0.0)
    q1.check(f, launch, kernel, never)
    launch[2] = kernel.sum()  # the second is late: what comes before it is worth nothing
    q1.check(f, launch, kernel, never)


q1.case("now the one is slower, now the other; the host reads numbers")(
    lambda f: [check_uneven(f, *how) for how in ((2, 12, 0.0), (1, 8, 0.4)) for _ in range(4)]
)

q2 = Question("q2", "attend", hint="Work out on paper what a right attention answers to each of the four probes.")
PLANTED = {  # what can be found without a call that must fail, in the order in which a card names it
    "truths": "its mask of truths: True is added as a 1 and hides nothing",
    "heads": "its heads: query heads 0 to H/K - 1 belong to key-value head 0, the next H/K to head 1",
    "scale": "its scale: the root of the head size, not the head size",
}


def attention_by_loops(query, keys, values, mask, wrong: Names = ()) -> Tensor:
    """In float64, head by head, with mistakes."""
    (rows, heads, size), kv_heads = query.shape, keys.shape[1]
    truths, out = mask.dtype == torch.bool, torch.zeros(rows, heads, size, dtype=torch.float64)
    hidden = (~mask if truths else mask < 0)[:, 0, 0]
    for row, head in itertools.product(range(rows), range(heads)):
        shared = head % kv_heads if "heads" in wrong else head * kv_heads // heads
        scores = keys[row, shared].double() @ query[row, head].double()
        scores = scores / pick(wrong, {"scale": size, "none": 1}, math.sqrt(size))
        added = truths and "truths" in wrong
        gone = torch.zeros_like(hidden[row]) if added or "open" in wrong else hidden[row]
        scores = (scores + added * ~hidden[row]).masked_fill(gone, -torch.inf)
        out[row, head] = scores.softmax(0) @ values[row, shared].double()
    return out


def check_attend(f, rows: int, heads: int, kv_heads: int, slots: int, truths: bool, full: bool = False) -> None:
    size = 2 * draw(2, 8)
    query, (keys, values) = 2 * torch.randn(rows, heads, size), torch.randn(2, rows, kv_heads, slots, size)
    at, first = torch.arange(slots), torch.randint(0, slots // 2, (rows, 1))
    last = first + torch.randint(0, slots // 2, (rows, 1))
    hidden = torch.zeros(rows, slots, dtype=torch.bool) if full else (at < first) | (at > last)
    mask = ~hidden if truths else torch.zeros(rows, slots).masked_fill(hidden, -torch.inf)
    q2.check(f, query, keys, values, mask[:, None, None])


q2.expects({
    ("open",): "The mask is not used: what it hides must have no weight.",
    ("none",): "The scores are not divided by anything: the root of the head size is asked for.",
}, also=left_in(attention_by_loops, PLANTED), atol=1e-4)(attention_by_loops)  # fmt: skip
q2.case("one head, a full cache; several heads share one, padding, a mask of numbers")(lambda f: [
    check_attend(f, draw(1, 3), 1, 1, draw(3, 7), truths=False, full=True),
    check_attend(f, draw(2, 4), 6, 2, 8, truths=False),
    check_attend(f, draw(2, 4), 6, 3, 8, truths=False),
])  # fmt: skip
q2.case("the same with a mask of truths")(
    lambda f: [check_attend(f, draw(2, 4), *heads, 9, truths=True) for heads in ((1, 1), (8, 4))]
)
q2.case("no mask: ValueError, and no guess")(lambda f: [
    check_attend(f, 2, 4, 2, draw(5, 9), truths=True),
    refuses(f, torch.randn(2, 4, 8), *torch.randn(2, 2, 2, 5, 8).unbind(0), None),
])  # fmt: skip


def refuses(f, *arguments) -> None:
    """Fail unless the function raises ValueError, of which the grader tells by AssertionError."""
    try:
        f(*arguments)
    except NotImplementedError:
        raise
    except Exception as error:
        assert "ValueError" in f"{type(error).__name__}: {error}", f"without a mask, raise ValueError, not {error!r}"
        return
    raise AssertionError("without a mask it must raise ValueError, and you returned something")


q3 = Question("q3", "first_and_last_slot", hint="`argmax` finds the first True; how many there are tells the last.")


@q3.expects(also={
    "The last slot is not the number of slots seen: rows are padded on the left.": {"change": lambda a, b: (a, b - a)},
    "The last slot is the last one that is seen, not the one after it.": {"change": lambda a, b: (a, b + 1)},
    "Padding is forgotten: the first slot is not always 0.": {"change": lambda a, b: (a * 0, b)},
})  # fmt: skip
def first_and_last(mask: Tensor, change=lambda *slots: slots) -> Tensor:
    """Slot by slot: [2, rows]."""
    seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, 0]
    return torch.stack(change(*torch.stack([row.nonzero()[[0, -1], 0] for row in seen], 1)))


def check_slots(f, starts=None, counts=(), slots: int = 12, additive: bool = False) -> None:
    """starts, counts: of the rows' slots that are seen, drawn if not given."""
    drawn = torch.stack([torch.randint(4, (8,)), torch.randint(1, 6, (8,))])
    first, count = (torch.tensor([starts, counts]) if starts else drawn)[..., None]
    at = torch.arange(slots)
    seen = (at >= first) & (at < first + count)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) if additive else seen
    q3.check(f, mask[:, None, None])


q3.case("rows padded on the left, and not; a cache that is full, and not; one slot")(
    lambda f: [check_slots(f), check_slots(f, [0, 0], [3, 7], 7), check_slots(f, [0], [1], 1)]
)
q3.case("a mask of numbers: 0 for seen, -inf for hidden")(lambda f: check_slots(f, additive=True))
q3.case("no mask: ValueError, and no guess")(lambda f: [check_slots(f), refuses(f, None)])

q4 = Question("q4", "fake_attend", hint="Two `new_empty`: which shape, dtype and strides does the kernel return?")


def check_fake(f, q: Tensor, values: Tensor) -> None:
    found = f(q, torch.empty(*values.shape[:3], q.shape[-1], dtype=values.dtype), values)
    if not isinstance(found, tuple | list) or len(found) != 3 or not isinstance(found[2], tuple | list):
        raise AssertionError("return three things: the output, the log-sum, and the list of the output's strides")
    out, logsum, strides = as_tensor(found[0]), as_tensor(found[1]), list(found[2])
    shape = [*q.shape[:2], values.shape[-1]]
    for name, made, dtype, size in (("output", out, q.dtype, shape), ("log-sum", logsum, torch.float32, shape[:2])):
        got = made.dtype, list(made.shape)
        assert got == (dtype, size), f"the {name} is {got[0]} {got[1]}, the kernel gives {dtype} {size}"
    expected = [shape[1] * shape[2], shape[2], 1]
    also = ": `empty_like` takes over q's" if strides == list(torch.empty_like(q).stride()) else ""
    assert strides == expected, f"the strides are {strides}, the kernel writes without gaps, {expected}{also}"


q4.case("half precision: the output follows, the log-sum does not")(
    lambda f: check_fake(f, torch.randn(2, 4, 8).bfloat16(), torch.randn(2, 2, 5, 8).bfloat16())
)
q4.case("queries with heads outermost in memory, values with another head size than the keys, one row, one slot")(
    lambda f: [
        check_fake(f, torch.randn(6, 3, 8).transpose(0, 1), torch.randn(3, 2, 5, 8)),
        check_fake(f, torch.randn(4, 6, 8), torch.randn(4, 3, 5, 12)),
        check_fake(f, torch.randn(1, 2, 4), torch.randn(1, 1, 1, 6)),
    ]
)

q5 = Question("q5", "one_graph", hint="What can't the compiler look into? What must the host know?", seconds=30)


def step_by_loops(x, weights, keys, values, position) -> Tensor:
    """In float64, row by row."""
    out, seen = x.double(), (torch.arange(keys.shape[2]) <= position[:, None])[:, None, None]
    for weight, k, v in zip(weights.double(), keys[:, :, None], values[:, :, None], strict=True):
        out = out + attention_by_loops((out @ weight)[:, None], k, v, seen)[:, 0]
    return out.float()


def check_pieces(f, layers: int) -> None:
    rows, slots, size = draw(2, 4), draw(6, 9), 2 * draw(3, 6)
    x, weights = torch.randn(rows, size), torch.randn(layers, size, size) / size
    given = x, weights, *torch.randn(2, layers, rows, slots, size).unbind(0), torch.randint(1, slots - 1, (rows,))
    compare(f(*given), step_by_loops(*given), what="the output", atol=1e-4)
    ran = f.pieces(*given)
    every = [target for piece in ran for target in piece]
    read = sum("item" in target.split(".")[-2:] or target == "item" for target in every)
    own = [t for t in every if len(t.split(".")) == 3 and t.split(".")[0] not in ("torch", "aten", "prims", "_local")]
    assert ran, "Dynamo compiled nothing: it gave up on a function with a break inside a loop."
    assert not read, f"The host reads {read} numbers within the graph, and waits for the GPU each time."
    said = f"The step runs in {len(ran)} pieces"
    if len(own) < layers:
        left = "the kernel is still called where Dynamo can't look: register it as an operation, with a fake"
        assert len(ran) == 1, f"{said}, and {left}."
        raise AssertionError(f"One piece, but {len(own)} registered operations for {layers} layers: keep the kernel.")
    assert len(ran) == 1, f"{said}, though the kernel is an operation: where does the host need a number of the GPU's?"


q5.case("two layers, and more: one piece")(lambda f: [check_pieces(f, layers) for layers in (2, draw(3, 6))])
