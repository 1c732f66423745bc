"""Checks of the exercises of lesson 08: a layout's offsets, sectors of a warp, thread-value layouts, and two kernels.

The kernels are compiled and run in the interpreter, and then on a GPU where there is one. They need CuTe DSL, which the
process of the grader does not have: `rlcourse grade` leaves them out (they are not in QUESTIONS).
"""

import functools
import math
import re

import torch
from torch import Tensor

from rlcourse import ptx
from rlcourse.course.checks import Maker, Question, compare, draw
from rlcourse.kernels.toolchain import compiled, simulate

q1 = Question("q1", "offsets", hint="Cut the number k into coordinates, the first mode fastest, then sum i * stride.")


def table(shape: list[int], stride: list[int], first_fastest: bool = True) -> Tensor:
    """Offsets by a sum of outer pieces, [product of shape]."""
    total = torch.zeros(shape, dtype=torch.int64)
    for mode, (size, step) in enumerate(zip(shape, stride, strict=True)):
        total += (step * torch.arange(size)).view([-1 if m == mode else 1 for m in range(len(shape))])
    return (total.permute(*reversed(range(len(shape)))) if first_fastest else total).flatten()


def check_offsets(f, shape: list[int], stride: list[int]) -> None:
    compact = [math.prod(shape[:mode]) for mode in range(len(shape))]
    mistakes = {
        "You left the strides out: these are the offsets of a column-major layout.": table(shape, compact),
        "Your last mode runs fastest: in CuTe it is the first.": table(shape, stride, first_fastest=False),
        "The strides are in the wrong order: the first belongs to the first mode.": table(shape, stride[::-1]),
    }
    compare(f(list(shape), list(stride)), table(shape, stride), mistakes)


@q1.case("column-major and row-major")
def _(f):
    rows, columns = draw(3, 40), draw(3, 40)
    check_offsets(f, [rows, columns], [1, rows])
    check_offsets(f, [rows, columns], [columns, 1])
    check_offsets(f, [3, 5], [5, 1])


@q1.case("padded rows, and a stride of 0")
def _(f):
    check_offsets(f, [4, 6], [6 + draw(1, 200), 1])
    check_offsets(f, [5, 3], [0, 2])


@q1.case("one mode, and the four of a tiled matrix")
def _(f):
    check_offsets(f, [draw(5, 40)], [draw(2, 90)])
    check_offsets(f, [2, 4, 2, 2], [8, 1, 16, 4])
    check_offsets(f, [2, 3, 4], [100, 10, 1])


q2 = Question(
    "q2", "sectors", hint="A lane's access lies in sector address // 32. Count the distinct ones of each warp."
)


