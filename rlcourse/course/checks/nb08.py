"""Checks of the exercises of lesson 08: six small kernels, the sectors of a warp, a layout without bank conflicts, a
kernel to mend, and one with shared memory.

The kernels are compiled, which needs CuTe DSL, and run in the interpreter; in a notebook then on a GPU as well, where
there is one.
"""

import functools
import re

import torch
from torch import Tensor

from rlcourse import ptx
from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.kernels import SECONDS, Maker, execute
from rlcourse.ptx.report import Access


def check_kernel(f, inputs: dict[str, Tensor], expected: Tensor, mistakes: dict, size: str = "", **order) -> ptx.Report:
    """Run a kernel and compare its output, which is its last tensor, `out`, with what it should be."""
    out = torch.full(expected.shape, torch.nan, dtype=next(iter(inputs.values())).dtype)
    report = execute(f, inputs | {"out": out}, **order)
    where = f" for {size}" if size else ""
    if out.isnan().any():
        raise AssertionError(f"{int(out.isnan().sum())} of {out.numel()} elements of out were never written{where}")
    compare(out.float(), expected.float(), mistakes, what=f"out{where}")
    return report


def puzzle(name: str, function: str, hint: str) -> Question:
    return Question(name, function, hint, seconds=SECONDS, caller=Maker)


# q1 to q6: one idea each -----------------------------------------------------------------------------------------

q1 = puzzle("q1", "AddTen", "Thread number i does element number i: read it, add 10, write it.")


def check_add_ten(f, n: int, spread: float = 1.0) -> None:
    a = spread * torch.randn(n)
    mistakes = {
        "This is a, copied: add 10.": a,
        "This is 10 everywhere: read a.": torch.full((n,), 10.0),
        "You multiplied.": 10 * a,
        "You read the same element in every thread.": (a[:1] + 10).expand(n),
        "Each thread wrote its own number: it is the place of its element, not the element.": torch.arange(n) + 10.0,
    }
    check_kernel(f, {"a": a}, a + 10, mistakes, f"{n} elements")


@q1.case("64 numbers")
def _(f):
    check_add_ten(f, 64)


@q1.case("64 large ones")
def _(f):
    check_add_ten(f, 64, spread=1000.0)


q2 = puzzle("q2", "AddTenAnyLength", "i = block * self.threads + thread, and is there an element i?")


@q2.case("several blocks, all of them full")
def _(f):
    check_add_ten(f, 64 * draw(2, 5))


@q2.case("a last block with threads to spare")
def _(f):
    kept = functools.cache(lambda: f())  # one kernel: it is compiled once
    check_add_ten(kept, 64 * draw(1, 4) + draw(1, 63))
    check_add_ten(kept, draw(1, 63))


q3 = puzzle("q3", "Transpose", "Which row and which column of a does this thread of this tile have?")


def check_transpose(f, rows: int, columns: int) -> ptx.Report:
    a = torch.randn(rows, columns)
    mistakes = {"This is a itself: rows and columns change places in out.": a} if rows == columns else {}
    return check_kernel(f, {"a": a}, a.T, mistakes, f"{rows} x {columns}")


@q3.case("a square of whole tiles")
def _(f):
    check_transpose(f, 16, 16)


@q3.case("any height and width")
def _(f):
    kept = functools.cache(lambda: f())
    for rows, columns in ((8, 24), (draw(9, 15), draw(17, 23)), (draw(17, 30), draw(1, 7))):
        check_transpose(kept, rows, columns)


@q3.case("neighbouring lanes read neighbours")
def _(f):
    report = check_transpose(f, 32, 32)
    loads = [access for _, access in sorted(report.accesses.items()) if access.warps and access.text.startswith("ld")]
    worst = min((access.efficiency for access in loads), default=0.0)
    if worst < 1:
        raise AssertionError(
            f"Of the sectors that a warp reads it uses {worst:.0%}: let thread % 8 run along a row of a."
        )


q4 = puzzle("q4", "SumOfThree", "Bring a number each to shared memory, wait for all, then read three of them.")


