"""q4: a probe of bits."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q4 = Question("q4", "first_to_part", hint="Compare each row with the same row one call earlier: the bits, as integers.")


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def planted(rows: int, width: int, at: int, how: str, dtype: torch.dtype) -> list[Tensor]:
    """What an operation gave for 1 to `rows` rows. Bits of a row that was there before change at `at` rows first, 0 for
    never. how: 'on' from there on, 'once', 'zero' by the sign of a zero."""
    base = torch.randn(rows, width).to(dtype)
    base[:, 0] = 0.0
    base[draw(0, rows - 1), 1] = torch.nan
    results = [base[: r + 1].clone() for r in range(rows)]
    if at:
        row = draw(0, at - 2)
        column = 0 if how == "zero" else draw(2, width - 1)
        value = bits(base[row])[column].item()
        changed = -(2**15) if dtype == torch.bfloat16 else -(2**31)  # -0.0
        for result in results[at - 1 : at if how == "once" else rows]:
            bits(result[row])[column] = changed if how == "zero" else value ^ 1
    return results


def check_parting(f, how: list[str], dtype: torch.dtype = torch.float32) -> None:
    for _ in range(2):
        rows, width = draw(6, 9), draw(4, 7)
        places = [0 if kind == "never" else draw(2, rows) for kind in how]
        places[0] = draw(3, rows - 1)
        results = [planted(rows, width, at, kind, dtype) for at, kind in zip(places, how, strict=True)]

        def first(different, results=results) -> Tensor:
            """The first number of rows at which `different(call, all calls)`, 0 for none."""
            found = []
            for calls in results:
                found.append(next((len(call) for call in calls[1:] if different(call, calls)), 0))
            return torch.tensor(found)

        mistakes = {
            "nan is not equal to itself, and yet its bits are: compare integers.": first(
                lambda call, calls: bool((call[:-1] != calls[len(call) - 2]).any())
            ),
            "0.0 and -0.0 are equal and have other bits.": first(
                lambda call, calls: not torch.equal(call[:-1].nan_to_num(), calls[len(call) - 2].nan_to_num())
            ),
            "A tolerance lets the last bit pass.": first(
                lambda call, calls: not torch.allclose(call[:-1], calls[len(call) - 2], equal_nan=True)
            ),
            "You looked at row 0 alone.": first(lambda call, calls: not torch.equal(bits(call[0]), bits(calls[0][0]))),
            "You compared with the last call: a row's bits are to be those of the call before.": first(
                lambda call, calls: not torch.equal(bits(call), bits(calls[-1][: len(call)]))
            ),
            "That is the call before the one that parts.": torch.tensor([max(at - 1, 0) for at in places]),
        }
        compare(f(results), torch.tensor(places), mistakes)


@q4.case("other bits from some number of rows on")
def _(f):
    check_parting(f, ["on", "never", "on", "on", "never"])


@q4.case("other bits in one call alone")
def _(f):
    check_parting(f, ["once", "on", "never", "once"])


@q4.case("the sign of a zero")
def _(f):
    check_parting(f, ["zero", "never", "zero"])


@q4.case("bf16")
def _(f):
    check_parting(f, ["on", "never", "once", "zero"], torch.bfloat16)