def loop_sectors(addresses: Tensor, active: Tensor, joined: bool = False) -> Tensor:
    """Sectors of each warp by sets, [W]. joined: as if no two warps asked for the same sector."""
    seen, counts = set(), []
    for warp, lanes in zip(addresses.tolist(), active.tolist(), strict=True):
        mine = {address // 32 for address, on in zip(warp, lanes, strict=True) if on}
        counts.append(len(mine - seen) if joined else len(mine))
        seen |= mine
    return torch.tensor(counts)


def check_sectors(f, addresses: Tensor, size: int, active: Tensor | None = None) -> None:
    active = torch.ones_like(addresses, dtype=torch.bool) if active is None else active
    asked = active.sum(1) * size
    lowest = torch.where(active, addresses, 2**40).amin(1)
    span = torch.where(active, addresses, -1).amax(1) + size - lowest
    mistakes = {
        "Lanes that are not active ask for nothing.": loop_sectors(addresses, active | True),
        "You divided the bytes asked for by 32: that is right only where they lie side by side.": -(-asked // 32),
        "You took the distance from the first byte to the last: what lies between need not be moved.": -(-span // 32),
        "You counted the lanes: several may share a sector.": active.sum(1),
        "You counted a sector for one warp alone: each warp asks for itself.": loop_sectors(addresses, active, True),
        "You counted bytes: a sector has 32.": 32 * loop_sectors(addresses, active),
        "You counted lines of 128 bytes: a sector has 32.": loop_sectors(addresses // 4, active),
    }
    compare(f(addresses, size, active), loop_sectors(addresses, active), mistakes)


def base() -> int:
    """An address at which a line of 128 bytes begins."""
    return 128 * draw(1, 10**6)


@q2.case("neighbours: 4 bytes a lane, and 16")
def _(f):
    check_sectors(f, base() + 4 * torch.arange(64).view(2, 32), 4)
    check_sectors(f, base() + 16 * torch.arange(96).view(3, 32), 16)


@q2.case("with a stride, from an odd beginning, and in any order")
def _(f):
    for step in (8, 20, 64, 128, 1000):
        check_sectors(f, base() + step * torch.arange(64).view(2, 32), 4)
    check_sectors(f, base() + 16 + 4 * torch.arange(32)[None], 4)
    check_sectors(f, base() + 4 * torch.randperm(256)[:64].view(2, 32), 4)


@q2.case("all lanes at one address; two warps at the same addresses")
def _(f):
    check_sectors(f, torch.full((1, 32), base()), 4)
    check_sectors(f, (base() + 4 * torch.arange(32)).expand(3, 32).clone(), 4)


@q2.case("lanes that are not active, down to none")
def _(f):
    addresses = base() + 32 * torch.arange(96).view(3, 32)
    active = torch.rand(3, 32) < 0.5
    active[2] = False
    check_sectors(f, addresses, 16, active)


q3 = Question("q3", "thread_values", hint="Lane l's piece number i begins at element (i * lanes + l) * vector.")


def pieces_by_dealing(hidden: int, lanes: int, vector: int, blocked: bool = False, single: bool = False) -> Tensor:
    """Which elements each lane holds [lanes, values], by dealing out pieces one after another; -1 behind the end."""
    hands: list[list[int]] = [[] for _ in range(lanes)]
    rounds = -(-hidden // (lanes * vector))
    deal = [i // rounds for i in range(rounds * lanes)] if blocked else [i % lanes for i in range(rounds * lanes)]
    for number, lane in enumerate(deal):
        hands[lane] += range(number * vector, (number + 1) * vector)
    if single:
        hands = [[lane + lanes * i for i in range(rounds * vector)] for lane in range(lanes)]
    held = torch.tensor(hands)
    return torch.where(held < hidden, held, -1)


def check_thread_values(f, hidden: int, lanes: int, vector: int) -> None:
    expected = pieces_by_dealing(hidden, lanes, vector)
    rounds = expected.shape[1] // vector
    mistakes = {
        "Each lane has one long stretch: neighbours should take neighbouring pieces.": pieces_by_dealing(
            hidden, lanes, vector, blocked=True
        ),
        "Neighbouring lanes take single elements: then no lane has 16 bytes in a row.": pieces_by_dealing(
            hidden, lanes, vector, single=True
        ),
        "Elements behind the end must be -1.": pieces_by_dealing(rounds * lanes * vector, lanes, vector),
        "Result is [values, lanes]: a row is one lane.": expected.T,
    }
    compare(f(hidden, lanes, vector), expected, mistakes)


@q3.case("a row that fills all lanes")
def _(f):
    check_thread_values(f, 64, 4, 8)
    check_thread_values(f, 1024, 32, 8)
    check_thread_values(f, 16, 8, 2)
    check_thread_values(f, 6 * draw(2, 60), 6, 1)


@q3.case("a row whose end leaves lanes without work")
def _(f):
    check_thread_values(f, 896, 32, 8)
    check_thread_values(f, 40, 4, 8)
    check_thread_values(f, 5, 4, 1)
    check_thread_values(f, 21, 4, 4)
    check_thread_values(f, draw(50, 900), draw(3, 30), draw(2, 8))


@q3.case("one lane, and one value a piece")
def _(f):
    check_thread_values(f, 8 * draw(2, 200), 1, 8)
    check_thread_values(f, 4 * draw(2, 200), 4, 1)


q4 = Question(
    "q4",
    "ReluSquared",
    hint="WideAdd of the lesson, with 8 values a thread and other arithmetic.",
    seconds=90,
    caller=Maker,
)
MEANING = {
    ptx.OutOfBounds: "A thread went beyond a tensor: what is not there must not be touched.",
    ptx.Misaligned: "An access begins at an address that its size does not divide.",
    ptx.Uninitialised: "Something was read that nobody had written.",
    ptx.Divergent: "Threads wait for others that never come: all must reach a barrier or a shuffle.",
    ptx.Endless: "The kernel does not end.",
}
COLOUR = re.compile(r"\x1b\[\d+m")


def meaning(error: ptx.PTXError) -> str:
    """What an error of the interpreter says about the kernel."""
    if isinstance(error, ptx.Race) and "read it" in error.message:
        return "Shared memory is written again before all warps have read it: a barrier is missing behind the reads."
    if isinstance(error, ptx.Race) and "shared" in error.message:
        return "One warp reads what another wrote, and no barrier stands between the two."
    return MEANING.get(type(error), "Two warps use the same bytes, at least one writes, and nothing says who is first.")


def execute(f, *tensors: Tensor, **order) -> ptx.Report:
    """Run the reader's kernel on CPU tensors, which it changes in place, and on a GPU if there is one."""
    given = [tensor.clone() for tensor in tensors]
    try:
        kernel = f()
        report = simulate(kernel, *tensors, **order)
    except ptx.PTXError as error:
        raise AssertionError(f"{meaning(error)} ({error})") from None
    except (AssertionError, NotImplementedError):
        raise
    except Exception as error:
        text = next(line for line in [*COLOUR.sub("", str(error)).splitlines(), repr(error)] if line.strip())
        raise AssertionError(f"{type(error).__name__}: {text}") from None
    if torch.cuda.is_available():  # the interpreter found no mistake: nothing can be harmed there
        there = [tensor.cuda() for tensor in given]
        compiled(kernel)(*there)
        torch.testing.assert_close(there[-1].cpu(), tensors[-1], msg="on the GPU it gives another result")
    return report


def relu_squared(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate)^2 * up in float64, rounded once."""
    return (gate.double().clamp(min=0) ** 2 * up.double()).to(gate.dtype)


def check_relu_squared(f, n: int, **order) -> ptx.Report:
    gate, up = (torch.randn(n).to(torch.bfloat16) for _ in range(2))
    out = torch.full_like(gate, torch.nan)
    report = execute(f, gate, up, out, **order)
    positive = gate.float().clamp(min=0)
    mistakes = {
        "You rounded to bfloat16 on the way: convert to Float32 first, and back once, at the end.": (
            positive.square().to(torch.bfloat16) * up
        ).float(),
        "You forgot the square.": (positive * up.float()).to(torch.bfloat16).float(),
        "You forgot the relu: negative gates give 0.": (gate.float() ** 2 * up.float()).to(torch.bfloat16).float(),
        "You left out the product with up.": positive.square().to(torch.bfloat16).float(),
        "You squared up, not the gate.": (positive * up.float() ** 2).to(torch.bfloat16).float(),
    }
    if out.isnan().any():
        raise AssertionError(f"n = {n}: {int(out.isnan().sum())} elements of out were never written")
    compare(out.float(), relu_squared(gate, up).float(), mistakes, what=f"out for n = {n}")
    return report


@q4.case("the numbers, where n is a multiple of 8 x threads")
def _(f):
    check_relu_squared(f, 2048)


@q4.case("any n: the last thread has less to do")
def _(f):
    for n in (1, 7, 8, 1003, 1024 + 9):
        check_relu_squared(f, n)


@q4.case("16 bytes at once, each number once")
def _(f):
    report = check_relu_squared(f, 4096)
    used = [access for access in report.accesses.values() if access.warps]
    least = min(access.bytes / access.warps / 32 for access in used)
    if least < 16:
        raise AssertionError(f"A lane moves {least:g} bytes at once: use tiled_divide and autovec_copy for 16.")
    for name in ("gate", "up"):
        if report.read[name] != 2 * 4096:
            raise AssertionError(f"{name} has 8192 bytes and {report.read[name]} were read: load each number once.")


q5 = Question(
    "q5",
    "RowNorm",
    hint="Shuffle within a warp, shares[warp] = sum, barrier, add up; and one more.",
    seconds=90,
    caller=Maker,
)
HIDDEN = 512


def check_row_norm(f, rows: int, **order) -> None:
    x = torch.randn(rows, HIDDEN)
    y = torch.full((rows,), torch.nan)
    execute(f, x, y, **order)
    squares = x.double().square()
    mistakes = {
        "You forgot the root.": squares.sum(1).float(),
        "This is the root mean square: the norm has no mean.": squares.mean(1).sqrt().float(),
        "Only the first warp's share is in it: add up all of shares.": by_warps(squares)[:, 0].sqrt().float(),
        "Only the last warp's share is in it: add up all of shares.": by_warps(squares)[:, -1].sqrt().float(),
        "The sum of a warp needs all its lanes: this is lane 0's own.": squares[:, ::32].sum(1).sqrt().float(),
    }
    if y.isnan().any():
        raise AssertionError(f"{rows} rows: number {int(y.isnan().nonzero()[0])} of y was never written")
    compare(y, squares.sum(1).sqrt().float(), mistakes, what=f"y for {rows} rows", atol=1e-3)


def by_warps(squares: Tensor) -> Tensor:
    """Sums of the four warps if thread t takes elements t, t + 128, ...: [rows, 4]."""
    return squares.view(len(squares), -1, 4, 32).sum((1, 3))


@q5.case("one row: what crosses from warp to warp")
def _(f):
    check_row_norm(f, 1)


@q5.case("two rows of a block: shared memory is used again")
def _(f):
    check_row_norm(f, 4)


@q5.case("an odd number of rows: the last block has one")
def _(f):
    check_row_norm(f, 5)


@q5.case("in every order")
def _(f):
    kept = functools.cache(lambda: f())  # one kernel: it is compiled once
    for order in ("warp", "serial", "random"):
        check_row_norm(kept, 4, order=order)
    for seed in range(3):
        check_row_norm(kept, 3, order="random", seed=seed)


QUESTIONS = {"q1": q1, "q2": q2, "q3": q3}  # what a process without CuTe DSL can grade
KERNELS = {"q4": q4, "q5": q5}  # checked in the notebook alone