def check_sum_of_three(f, **order) -> None:
    a = torch.randn(64)
    padded = torch.cat([torch.zeros(2), a])
    expected = padded[2:] + padded[1:-1] + padded[:-2]
    around = a + a.roll(1) + a.roll(2)
    ahead = torch.cat([a, torch.zeros(2)])
    mistakes = {
        "The first two wrapped around: before a[0] stands nothing.": around,
        "You added the two that follow, not the two before.": ahead[:-2] + ahead[1:-1] + ahead[2:],
        "Only two are added.": padded[2:] + padded[1:-1],
        "Your sum leaves the element itself out.": padded[1:-1] + padded[:-2],
    }
    report = check_kernel(f, {"a": a}, expected, mistakes, **order)
    if report.read["a"] != a.nbytes:
        raise AssertionError(
            f"a has {a.nbytes} bytes and {report.read['a']} were read from memory: let each thread bring one number."
        )


@q4.case("the sums, and each number read once")
def _(f):
    check_sum_of_three(f)


@q4.case("whichever warp is faster")
def _(f):
    kept = functools.cache(lambda: f())
    for order in ("warp", "random"):
        check_sum_of_three(kept, order=order, seed=draw(0, 99))


q5 = puzzle("q5", "RowMax", "In five steps each lane keeps the larger of its own value and that of lane ^ 1, 2, 4, ...")


def check_row_max(f, a: Tensor) -> None:
    n = a.shape[1]
    mistakes = {
        "Your lanes without a number hold 0: the maximum of negative numbers is negative.": a.amax(1).clamp(min=0),
        "This is the sum.": a.sum(1),
        "This is the smallest.": a.amin(1),
        "This is each row's first number: the lanes never compared.": a[:, 0],
    }
    for steps in range(1, 5):
        group = a[:, : min(n, 2**steps)].amax(1)
        mistakes[f"Only {2**steps} lanes were compared: 32 need five steps, 1, 2, 4, 8 and 16."] = group
    check_kernel(f, {"a": a}, a.amax(1), mistakes, f"{len(a)} rows of {n}")


@q5.case("rows of 32")
def _(f):
    check_row_max(f, torch.randn(draw(12, 16), 32))  # so many that some have the largest in the far half


@q5.case("shorter rows, in which all numbers are negative")
def _(f):
    kept = functools.cache(lambda: f())
    for n in (draw(17, 31), draw(2, 16), 1):
        check_row_max(kept, -1 - torch.rand(12, n))


@q5.case("shorter rows with large numbers")
def _(f):
    check_row_max(f, -1e6 - 1e5 * torch.rand(12, draw(17, 30)))


q6 = puzzle("q6", "Product", "A thread has a row of a and a column of b: a loop over k, then one write.")


def check_product(f, m: int, k: int, n: int) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    exact = (a.double() @ b.double()).float()
    mistakes = {
        "Only the last product is there: add them up.": a[:, -1:] * b[-1:],
        "Only the first product is there: add them up.": a[:, :1] * b[:1],
        "The last product is missing.": (a[:, :-1] @ b[:-1]),
    }
    if k == n:
        mistakes["You walked along a row of b: k counts its rows."] = a @ b.T
    if m == k == n:
        mistakes["This is b times a."] = b @ a
    out = torch.full((m, n), torch.nan)
    execute(f, {"a": a, "b": b, "out": out})
    size = f"{m} x {k} times {k} x {n}"
    if out.isnan().any():
        raise AssertionError(f"{int(out.isnan().sum())} elements of out were never written for {size}")
    compare(out, exact, mistakes, what=f"out for {size}", atol=1e-4)


@q6.case("squares of whole tiles")
def _(f):
    check_product(f, 16, 16, 16)


@q6.case("any sizes")
def _(f):
    kept = functools.cache(lambda: f())
    for size in ((draw(9, 15), draw(3, 20), draw(17, 23)), (draw(1, 7), 1, draw(9, 15))):
        check_product(kept, *size)


# q7: sectors -----------------------------------------------------------------------------------------------------

