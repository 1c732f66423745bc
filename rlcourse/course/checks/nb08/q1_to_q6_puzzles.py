"""q1 to q6: kernels of five minutes."""

import functools

import torch
from torch import Tensor

import ptx_interpreter as ptx
from rlcourse.course.checks import compare, draw
from rlcourse.course.checks.kernels import execute
from rlcourse.course.checks.nb08.common import check_kernel, loads, puzzle

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
    if loads(report) > 2:  # of the two warps, one each
        raise AssertionError(f"Two warps loaded a with {loads(report)} loads: let each thread bring one number.")


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
    report = check_kernel(f, {"a": a}, a.amax(1), mistakes, f"{len(a)} rows of {n}")
    if loads(report) > len(a):
        raise AssertionError(
            f"{len(a)} rows took {loads(report)} loads: let each lane load the number in its own column, all at once."
        )


@q5.case("rows of 32")
def _(f):
    check_row_max(f, torch.randn(draw(12, 16), 32))  # so many that some have the largest in the far half


@q5.case("shorter rows, in which all numbers are negative")
def _(f):
    kept = functools.cache(lambda: f())
    for n in (draw(17, 31), draw(2, 16), 1):
        check_row_max(kept, -1 - torch.rand(12, n))


@q5.case("shorter rows, in which all numbers are far below zero")
def _(f):
    check_row_max(f, -1e36 - 1e35 * torch.rand(12, draw(17, 30)))


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
