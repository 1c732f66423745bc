"""Checks of lesson 08: small kernels, sectors of a warp, a layout without bank conflicts, a kernel to mend."""

import re

import torch
from torch import Tensor

import ptx_interpreter as ptx
from rlcourse.course.checks import Question, draw
from rlcourse.course.checks.kernels import check_kernel, kernel_question, loads

q1 = kernel_question("q1", "AddTen", "Thread number i does element number i: read it, add 10, write it.")


def check_add_ten(f, *sizes: int, spread: float = 1.0) -> None:
    for n in sizes:
        a = spread * torch.randn(n)
        mistakes = {
            "This is a, copied: add 10.": a,
            "You multiplied.": 10 * a,
            "Each thread wrote its own number, the place of its element.": torch.arange(n) + 10.0,
        }
        check_kernel(f, {"a": a}, a + 10, mistakes, f"{n} elements")


q1.case("64 numbers")(lambda f: check_add_ten(f, 64))
q1.case("64 large ones")(lambda f: check_add_ten(f, 64, spread=1000.0))

q2 = kernel_question("q2", "AddTenAnyLength", "i = block * self.threads + thread, and is there an element i?")
q2.case("several blocks, all of them full")(lambda f: check_add_ten(f, 64 * draw(2, 5)))
q2.case("a last block with threads to spare")(lambda f: check_add_ten(f, 64 * draw(1, 4) + draw(1, 63), draw(1, 63)))

q3 = kernel_question("q3", "Transpose", "Which row and which column of a does this thread of this tile have?")


def check_transpose(f, rows: int, columns: int) -> ptx.Report:
    a = torch.randn(rows, columns)
    mistakes = {"This is a itself: rows and columns change places in out.": a}
    return check_kernel(f, {"a": a}, a.T, mistakes, f"{rows} x {columns}")


q3.case("whole tiles, and any height and width")(
    lambda f: [check_transpose(f, *n) for n in ((16, 16), (draw(9, 15), draw(17, 23)), (draw(17, 30), draw(1, 7)))]
)


@q3.case("neighbouring lanes read neighbours")
def _(f):
    accesses = check_transpose(f, 32, 32).accesses.values()
    worst = min(access.efficiency for access in accesses if access.warps and access.text.startswith("ld"))
    assert worst == 1, f"Of the sectors that a warp reads it uses {worst:.0%}: let thread % 8 run along a row of a."


q4 = kernel_question("q4", "SumOfThree", "Bring a number each to shared memory, wait for all, then read three of them.")


def check_sum_of_three(f, **order) -> None:
    a = torch.randn(64)
    padded = torch.cat([torch.zeros(2), a])
    mistakes = {
        "The first two wrapped around: there is nothing before a[0].": a + a.roll(1) + a.roll(2),
        "Only two are added.": padded[2:] + padded[1:-1],
    }
    report = check_kernel(f, {"a": a}, padded[2:] + padded[1:-1] + padded[:-2], mistakes, **order)
    read, found = report.read["a"], loads(report)
    assert read == a.nbytes, f"of a's {a.nbytes} bytes {read} were read from memory: let each thread bring one number"
    assert found <= 2, f"Two warps loaded a with {found} loads: let each thread bring one number."


q4.case("the sums, and each number read once")(lambda f: check_sum_of_three(f))
q4.case("whichever warp is faster")(
    lambda f: [check_sum_of_three(f, order=order, seed=draw(0, 99)) for order in ("warp", "random")]
)

q5 = kernel_question("q5", "RowMax", "In five steps each lane keeps the larger of its own and of lane ^ 1, 2, 4, ...")


def check_row_max(f, a: Tensor) -> None:
    mistakes = {
        "Your lanes without a number hold 0: the maximum of negative numbers is negative.": a.amax(1).clamp(min=0),
        "This is each row's first number: the lanes never compared.": a[:, 0],
    }
    for lanes in (2, 4, 8, 16):
        mistakes[f"Only {lanes} lanes were compared: 32 need five steps, 1, 2, 4, 8 and 16."] = a[:, :lanes].amax(1)
    found = loads(check_kernel(f, {"a": a}, a.amax(1), mistakes, f"{len(a)} rows of {a.shape[1]}"))
    assert found <= len(a), f"{len(a)} rows took {found} loads and need one each: let each lane load one number, once."


