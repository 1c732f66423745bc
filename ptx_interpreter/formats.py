"""Floating-point formats: raw bits to numbers and back, rounded once, to nearest even."""

import numpy as np


def bf16_to_float32(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(value: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32).astype(np.uint64)
    raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), raw)


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """Raw values as NumPy floats: bf16 as float32, others as they are, pairs as [..., 2]."""
    if kind.endswith("x2"):
        kind = kind[:-2]
        raw = np.ascontiguousarray(raw)[..., None].view({"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[kind])
    return bf16_to_float32(raw) if kind == "bf16" else raw


def encode(value: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `decode`. float64 values are rounded once."""
    single = kind.removesuffix("x2")
    if single == "bf16":
        raw = float32_to_bf16(_odd_float32(value) if value.dtype == np.float64 else value.astype(np.float32))
    else:
        raw = value.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[single])
    if kind.endswith("x2"):
        return np.ascontiguousarray(raw).view(f"uint{16 * raw.dtype.itemsize}")[..., 0]
    return raw


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, narrow: bool = False) -> np.ndarray:
    """a * b + c of float32 or narrower numbers, as a float64 that rounds to float32 like the exact value.

    narrow: it rounds to bf16 and f16 like the exact value, too.
    """
    product = a.astype(np.float64) * b  # exact
    total = product + c
    # If this float64 is on a tie, rounding it again can go the wrong way. Rounded to odd, to the neighbour whose last
    # bit is 1, it is on the right side of the tie.
    if narrow or ((total.view(np.uint64) & 0x1FFF_FFFF == 0x1000_0000) | (np.abs(total) < 2.0**-120)).any():
        return _odd_sum(product, c, total)
    return total


def _odd_sum(x, y, total):
    """x + y rounded to odd. total: x + y rounded to nearest."""
    part = total - x
    error = (x - (total - part)) + (y - part)  # the exact rounding error
    return _odd(total, error)


def _odd(value, error):
    even = value.view(f"uint{8 * value.dtype.itemsize}") & 1 == 0
    wrong = even & (error != 0) & np.isfinite(value) & np.isfinite(error)
    if not wrong.any():
        return value
    return np.where(wrong, np.nextafter(value, np.where(error > 0, np.inf, -np.inf).astype(value.dtype)), value)


def _odd_float32(value):
    """float64 to float32, rounded to odd: rounding that to fewer bits equals rounding the float64."""
    near = value.astype(np.float32)
    return _odd(near, value - near)


def directed(value: np.ndarray, rounding: str) -> np.ndarray:
    """A float64 (rounded to odd) to float32: rz towards zero, rm down, rp up."""
    near = value.astype(np.float32)
    too_far = {"rz": np.abs(near) > np.abs(value), "rm": near > value, "rp": near < value}[rounding]
    towards = {"rz": 0, "rm": -np.inf, "rp": np.inf}[rounding]
    return np.where(too_far, np.nextafter(near, np.float32(towards)), near)


def flush(value: np.ndarray) -> np.ndarray:
    """.ftz: subnormal float32 numbers become zeros with their sign."""
    tiny = np.abs(value) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), value), value) if tiny.any() else value
