"""Integer instructions, all against Python's integers of any size."""

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


def truncated(a: int, b: int) -> int:
    """a / b towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def clamped_shift(a, b, bits):
    return a << b if b < bits else 0


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
    bits = int(kind[1:])
    a, b = pairs(bits)
    found = calculate(f"{name}.{kind} %d, %a, %b;", a.dtype, a=a, b=b)
    value = (lambda x: signed(int(x), bits)) if kind[0] == "s" else int
    expected = [BINARY[name](value(x), value(y), bits) % (1 << bits) for x, y in zip(a, b, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_division_rounds_towards_zero(kind):
    bits = int(kind[1:])
    a, b = pairs(bits)
    a, b = a[b != 0], b[b != 0]
    value = (lambda x: signed(int(x), bits)) if kind[0] == "s" else int
    quotients = [truncated(value(x), value(y)) for x, y in zip(a, b, strict=True)]
    assert calculate(f"div.{kind} %d, %a, %b;", a.dtype, a=a, b=b).tolist() == [q % (1 << bits) for q in quotients]
    rests = [value(x) - q * value(y) for x, y, q in zip(a, b, quotients, strict=True)]
    assert calculate(f"rem.{kind} %d, %a, %b;", a.dtype, a=a, b=b).tolist() == [r % (1 << bits) for r in rests]


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_wide_products_and_sums_keep_all_bits(kind):
    a, b = pairs(32)
    c = RNG.integers(0, 1 << 63, len(a), np.uint64)
    value = (lambda x: signed(int(x), 32)) if kind[0] == "s" else int
    products = [value(x) * value(y) for x, y in zip(a, b, strict=True)]
    wide = 1 << 64
    assert calculate(f"mul.wide.{kind} %d, %a, %b;", np.uint64, a=a, b=b).tolist() == [p % wide for p in products]
    sums = [(p + int(z)) % wide for p, z in zip(products, c, strict=True)]
    assert calculate(f"mad.wide.{kind} %d, %a, %b, %c;", np.uint64, a=a, b=b, c=c).tolist() == sums
    high = [((p >> 32) + int(x)) % (1 << 32) for p, x in zip(products, a, strict=True)]
    assert calculate(f"mad.hi.{kind} %d, %a, %b, %a;", np.uint32, a=a, b=b).tolist() == high


@pytest.mark.parametrize(("kind", "bits"), [("b32", 32), ("b64", 64)])
def test_shifts_past_the_last_bit_leave_nothing_or_the_sign(kind, bits):
    a, _ = pairs(bits)
    by = np.resize(np.array([0, 1, 5, 31, 32, 33, 63, 64, 200, 0xFFFFFFFF], np.uint32), len(a))
    cases = list(zip(a.tolist(), by.tolist(), strict=True))
    left = [clamped_shift(x, s, bits) % (1 << bits) for x, s in cases]
    assert calculate(f"shl.{kind} %d, %a, %b;", a.dtype, a=a, b=by).tolist() == left
    right = [x >> min(s, bits) for x, s in cases]
    assert calculate(f"shr.u{bits} %d, %a, %b;", a.dtype, a=a, b=by).tolist() == right
    arithmetic = [(signed(x, bits) >> min(s, bits)) % (1 << bits) for x, s in cases]
    assert calculate(f"shr.s{bits} %d, %a, %b;", a.dtype, a=a, b=by).tolist() == arithmetic


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
@pytest.mark.parametrize("direction", ["l", "r"])
def test_a_funnel_shift_cuts_32_bits_from_64(direction, mode):
    a, b = pairs(32)
    by = np.resize(np.array([0, 1, 7, 31, 32, 40], np.uint32), len(a))
    expected = []
    for low, high, s in zip(a.tolist(), b.tolist(), by.tolist(), strict=True):
        s = s % 32 if mode == "wrap" else min(s, 32)
        both = high << 32 | low
        expected.append((both << s >> 32 if direction == "l" else both >> s) % (1 << 32))
    found = calculate(f"shf.{direction}.{mode}.b32 %d, %a, %b, %c;", np.uint32, a=a, b=b, c=by)
    assert found.tolist() == expected


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe_takes_a_field_and_repeats_its_sign(kind):
    bits = int(kind[1:])
    a, _ = pairs(bits)
    position = np.resize(np.array([0, 1, 8, 31, 33, 63, 70], np.uint32), len(a))
    length = np.resize(np.array([0, 1, 5, 8, 24, 32, 64, 255], np.uint32), len(a))
    expected = []
    for x, p, n in zip(a.tolist(), position.tolist(), length.tolist(), strict=True):  # bit by bit, as PTX defines it
        sign = 0 if kind[0] == "u" or n == 0 else x >> min(p + n - 1, bits - 1) & 1
        field = [x >> p + i & 1 if i < n and p + i < bits else sign for i in range(bits)]
        expected.append(sum(bit << i for i, bit in enumerate(field)))
    assert calculate(f"bfe.{kind} %d, %a, %b, %c;", a.dtype, a=a, b=position, c=length).tolist() == expected


def test_bfi_puts_a_field_into_another_number():
    a, b = pairs(32)
    position = np.resize(np.array([0, 1, 8, 31, 40], np.uint32), len(a))
    length = np.resize(np.array([0, 1, 5, 8, 24, 32, 64], np.uint32), len(a))
    expected = []
    for x, y, p, n in zip(a.tolist(), b.tolist(), position.tolist(), length.tolist(), strict=True):
        for i in range(n):
            if p + i < 32:
                y = y & ~(1 << p + i) | (x >> i & 1) << p + i
        expected.append(y)
    found = calculate("bfi.b32 %d, %a, %b, %c, %e;", np.uint32, a=a, b=b, c=position, e=length)
    assert found.tolist() == expected


def test_bits_are_counted_found_and_reversed():
    a, _ = pairs(32)
    words = a.tolist()

    def found(instruction):
        return calculate(f"{instruction} %d, %a;", np.uint32, a=a).tolist()

    assert found("popc.b32") == [x.bit_count() for x in words]
    assert found("clz.b32") == [32 - x.bit_length() for x in words]
    assert found("brev.b32") == [int(f"{x:032b}"[::-1], 2) for x in words]
    assert found("bfind.u32") == [x.bit_length() - 1 if x else 0xFFFFFFFF for x in words]
    flipped = [x if x < 1 << 31 else x ^ 0xFFFFFFFF for x in words]
    assert found("bfind.s32") == [x.bit_length() - 1 if x else 0xFFFFFFFF for x in flipped]
    assert found("not.b32") == [x ^ 0xFFFFFFFF for x in words]
    assert found("cnot.b32") == [int(x == 0) for x in words]
    assert found("neg.s32") == [-x % (1 << 32) for x in words]
    assert found("abs.s32") == [abs(signed(x, 32)) for x in words]


@pytest.mark.parametrize("table", [0x96, 0xEA, 0x80, 0xFE, 0x1B])
def test_lop3_looks_every_bit_up_in_its_table(table):
    a, b = pairs(32)
    c = np.roll(a, 5)
    expected = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        cases = ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1 for i in range(32))
        expected.append(sum((table >> case & 1) << i for i, case in enumerate(cases)))
    assert calculate(f"lop3.b32 %d, %a, %b, %c, {table};", np.uint32, a=a, b=b, c=c).tolist() == expected


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x0123, 0x8888, 0xBA98, 0x4F07])
def test_prmt_picks_bytes_or_their_signs(selector):
    a, b = pairs(32)
    expected = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        pool, picked = (y << 32 | x).to_bytes(8, "little"), []
        for i in range(4):
            pick = selector >> 4 * i & 15
            byte = pool[pick & 7]
            picked.append((255 if byte & 128 else 0) if pick & 8 else byte)
        expected.append(int.from_bytes(bytes(picked), "little"))
    assert calculate(f"prmt.b32 %d, %a, %b, {selector};", np.uint32, a=a, b=b).tolist() == expected


def test_philox_rounds_as_in_the_paper():
    """One round of Philox 4x32 with constants as unsigned decimal immediates, as compilers print them."""
    a, b = pairs(32)
    body = """
    .reg .b32 %x, %y;
    mul.lo.s32 %x, %a, -766435501;
    mul.hi.u32 %y, %a, -766435501;
    xor.b32 %y, %y, %b;
    add.s32 %d, %y, %x;
    """
    products = [(int(x) * 0xD2511F53, int(y)) for x, y in zip(a, b, strict=True)]
    expected = [(((p >> 32) ^ y) + p) % (1 << 32) for p, y in products]
    assert calculate(body, np.uint32, a=a, b=b).tolist() == expected


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_setp_and_selp_choose_by_the_sign_that_the_type_says(name, kind):
    bits = int(kind[1:])
    a, b = pairs(bits)
    value = (lambda x: signed(int(x), bits)) if kind[0] == "s" else int
    body = f"setp.{name}.{kind} %p|%q, %a, %b; selp.b32 %u, 1, 2, %p; @%q add.u32 %u, %u, 10; mov.b32 %d, %u;"
    holds = [eval(f"{value(x)} {COMPARISONS[name]} {value(y)}") for x, y in zip(a, b, strict=True)]
    assert calculate(body, np.uint32, a=a, b=b).tolist() == [1 if h else 12 for h in holds]


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
    cases = [(x < y, x > 100) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    expected = [(lt and q) + 2 * (lt or not q) for lt, q in cases]
    assert calculate(body, np.uint32, a=a, b=b).tolist() == expected


def test_mov_cuts_and_joins_registers():
    a, b = pairs(32)
    halves = calculate("mov.b32 {%h1, %h2}, %a; mov.b32 %d, {%h2, %h1};", np.uint32, a=a)
    assert halves.tolist() == [(x << 16 | x >> 16) % (1 << 32) for x in a.tolist()]
    upper = calculate("mov.b32 {_, %h2}, %a; cvt.u32.u16 %d, %h2;", np.uint32, a=a)
    assert upper.tolist() == [x >> 16 for x in a.tolist()]
    joined = calculate("mov.b64 %d, {%a, %b};", np.uint64, a=a, b=b)
    assert joined.tolist() == [y << 32 | x for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    four = calculate(
        "mov.b64 %l, {%a, %b}; mov.b64 {%h1, %h2, %h3, %h4}, %l; cvt.u32.u16 %d, %h4;", np.uint32, a=a, b=b
    )
    assert four.tolist() == [y >> 16 for y in b.tolist()]