q5.case("rows of 32")(lambda f: check_row_max(f, torch.randn(16, 32)))
q5.case("shorter rows, in which all numbers are negative")(lambda f: [
    check_row_max(f, -scale * (1 + torch.rand(12, n)))
    for n, scale in ((draw(17, 31), 1.0), (draw(2, 16), 1.0), (1, 1.0), (draw(17, 30), 1e36))
])  # fmt: skip

q6 = kernel_question("q6", "Product", "A thread has a row of a and a column of b: a loop over k, then one write.")


def check_product(f, m: int, k: int, n: int) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    mistakes = {"Only the last product is there: add them up.": a[:, -1:] * b[-1:]}
    if k == n:
        mistakes["You walked along a row of b: k counts its rows."] = a @ b.T
    exact, size = (a.double() @ b.double()).float(), f"{m} x {k} times {k} x {n}"
    check_kernel(f, {"a": a, "b": b}, exact, mistakes, size, atol=1e-4)


q6.case("squares of whole tiles, and any sizes")(lambda f: [
    check_product(f, *sizes)
    for sizes in ((16, 16, 16), (draw(9, 15), draw(3, 20), draw(17, 23)), (draw(1, 7), 1, draw(9, 15)))
])  # fmt: skip

q7 = Question("q7", "sectors", hint="A lane's access is in sector address // 32. Count the distinct ones of each warp.")
LINE = 128  # bytes, at a multiple of which an allocation begins


