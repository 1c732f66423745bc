"""q3: the operand of a tensor core."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

q3 = Question("q3", "value_registers", hint="Registers and lanes say the row and column; the row says the dimension.")


def registers(values: Tensor, row=lambda i, g, half: 8 * g + 2 * i + half, column=lambda c, p, far: 2 * c + p + 8 * far,
              order=(0, 1, 2), by_g=True) -> Tensor:  # fmt: skip
    """[4, 32, 8] by the definition; order: which bit of a register's number is pair, row half, column half."""
    found = torch.zeros(4, 32, 8)
    for i in range(4):
        for lane in range(32):
            g, c = (lane // 4, lane % 4) if by_g else (lane % 8, lane // 8)
            for number in range(8):
                bits = [number >> k & 1 for k in range(3)]
                p, half, far = (bits[k] for k in order)
                found[i, lane, number] = values[column(c, p, far), row(i, g, half)]
    return found


def check_registers(f, values: Tensor) -> None:
    mistakes = {
        "Rows are not given new numbers: row x of product i is dimension 8 (x mod 8) + 2 i + x div 8.": registers(
            values, row=lambda i, g, half: 16 * i + g + 8 * half
        ),
        "The second half of the rows (g + 8) belongs to the odd dimension of a pair, not to the next eight.": registers(
            values, row=lambda i, g, half: 8 * g + i + 4 * half
        ),
        "A lane's columns are 2c, 2c + 1, 2c + 8 and 2c + 9, not four in a row.": registers(
            values, column=lambda c, p, far: 4 * c + p + 2 * far
        ),
        "Registers 2 and 3 are the lower rows, 4 and 5 the farther columns: you have them exchanged.": registers(
            values, order=(0, 2, 1)
        ),
        "Registers 0 and 1 lie side by side in a row, not one below the other.": registers(values, order=(1, 0, 2)),
        "Lane 4 g + c: g is lane // 4 and c is lane % 4.": registers(values, by_g=False),
    }
    compare(f(values), registers(values), mistakes)


@q3.case("numbered values: token + dimension / 100")
def _(f):
    check_registers(f, torch.arange(16.0)[:, None] + torch.arange(64.0) / 100)
    check_registers(f, torch.randn(16, 64))


@q3.case("random values")
def _(f):
    check_registers(f, torch.randn(16, 64))


@q3.case("every value is held once")
def _(f):
    values = torch.randperm(1024).float().view(16, 64)
    found = torch.as_tensor(f(values))
    held = torch.bincount(found.flatten().long().clamp(0, 1023), minlength=1024)
    assert (held == 1).all(), (
        f"{int((held == 0).sum())} values are held by no lane, {int((held > 1).sum())} several times"
    )
    check_registers(f, values)