q7 = Question(
    "q7", "sectors", hint="A lane's access lies in sector address // 32. Count the distinct ones of each warp."
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


@q7.case("neighbours: 4 bytes a lane, and 16")
def _(f):
    check_sectors(f, base() + 4 * torch.arange(64).view(2, 32), 4)
    check_sectors(f, base() + 16 * torch.arange(96).view(3, 32), 16)


@q7.case("with a stride, from an odd beginning, and in any order")
def _(f):
    for step in (8, 20, 64, 128, 1000):
        check_sectors(f, base() + step * torch.arange(64).view(2, 32), 4)
    check_sectors(f, base() + 16 + 4 * torch.arange(32)[None], 4)
    check_sectors(f, base() + 4 * torch.randperm(256)[:64].view(2, 32), 4)


@q7.case("all lanes at one address; two warps at the same addresses")
def _(f):
    check_sectors(f, torch.full((1, 32), base()), 4)
    check_sectors(f, (base() + 4 * torch.arange(32)).expand(3, 32).clone(), 4)


@q7.case("lanes that are not active, down to none")
def _(f):
    addresses = base() + 32 * torch.arange(96).view(3, 32)
    active = torch.rand(3, 32) < 0.5
    active[2] = False
    check_sectors(f, addresses, 16, active)


# q8: banks -------------------------------------------------------------------------------------------------------

BANKS = 32
q8 = Question(
    "q8", "place", hint="Leave each element in its row: which column goes where, and what does that depend on?"
)
ACCESSES = {  # name: which of 32 accesses an element belongs to, from its row and column
    "row": lambda row, column: row,
    "column": lambda row, column: column,
    "sub-tile of 4 x 8": lambda row, column: row // 4 * 4 + column // 8,
}


def check_place(f, access: str) -> None:
    """All words of the tile are used, each once, and the 32 elements of each access lie in 32 banks."""
    element = torch.randperm(BANKS * BANKS)
    row, column = element // BANKS, element % BANKS
    word = f(row, column)
    if not isinstance(word, Tensor) or word.shape != row.shape or word.dtype.is_floating_point:
        raise AssertionError("place must return a whole number for each element, in a tensor of the shape of row")
    if not bool(((word >= 0) & (word < BANKS * BANKS)).all()):
        at = int(((word < 0) | (word >= BANKS * BANKS)).nonzero()[0])
        raise AssertionError(
            f"({row[at]}, {column[at]}) goes to word {word[at]}, and the tile has {BANKS * BANKS}: there is no room to "
            "pad rows."
        )
    order = word.argsort()
    if bool((word[order].diff() == 0).any()):
        at = int((word[order].diff() == 0).nonzero()[0])
        one, two = order[at], order[at + 1]
        raise AssertionError(
            f"({row[one]}, {column[one]}) and ({row[two]}, {column[two]}) both go to word {word[one]}."
        )
    banks = [set() for _ in range(BANKS)]
    for which, bank in zip(ACCESSES[access](row, column).tolist(), (word % BANKS).tolist(), strict=True):
        banks[which].add(bank)
    fewest = min(range(BANKS), key=lambda which: len(banks[which]))
    if len(banks[fewest]) < BANKS:
        raise AssertionError(
            f"The 32 elements of {access} number {fewest} lie in {len(banks[fewest])} banks: a warp takes "
            f"{-(-BANKS // len(banks[fewest]))} or more turns for them."
        )


@q8.case("a warp takes a row")
def _(f):
    check_place(f, "row")


@q8.case("a warp takes a column")
def _(f):
    check_place(f, "column")


@q8.case("a warp takes a sub-tile of 4 x 8")
def _(f):
    check_place(f, "sub-tile of 4 x 8")


# q9: a kernel to mend --------------------------------------------------------------------------------------------

q9 = Question(
    "q9",
    "ReluSquared",
    hint="Copy the colleague's lines, then let the card tell you which of the four mistakes comes next.",
    seconds=SECONDS,
    caller=Maker,
)


def relu_squared(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate)^2 * up in float64, rounded once."""
    return (gate.double().clamp(min=0) ** 2 * up.double()).to(gate.dtype)


def check_relu_squared(f, n: int, **order) -> ptx.Report:
    gate, up = (torch.randn(n).to(torch.bfloat16) for _ in range(2))
    positive = gate.float().clamp(min=0)
    expected, without = relu_squared(gate, up), (gate.float() ** 2 * up.float()).to(torch.bfloat16)
    whole = torch.arange(n) < n // 8 * 8
    mistakes = {
        "It rounds to bfloat16 on the way: round once, at the end.": (
            positive.square().to(torch.bfloat16) * up
        ).float(),
        "The elements after the last whole piece have no relu.": torch.where(whole, expected, without).float(),
        "The square is missing.": (positive * up.float()).to(torch.bfloat16).float(),
        "The relu is missing: negative gates give 0.": without.float(),
        "The product with up is missing.": positive.square().to(torch.bfloat16).float(),
        "That is the square of up, not of the gate.": (positive * up.float() ** 2).to(torch.bfloat16).float(),
    }
    return check_kernel(f, {"gate": gate, "up": up}, expected, mistakes, f"n = {n}", **order)


@q9.case("the numbers, where n is a multiple of 8 x threads")
def _(f):
    check_relu_squared(f, 1024 * draw(1, 3))


@q9.case("any n: the last thread has less to do")
def _(f):
    kept = functools.cache(lambda: f())
    for n in (draw(1, 7), 8 * draw(1, 20), 8 * draw(1, 20) + draw(1, 7), 1024 + draw(1, 7)):
        check_relu_squared(kept, n)


def bytes_a_lane(access: Access) -> int:
    """What one lane moves in a load or store: the opcode says how many values of how many bits."""
    many, bits = re.search(r"(?:\.v(\d))?\.[a-z]+(\d+)$", access.text.split()[0]).groups()
    return int(many or 1) * int(bits) // 8


@q9.case("16 bytes at once, each number once")
def _(f):
    n = 1024 * draw(2, 4)
    report = check_relu_squared(f, n)
    used = [access for access in report.accesses.values() if access.warps]
    narrow = [access for access in used if bytes_a_lane(access) < 16]
    if narrow and sum(access.bytes for access in narrow) < sum(access.bytes for access in used) / 8:
        raise AssertionError(
            f"n = {n} is a multiple of 8, and its last 8 elements went through the branch for the rest: is it < where "
            "<= belongs?"
        )
    if narrow:
        raise AssertionError(
            f"A lane moves {bytes_a_lane(narrow[0])} bytes at once ({narrow[0].text.split()[0]}): copy whole pieces, "
            "as she does with the gate."
        )
    for name in ("gate", "up"):
        if report.read[name] != 2 * n:
            raise AssertionError(f"{name} has {2 * n} bytes and {report.read[name]} were read: load each number once.")


# q10: shared memory ----------------------------------------------------------------------------------------------

q10 = Question(
    "q10",
    "RowNorm",
    hint="Shuffle within a warp, shares[warp] = sum, barrier, add up; and one more.",
    seconds=SECONDS,
    caller=Maker,
)
HIDDEN = 512


def check_row_norm(f, rows: int, **order) -> None:
    x = torch.randn(rows, HIDDEN)
    y = torch.full((rows,), torch.nan)
    execute(f, {"x": x, "y": y}, **order)
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


@q10.case("one row: what crosses from warp to warp")
def _(f):
    check_row_norm(f, 1)


@q10.case("two rows of a block: shared memory is used again")
def _(f):
    check_row_norm(f, 4)


@q10.case("an odd number of rows: the last block has one")
def _(f):
    check_row_norm(f, 2 * draw(1, 3) + 1)


@q10.case("in every order")
def _(f):
    kept = functools.cache(lambda: f())
    for order in ("warp", "serial", "random"):
        check_row_norm(kept, 4, order=order)
    for _ in range(3):
        check_row_norm(kept, 3, order="random", seed=draw(0, 10**6))


QUESTIONS = {"q7": q7, "q8": q8}
KERNELS = {"q1": q1, "q2": q2, "q3": q3, "q4": q4, "q5": q5, "q6": q6, "q9": q9, "q10": q10}