@q7.expects(also={
    "Lanes that are not active ask for nothing.": lambda a, size, active: loop_sectors(a, size, active | True),
    "Bytes over 32 is right only where they lie side by side.": lambda a, size, on: -(-on.sum(1) * size // 32),
    "You counted the lanes: several may share a sector.": lambda a, size, active: active.sum(1),
    "You counted lines of 128 bytes: a sector has 32.": lambda a, size, active: loop_sectors(a // 4, size, active),
})  # fmt: skip
def loop_sectors(addresses: Tensor, size: int, active: Tensor) -> Tensor:
    """Sectors of each warp by sets: [W]."""
    warps = zip(addresses.tolist(), active.tolist(), strict=True)
    return torch.tensor([len({a // 32 for a, on in zip(*warp, strict=True) if on}) for warp in warps])


@q7.case("with a stride, from an odd beginning, and in any order")
def _(f):
    apart = [step * torch.arange(64) for step in (0, 8, 20, 64, 128, 1000)]
    for addresses in (*apart, 16 + 4 * torch.arange(32), 4 * torch.randperm(256)[:64]):
        addresses = LINE * draw(1, 10**6) + addresses.view(-1, 32)
        q7.check(f, addresses, 4, torch.ones_like(addresses, dtype=torch.bool))


@q7.case("lanes that are not active, down to none")
def _(f):
    active = torch.rand(3, 32) < 0.5
    active[2] = False
    q7.check(f, LINE * draw(1, 10**6) + 32 * torch.arange(96).view(3, 32), 16, active)


q8 = Question("q8", "place", hint="Leave each element in its row: where does its column go, and why there?")
ACCESSES = {  # name: which of 32 accesses an element belongs to, from its row and column
    "row": lambda row, column: row,
    "column": lambda row, column: column,
    "sub-tile of 4 x 8": lambda row, column: row // 4 * 4 + column // 8,
}


@q8.cases_of({f"a warp takes a {access}": access for access in ACCESSES})
def _(f, access):
    """All words of the tile are used, each once, and the 32 elements of each access lie in 32 banks."""
    element = torch.randperm(1024)
    row, column = element // 32, element % 32
    word = f(row, column)
    if not isinstance(word, Tensor) or word.shape != row.shape or word.dtype.is_floating_point:
        raise AssertionError("place must return a whole number for each element, in a tensor of the shape of row")
    for at in ((word < 0) | (word >= 1024)).nonzero():
        raise AssertionError(f"there is no word {word[at].item()}: the tile has 1024, and no room to pad rows")
    order = word.argsort()
    for at in (word[order].diff() == 0).nonzero():
        one, two = ((row[i].item(), column[i].item()) for i in (order[at], order[at + 1]))
        raise AssertionError(f"{one} and {two} both go to word {word[order[at]].item()}")
    which = ACCESSES[access](row, column)
    for number in range(32):
        banks = len((word[which == number] % 32).unique())
        assert banks == 32, f"the 32 elements of {access} number {number} lie in {banks} banks, and not in 32"


q9 = kernel_question("q9", "ReluSquared", "Copy the colleague's lines; the card names her four mistakes one by one.")


def check_relu_squared(f, n: int) -> ptx.Report:
    gate, up = (torch.randn(n).to(torch.bfloat16) for _ in range(2))
    positive = gate.float().clamp(min=0)
    expected = (positive.double() ** 2 * up.double()).to(torch.bfloat16)
    without = (gate.float() ** 2 * up.float()).to(torch.bfloat16)
    whole = torch.arange(n) < n // 8 * 8
    mistakes = {
        "It rounds to bfloat16 on the way: round once, at the end.": positive.square().to(torch.bfloat16) * up,
        "The elements after the last whole piece have no relu.": torch.where(whole, expected, without),
        "The relu is missing: negative gates give 0.": without,
    }
    return check_kernel(f, {"gate": gate, "up": up}, expected, mistakes, f"n = {n}")


q9.case("the numbers, where n is a multiple of 8 x threads")(lambda f: check_relu_squared(f, 1024 * draw(1, 3)))
q9.case("any n: the last thread has less to do")(lambda f: [
    check_relu_squared(f, n) for n in (draw(1, 7), 8 * draw(1, 20), 8 * draw(1, 20) + draw(1, 7), 1024 + draw(1, 7))
])  # fmt: skip


@q9.case("16 bytes at once, each number once")
def _(f):
    n = 1024 * draw(2, 4)
    report = check_relu_squared(f, n)
    many = sum(access.warps for access in report.accesses.values())
    said = f"{many} loads and stores for {n} elements: copy whole pieces of 16 bytes, the last one (<= or <?) as well."
    assert many <= 3 * n // 8 // 32, said


q10 = kernel_question("q10", "RowNorm", "Shuffle within a warp, shares[warp] = sum, barrier, add up; and one more.")


def check_row_norm(f, rows: int, **order) -> None:
    x = torch.randn(rows, 512)
    squares = x.double().square()
    first = squares.view(rows, -1, 4, 32)[:, :, 0].sum((1, 2))  # of threads 0 to 31
    mistakes = {
        "You forgot the root.": squares.sum(1),
        "Only the first warp's share is in it: add up all of shares.": first.sqrt(),
        "The sum of a warp needs all its lanes: this is lane 0's own.": squares[:, ::32].sum(1).sqrt(),
    }
    report = check_kernel(f, {"x": x}, squares.sum(1).sqrt(), mistakes, f"{rows} rows", "y", atol=1e-3, **order)
    found, enough = loads(report), 16 * rows
    assert found <= enough, f"{found} loads, where {enough} are enough: each thread loads 4 numbers per row, once."


q10.case("one row, two rows of a block, an odd number of rows")(
    lambda f: [check_row_norm(f, rows) for rows in (1, 4, 2 * draw(1, 3) + 1)]
)
q10.case("in every order")(lambda f: [
    check_row_norm(f, rows, order=order, seed=draw(0, 10**6))
    for order, rows in (("warp", 4), ("serial", 4), ("random", 4), ("random", 3), ("random", 3))
])  # fmt: skip

q11 = kernel_question("q11", "RowSums", "Ask for the next row, commit, wait for all but the latest group, add up.")


def check_row_sums(f, rows: int) -> ptx.Report:
    x = torch.randn(rows, 128)
    mistakes = {"The sum of a row needs all lanes: this is lane 0's own.": x[:, :4].sum(1)}
    return check_kernel(f, {"x": x}, x.double().sum(1), mistakes, f"{rows} rows", "y", atol=1e-4)


q11.case("any number of rows, of which a block has four")(
    lambda f: [check_row_sums(f, n) for n in (4 * draw(1, 3), 1, draw(2, 3), 4 * draw(1, 2) + draw(1, 3))]
)


@q11.case("each number is copied once, and the next row is on its way")
def _(f):
    report = check_row_sums(f, 8)
    assert not loads(report) and report.read["x"] == 8 * 512, "Copy each row to shared memory, once, by cp.async."
    ahead = max(map(int, re.findall(r"wait_group\s+(\d+)", f().ptx)), default=0)
    assert ahead, "You wait for every copy before you add up: the latest group may be under way."
