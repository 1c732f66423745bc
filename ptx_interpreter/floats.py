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
DIRECTED = {"rz", "rm", "rp"}  # libdevice's exp, sinh and others round so
ACCEPTED = {*DIRECTED, "rn", "ftz", "approx", "full", "NaN"}


def plan(name: str, modifiers: tuple[str, ...], count: int) -> Plan:
    """What an instruction with `count` source operands computes; fma.rn.f32.bf16 adds an f32."""
    kind, *others = [modifier for modifier in modifiers if modifier in FLOATS]
    options = [modifier for modifier in modifiers if modifier not in FLOATS]
    sources = tuple((others or [kind]) * (count - 1) + [kind])
    if set(options) - ACCEPTED or (name in ("fma", "mad") and kind == "f64"):
        raise Unsupported(f"{name}.{'.'.join(modifiers)}")
    rounding = next((option for option in options if option in DIRECTED), None)
    if rounding and (name not in ("add", "sub", "mul", "fma") or kind != "f32"):
        raise Unsupported(f"{name}.{'.'.join(modifiers)}")
    function = (NATIVE if kind in ("f32", "f32x2", "f64") and not rounding else NARROW)[name]
    if rounding:
        exact, function = function, lambda *values: directed(exact(*values), rounding)
    if "NaN" in options:
        plain, function = function, lambda *values: plain(*values, nan=True)
    if "ftz" in options and kind == "f32":
        function = _flushed(function)
    if set(sources) != {"f32"}:
        function = _coded(function, sources, kind)
    return Plan(function, sources, kind)


def _coded(function, sources, destination):
    return lambda *raw: encode(function(*(decode(r, kind) for r, kind in zip(raw, sources, strict=True))), destination)


def _flushed(function):
    return lambda *values: flush(function(*(flush(value) for value in values)).astype(np.float32))
