"""Integer instructions, all against Python's integers of any size."""

import operator

import numpy as np
import pytest
from handwritten import calculate

EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF]
RNG = np.random.default_rng(0)


def pairs(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of edges, and random ones."""
    edges = [e | e << 32 for e in EDGES] if bits == 64 else [e % (1 << bits) for e in EDGES]
    grid = [(a, b) for a in edges for b in edges] + RNG.integers(0, 1 << bits, (200, 2), np.uint64).tolist()
    a, b = np.array(grid, dtype=np.uint64).T
    return a.astype(f"uint{bits}"), b.astype(f"uint{bits}")


def signed(x: int, bits: int) -> int:
    x %= 1 << bits
    return x - (1 << bits) if x >> bits - 1 else x


def read(kind: str):
    """An integer of 32 or 64 bits as its type says."""
    return (lambda x: signed(int(x), int(kind[1:]))) if kind[0] == "s" else int


def check(instruction: str, expected, dtype=None, **inputs) -> None:
    """%d is `expected` of one element of each input, cut to its size."""
    dtype = np.dtype(dtype or inputs["a"].dtype)
    found = calculate(instruction, dtype, **inputs).tolist()
    rows = zip(*(array.tolist() for array in inputs.values()), strict=True)
    assert found == [expected(*row) % (1 << 8 * dtype.itemsize) for row in rows]


def truncated(a: int, b: int) -> int:
    """a / b towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", BINARY)
def test_binary_operations_wrap_around_like_the_lowest_bits_of_the_exact_result(name, kind):
    bits, value = int(kind[1:]), read(kind)
    a, b = pairs(bits)
    check(f"{name}.{kind} %d, %a, %b;", lambda x, y: BINARY[name](value(x), value(y), bits), a=a, b=b)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_division_rounds_towards_zero(kind):
    value = read(kind)
    a, b = pairs(int(kind[1:]))
    a, b = a[b != 0], b[b != 0]
    check(f"div.{kind} %d, %a, %b;", lambda x, y: truncated(value(x), value(y)), a=a, b=b)
    check(f"rem.{kind} %d, %a, %b;", lambda x, y: value(x) - truncated(value(x), value(y)) * value(y), a=a, b=b)


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_wide_products_and_sums_keep_all_bits(kind):
    value = read(kind)
    a, b = pairs(32)
    c = RNG.integers(0, 1 << 63, len(a), np.uint64)
    check(f"mul.wide.{kind} %d, %a, %b;", lambda x, y: value(x) * value(y), np.uint64, a=a, b=b)
    check(f"mad.wide.{kind} %d, %a, %b, %c;", lambda x, y, z: value(x) * value(y) + z, np.uint64, a=a, b=b, c=c)
    check(f"mad.hi.{kind} %d, %a, %b, %a;", lambda x, y: (value(x) * value(y) >> 32) + x, a=a, b=b)


@pytest.mark.parametrize("bits", [32, 64])
def test_shifts_past_the_last_bit_leave_nothing_or_the_sign(bits):
    a, _ = pairs(bits)
    by = np.resize(np.array([0, 1, 5, 31, 32, 33, 63, 64, 200, 0xFFFFFFFF], np.uint32), len(a))
    check(f"shl.b{bits} %d, %a, %b;", lambda x, s: x << s if s < bits else 0, a=a, b=by)
    check(f"shr.u{bits} %d, %a, %b;", lambda x, s: x >> min(s, bits), a=a, b=by)
    check(f"shr.s{bits} %d, %a, %b;", lambda x, s: signed(x, bits) >> min(s, bits), a=a, b=by)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_a_funnel_shift_cuts_32_bits_from_64(mode):
    a, b = pairs(32)
    by = np.resize(np.array([0, 1, 7, 31, 32, 40], np.uint32), len(a))
    shift = (lambda s: s % 32) if mode == "wrap" else (lambda s: min(s, 32))
    check(f"shf.l.{mode}.b32 %d, %a, %b, %c;", lambda x, y, s: (y << 32 | x) << shift(s) >> 32, a=a, b=b, c=by)
    check(f"shf.r.{mode}.b32 %d, %a, %b, %c;", lambda x, y, s: (y << 32 | x) >> shift(s), a=a, b=b, c=by)


UNARY = {
    "popc.b32": int.bit_count,
    "clz.b32": lambda x: 32 - x.bit_length(),
    "not.b32": lambda x: ~x,
    "neg.s32": lambda x: -x,
    "abs.s32": lambda x: abs(signed(x, 32)),
}


@pytest.mark.parametrize("name", UNARY)
def test_bits_are_counted_and_inverted(name):
    check(f"{name} %d, %a;", UNARY[name], a=pairs(32)[0])


def test_an_unsigned_immediate_may_be_printed_as_a_negative_number():
    """As compilers print a constant of Philox."""
    a, _ = pairs(32)
    check("mul.hi.u32 %d, %a, -766435501;", lambda x: x * 0xD2511F53 >> 32, a=a)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_setp_and_selp_choose_by_the_sign_that_the_type_says(name, kind):
    a, b = pairs(int(kind[1:]))
    value, holds = read(kind), getattr(operator, name)
    body = f"setp.{name}.{kind} %p|%q, %a, %b; selp.b32 %u, 1, 2, %p; @%q add.u32 %u, %u, 10; mov.b32 %d, %u;"
    check(body, lambda x, y: 1 if holds(value(x), value(y)) else 12, np.uint32, a=a, b=b)


def test_setp_joins_with_another_predicate_or_its_opposite():
    a, b = pairs(32)
    body = """
    setp.gt.u32 %q, %a, 100;
    setp.lt.and.u32 %p, %a, %b, %q;
    selp.b32 %u, 1, 0, %p;
    setp.lt.or.u32 %p, %a, %b, !%q;
    @%p add.u32 %u, %u, 2;
    mov.b32 %d, %u;
    """
    check(body, lambda x, y: (x < y and x > 100) + 2 * (x < y or x <= 100), a=a, b=b)


def test_mov_cuts_and_joins_registers():
    a, b = pairs(32)
    check("mov.b32 {%h1, %h2}, %a; mov.b32 %d, {%h2, %h1};", lambda x: x << 16 | x >> 16, a=a)
    check("mov.b32 {_, %h2}, %a; cvt.u32.u16 %d, %h2;", lambda x: x >> 16, a=a)
    check("mov.b64 %d, {%a, %b};", lambda x, y: y << 32 | x, np.uint64, a=a, b=b)
    quarter = "mov.b64 %l, {%a, %b}; mov.b64 {%h1, %h2, %h3, %h4}, %l; cvt.u32.u16 %d, %h4;"
    check(quarter, lambda x, y: y >> 16, a=a, b=b)
