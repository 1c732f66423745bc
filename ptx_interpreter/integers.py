"""Integer and bit arithmetic, exact to the bit. Sources come as NumPy arrays of their PTX type."""

import numpy as np

from ptx_interpreter.errors import Unsupported
from ptx_interpreter.floats import Plan

WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
U64 = np.uint64


def plan(name: str, modifiers: tuple[str, ...], count: int) -> Plan:
    """What an instruction with `count` source operands computes."""
    kind, form = modifiers[-1], ".".join(modifiers[:-1])
    if name in ("mul", "mad"):
        return _product(form, kind, count)
    if name in ("shl", "shr"):
        return Plan(_shift_left if name == "shl" else _shift_right, (kind, "u32"), kind)
    if name == "shf":
        direction, mode = modifiers[:2]
        return Plan(lambda a, b, c: _funnel(a, b, c, direction, mode), ("u32", "u32", "u32"), "u32")
    if name in ("popc", "clz") and not form:
        return Plan(np.bitwise_count if name == "popc" else _leading_zeros, (kind,), "u32")
    if name not in SIMPLE or form:
        raise Unsupported(f"{name}.{'.'.join(modifiers)}")
    return Plan(SIMPLE[name], (kind,) * count, kind)


def _divide(a, b):
    """Rounded towards zero; division by 0 gives all ones."""
    quotient = a // np.where(b == 0, 1, b)
    if quotient.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * b != a))
    return np.where(b == 0, ~np.zeros((), a.dtype), quotient).astype(a.dtype)


SIMPLE = {
    "add": np.add,
    "sub": np.subtract,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "min": lambda *values: np.minimum.reduce(np.broadcast_arrays(*values)),
    "max": lambda *values: np.maximum.reduce(np.broadcast_arrays(*values)),
    "abs": np.abs,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}


def _product(form, kind, count):
    """mul and mad: the lower or upper half of the product, or all of it (wide)."""
    function = {"lo": np.multiply, "hi": _high, "wide": _wide}.get(form)
    if function is None:
        raise Unsupported(f"mul.{form}.{kind}")
    destination = WIDE[kind] if form == "wide" else kind
    if count == 2:
        return Plan(function, (kind, kind), destination)
    return Plan(lambda a, b, c: function(a, b) + c, (kind, kind, destination), destination)


def _wide(a, b):
    larger = f"{a.dtype.kind}{2 * a.dtype.itemsize}"
    return a.astype(larger) * b.astype(larger)


def _high(a, b):
    if a.dtype.itemsize < 8:
        return (_wide(a, b) >> 8 * a.dtype.itemsize).astype(a.dtype)
    half = np.array(32, a.dtype)
    a1, b1 = a >> half, b >> half  # with the sign
    a0, b0 = a & 0xFFFFFFFF, b & 0xFFFFFFFF
    low = (a0.astype(U64) * b0.astype(U64) >> U64(32)).astype(a.dtype)
    middle = a1 * b0 + low
    other = a0 * b1 + (middle & 0xFFFFFFFF)
    return a1 * b1 + (middle >> half) + (other >> half)


def _bits(x):
    return 8 * x.dtype.itemsize


def _shift_left(x, by):
    shifted = x << np.minimum(by, _bits(x) - 1).astype(x.dtype)
    return np.where(by >= _bits(x), x.dtype.type(0), shifted)


def _shift_right(x, by):
    shifted = x >> np.minimum(by, _bits(x) - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(by >= _bits(x), x.dtype.type(0), shifted)


def _funnel(a, b, c, direction, mode):
    """Shift the 64 bits b:a and keep the upper (l) or lower (r) half."""
    by = (c & 31 if mode == "wrap" else np.minimum(c, 32)).astype(U64)
    both = b.astype(U64) << U64(32) | a
    return (both << by >> U64(32) if direction == "l" else both >> by).astype(np.uint32)


def _leading_zeros(x):
    high, low = x.astype(U64) >> U64(32), x.astype(U64) & U64(0xFFFFFFFF)
    length = np.where(high, 32 + np.frexp(high.astype(float))[1], np.frexp(low.astype(float))[1])
    return (_bits(x) - length).astype(np.uint32)
