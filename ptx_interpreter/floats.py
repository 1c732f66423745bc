"""Floating-point arithmetic.

Bitwise exact where IEEE 754 or PTX defines the bits: add, sub, mul, fma, div.rn, sqrt.rn, rcp.rn, min, max (except
for the payload of NaNs). Approximations (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div with .approx or .full) are
NumPy's float32 functions, mostly more accurate than a GPU's.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptx_interpreter.errors import Unsupported
from ptx_interpreter.formats import decode, directed, encode, flush, fma

FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f32x2", "f64")
ONE = np.float32(1)


class Plan(NamedTuple):
    """`function` maps operands of the types `sources` to values of the type `destination`."""

    function: Callable
    sources: tuple[str, ...]
    destination: str


def smallest(*values, nan=False):
    result = values[0]
    for value in values[1:]:
        least = np.minimum(result, value) if nan else np.fmin(result, value)
        result = np.where(result == value, np.where(np.signbit(result), result, value), least)  # -0 is below +0
    return result


def largest(*values, nan=False):
    return -smallest(*(-value for value in values), nan=nan)


NATIVE = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": fma,
    "mad": fma,
    "min": smallest,
    "max": largest,
    "abs": np.abs,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rcp": lambda x: ONE / x,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "copysign": lambda sign, size: np.copysign(size, sign),
}
NARROW = NATIVE | {  # in float64, to be rounded once to bf16 or f16, or in a direction
    "add": lambda a, b: fma(a, ONE, b, narrow=True),
    "sub": lambda a, b: fma(b, -ONE, a, narrow=True),
    "mul": lambda a, b: a.astype(np.float64) * b,
    "fma": lambda a, b, c: fma(a, b, c, narrow=True),
    "ex2": lambda x: np.exp2(x.astype(np.float32)),
    "tanh": lambda x: np.tanh(x.astype(np.float32)),
}
DIRECTED = {"rz", "rm", "rp"}
ACCEPTED = {*DIRECTED, "rn", "ftz", "approx", "full", "sat", "relu", "NaN", *FLOATS}


def plan(name: str, modifiers: tuple[str, ...], count: int) -> Plan:
    """What an instruction with `count` source operands computes; fma.rn.f32.bf16 adds an f32."""
    kinds = [m for m in modifiers if m in FLOATS]
    if set(modifiers) - ACCEPTED or (name in ("fma", "mad") and kinds[0] == "f64"):
        raise Unsupported(f"{name}.{'.'.join(modifiers)}")
    sources = tuple(kinds[-1:] * (count - 1) + kinds[:1])
    rounding = next((m for m in modifiers if m in DIRECTED), None)
    native = kinds[0] in ("f32", "f32x2", "f64") and rounding is None
    function = (NATIVE if native else NARROW)[name]
    if rounding:
        if name not in ("add", "sub", "mul", "fma") or kinds[0] not in ("f32", "f32x2"):
            raise Unsupported(f"{name}.{'.'.join(modifiers)}")
        function = _after(function, lambda value: directed(value, rounding))
    if "NaN" in modifiers:
        plain, function = function, lambda *values: plain(*values, nan=True)
    for modifier, change in (("relu", _relu), ("sat", _saturate)):
        if modifier in modifiers:
            function = _after(function, change)
    if "ftz" in modifiers and kinds[0] == "f32":
        function = _flushed(function)
    if set(kinds) != {"f32"}:
        function = _coded(function, sources, kinds[0])
    return Plan(function, sources, kinds[0])


def _coded(function, sources, destination):
    return lambda *raw: encode(function(*(decode(r, kind) for r, kind in zip(raw, sources, strict=True))), destination)


def _after(function, change):
    return lambda *values: change(function(*values))


def _flushed(function):
    return lambda *values: flush(function(*(flush(value) for value in values)).astype(np.float32))


def _relu(value):
    return np.where(value > 0, value, np.where(np.isnan(value), value, value.dtype.type(0)))


def _saturate(value):
    return np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))  # NaN becomes 0
