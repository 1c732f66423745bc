"""Floating-point instructions and conversions against exact fractions, or against PyTorch's conversions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from handwritten import calculate

RNG = np.random.default_rng(1)
SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.0**-126, 2.0**-149, -(2.0**-140), 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 65504.0]


def numbers(count=400) -> np.ndarray:
    spread = RNG.standard_normal(count) * 2.0 ** RNG.integers(-20, 20, count)
    return np.concatenate([spread, SPECIAL]).astype(np.float32)


def rounded(x: Fraction, digits: int, least: int) -> float:
    """The nearest number with so many binary digits, none below 2^least; even where two are as near."""
    if x == 0:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent += abs(x) >= Fraction(2) ** (exponent + 1)
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    return float(round(x / unit) * unit)


def same(found, expected):
    np.testing.assert_array_equal(np.asarray(found, np.float64), np.asarray(expected, np.float64))


def bf16(values) -> np.ndarray:
    return torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def from_bf16(raw) -> np.ndarray:
    return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).double().numpy()


def finite(count):
    """Pairs or triples whose sums cancel, tie and overflow no type."""
    base = RNG.integers(-(1 << 24), 1 << 24, count) * 2.0 ** RNG.integers(-30, -10, count)
    return base.astype(np.float32)


def exact_fma(a, b, c) -> list[Fraction]:
    return [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]


def test_fma_rounds_once():
    a, b, c = finite(900), finite(900), finite(900)
    c[:300] = -(a[:300].astype(np.float64) * b[:300]).astype(np.float32)  # only the product's last bits remain
    # Cases in which rounding to float64 first gives the wrong float32: a sum just beside a tie.
    a[300:400], b[300:400], c[300:400] = 1 + 2.0**-23 * RNG.integers(0, 2**23, 100), 2.0**-24, 2.0**23
    a[400:500], b[400:500], c[400:500] = 1 + 2.0**-12, (1 + 2.0**-12) * 2.0**-24, 1.0
    a[500:600], b[500:600], c[500:600] = 1 + 2.0**-23, 2.0**-24, -(2.0**40)
    a[600], b[600], c[600] = 1 + 2.0**-23, 2.0**-60, 1 + 2.0**-23
    a[601], b[601], c[601] = 2.0**12 + 1, 2.0**12 + 1, 2.0**-60
    # A tie between subnormal numbers: a product just below 2^-150.
    a[602], b[602], c[602] = (1 + 2.0**-23) * 2.0**-75, (1 - 2.0**-23) * 2.0**-75, 2.0**-127 + 2.0**-149
    found = calculate("fma.rn.f32 %d, %a, %b, %c;", np.float32, a=a, b=b, c=c)
    same(found, [rounded(x, 24, -149) for x in exact_fma(a, b, c)])


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
def test_directed_rounding_never_crosses_the_exact_value(rounding):
    a, b, c = finite(500), finite(500), finite(500)
    found = calculate(f"fma.{rounding}.f32 %d, %a, %b, %c;", np.float32, a=a, b=b, c=c)
    for exact, f in zip(exact_fma(a, b, c), found, strict=True):
        below = {"rm": True, "rp": False, "rz": exact > 0}[rounding]
        other = Fraction(float(np.nextafter(f, np.float32(np.inf if below else -np.inf))))
        assert Fraction(float(f)) <= exact < other if below else other < exact <= Fraction(float(f))


def test_sat_cuts_off_below_0_and_above_1():
    a = np.array([-1, 0.5, 2, np.nan], np.float32)
    same(calculate("cvt.sat.f32.f32 %d, %a;", np.float32, a=a), [0, 0.5, 1, 0])


@pytest.mark.parametrize(
    ("instruction", "operation"),
    [("add.f32", np.add), ("sub.rn.f32", np.subtract), ("mul.f32", np.multiply), ("div.rn.f32", np.divide)],
)
def test_float32_arithmetic_is_ieee(instruction, operation):
    a = numbers()
    b = RNG.permutation(a)
    with np.errstate(all="ignore"):
        same(calculate(f"{instruction} %d, %a, %b;", np.float32, a=a, b=b), operation(a, b))


def test_min_and_max_leave_nans_out_and_order_the_zeros():
    a = np.array([1, np.nan, 2, np.nan, 0.0, -0.0, -np.inf], np.float32)
    b = np.array([3, 4, np.nan, np.nan, -0.0, 0.0, 5], np.float32)
    least = calculate("min.f32 %d, %a, %b;", np.float32, a=a, b=b)
    most = calculate("max.f32 %d, %a, %b;", np.float32, a=a, b=b)
    same(least, [1, 4, 2, np.nan, 0, 0, -np.inf])
    same(most, [3, 4, 2, np.nan, 0, 0, 5])
    assert np.signbit(least[4:6]).all() and not np.signbit(most[4:6]).any()
    same(calculate("max.NaN.f32 %d, %a, %b;", np.float32, a=a, b=b), [3, np.nan, np.nan, np.nan, 0, 0, 5])
    same(calculate("max.f32 %d, %a, %b, %a;", np.float32, a=b, b=a), most)


def test_ftz_flushes_subnormal_inputs_and_results():
    a = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1.0], np.float32)
    same(calculate("add.ftz.f32 %d, %a, 0f00000000;", np.float32, a=a), [0, 0, 2.0**-126, 1])
    same(calculate("mul.ftz.f32 %d, %a, 0f3F000000;", np.float32, a=a), [0, 0, 0, 0.5])
    below = calculate("setp.gt.ftz.f32 %p, %a, 0f00000000; selp.b32 %d, 1, 0, %p;", np.uint32, a=a)
    assert below.tolist() == [0, 0, 1, 1]
    same(calculate("mul.f32 %d, %a, 0f3F000000;", np.float32, a=a), [2.0**-131, -(2.0**-131), 2.0**-127, 0.5])


APPROXIMATE = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "tanh": np.tanh, "sin": np.sin, "cos": np.cos}
APPROXIMATE |= {"rsqrt": lambda x: x**-0.5, "sqrt": np.sqrt}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations_are_within_the_error_that_ptx_allows(name):
    a = RNG.uniform(0.1, 3.0, 256).astype(np.float32)
    found = calculate(f"{name}.approx{'.ftz' * (name in ('ex2', 'lg2', 'rcp'))}.f32 %d, %a;", np.float32, a=a)
    np.testing.assert_allclose(found, APPROXIMATE[name](a.astype(np.float64)), rtol=2.0**-20, atol=2.0**-20)


def test_ex2_of_what_is_masked_out_is_zero():
    a = np.array([-np.inf, -1e30, -140.0, 0.0, np.inf], np.float32)
    same(calculate("ex2.approx.ftz.f32 %d, %a;", np.float32, a=a), [0, 0, 0, 1, np.inf])


@pytest.mark.parametrize(("kind", "digits", "least"), [("bf16", 8, -133), ("f16", 11, -24)])
@pytest.mark.parametrize("name", ["add.rn", "sub.rn", "mul.rn", "fma.rn"])
def test_half_precision_rounds_the_exact_result_once(name, kind, digits, least):
    raw = [bf16(finite(600)) for _ in range(3)]
    if kind == "f16":
        raw = [RNG.integers(-2048, 2048, 600).astype(np.float16) * np.float16(2.0**-6) for _ in range(3)]
    values = [from_bf16(r) if kind == "bf16" else r.astype(np.float64) for r in raw]
    operands = "%a, %b, %c" if name == "fma.rn" else "%a, %b"
    found = calculate(f"{name}.{kind} %d, {operands};", raw[0].dtype, a=raw[0], b=raw[1], c=raw[2])
    found = from_bf16(found) if kind == "bf16" else found
    way = {"add.rn": lambda a, b, c: a + b, "sub.rn": lambda a, b, c: a - b, "mul.rn": lambda a, b, c: a * b}
    way["fma.rn"] = lambda a, b, c: a * b + c
    exact = [way[name](*(Fraction(float(x)) for x in triple)) for triple in zip(*values, strict=True)]
    same(found, [rounded(x, digits, least) for x in exact])


@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
@pytest.mark.parametrize("name", ["add.rn", "mul.rn", "fma.rn", "max", "neg"])
def test_pairs_are_two_halves_side_by_side(name, kind):
    half = np.uint16 if kind == "bf16x2" else np.float16
    raw = [bf16(finite(512)) if kind == "bf16x2" else RNG.standard_normal(512).astype(np.float16) for _ in range(3)]
    names = {"fma.rn": "abc", "neg": "a"}.get(name, "ab")
    operands = ", ".join(f"%{n}" for n in names)
    inputs = dict(zip(names, raw, strict=False))
    single = calculate(f"{name}.{kind[:-2]} %d, {operands};", half, **inputs)
    packed = {n: r.view(np.uint32) for n, r in inputs.items()}
    double = calculate(f"{name}.{kind} %d, {operands};", np.uint32, **packed)
    assert (double.view(np.uint16) == single.view(np.uint16)).all()


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversions_between_floats_agree_with_pytorch(kind, dtype):
    a = numbers()
    raw = torch.from_numpy(a).to(dtype)
    found = calculate(f"cvt.rn.{kind}.f32 %d, %a;", np.uint16, a=a)
    back = calculate(f"cvt.f32.{kind} %d, %a;", np.float32, a=found)
    same(back, raw.float().numpy())
    pair = calculate(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", np.uint32, a=a, b=a[::-1].copy())
    assert (pair & 0xFFFF == found[::-1]).all() and (pair >> 16 == found).all()


@pytest.mark.parametrize(
    ("rounding", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_floats_become_integers_as_told_and_stay_in_range(rounding, function):
    a = np.concatenate([RNG.uniform(-1000, 1000, 100), np.arange(-5, 5) + 0.5, [1e20, -1e20, np.inf, np.nan]]).astype(
        np.float32
    )
    x = np.nan_to_num(function(a.astype(np.float64)), nan=0.0)
    found = calculate(f"cvt.{rounding}.s32.f32 %d, %a;", np.int32, a=a)
    assert found.tolist() == [int(min(max(v, -(2**31)), 2**31 - 1)) for v in x]
    found = calculate(f"cvt.{rounding}.u32.f32 %d, %a;", np.uint32, a=a)
    assert found.tolist() == [int(min(max(v, 0), 2**32 - 1)) for v in x]
    same(calculate(f"cvt.{rounding}.f32.f32 %d, %a;", np.float32, a=a), function(a))


def test_integers_become_the_nearest_floats():
    a = RNG.integers(-(2**31), 2**31, 300).astype(np.int32)
    same(calculate("cvt.rn.f32.s32 %d, %a;", np.float32, a=a), [rounded(Fraction(int(x)), 24, -149) for x in a])
    unsigned = [rounded(Fraction(int(x)), 24, -149) for x in a.view(np.uint32)]
    same(calculate("cvt.rn.f32.u32 %d, %a;", np.float32, a=a), unsigned)
    wide = RNG.integers(-(2**63), 2**63 - 1, 300)
    same(calculate("cvt.rn.f32.s64 %d, %a;", np.float32, a=wide), [rounded(Fraction(int(x)), 24, -149) for x in wide])
    found = from_bf16(calculate("cvt.rn.bf16.s32 %d, %a;", np.uint16, a=a))
    same(found, [rounded(Fraction(int(x)), 8, -133) for x in a])


def test_integers_are_cut_and_extended():
    a = np.array([0, 1, 127, 128, 255, 256, -1, -128, -129, 70000, -70000], np.int32)
    assert calculate("cvt.s32.s8 %d, %a;", np.int32, a=a).tolist() == a.astype(np.int8).tolist()
    assert calculate("cvt.u32.u8 %d, %a;", np.uint32, a=a).tolist() == a.astype(np.uint8).tolist()
    assert calculate("cvt.s64.s32 %d, %a;", np.int64, a=a).tolist() == a.tolist()
    assert calculate("cvt.u64.u32 %d, %a;", np.uint64, a=a).tolist() == a.view(np.uint32).tolist()
    assert calculate("cvt.u16.u32 %d, %a;", np.uint16, a=a).tolist() == a.astype(np.uint16).tolist()


def test_comparisons_of_nans_hold_only_where_they_are_asked_for():
    a, b = np.array([1, np.nan, 2], np.float32), np.array([1, 1, np.nan], np.float32)
    expected = {"eq": [1, 0, 0], "equ": [1, 1, 1], "ne": [0, 0, 0], "neu": [0, 1, 1], "nan": [0, 1, 1]}
    for name, holds in (expected | {"ltu": [0, 1, 1], "ge": [1, 0, 0], "num": [1, 0, 0]}).items():
        found = calculate(f"setp.{name}.f32 %p, %a, %b; selp.u32 %d, 1, 0, %p;", np.uint32, a=a, b=b)
        assert found.tolist() == holds, name
