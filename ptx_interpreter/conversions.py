"""cvt between integers and floats, with PTX's rounding and NaNs."""

import numpy as np

from ptx_interpreter.errors import Unsupported
from ptx_interpreter.floats import FLOATS, Plan
from ptx_interpreter.formats import decode, encode, flush
from ptx_interpreter.registers import dtype_of

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
ACCEPTED = {"rn", "sat", "ftz", *TO_INTEGER}


def plan(modifiers: tuple[str, ...], count: int) -> Plan:
    """What a cvt with `count` source operands computes; two become the upper and the lower half."""
    *options, destination, source = modifiers
    options = set(options)
    of_integers = "sat" in options and not {source, destination} <= set(FLOATS)
    if options - ACCEPTED or of_integers or (count == 2) != (destination in ("bf16x2", "f16x2") and source == "f32"):
        raise Unsupported(f"cvt.{'.'.join(modifiers)}")
    if source in FLOATS and destination in FLOATS:
        convert = _float_to_float(options, destination, source)
    elif source in FLOATS:
        convert = _float_to_integer(options, destination, source)
    elif destination in FLOATS:
        convert = lambda x: encode(x.astype(dtype_of("f64" if destination != "f32" else "f32")), destination)  # noqa: E731
    else:
        convert = lambda x: x.astype(dtype_of(destination))  # noqa: E731
    return Plan(convert, (source,) * count, destination)


def _float_to_integer(options, destination, source):
    rounding = next((TO_INTEGER[name] for name in TO_INTEGER if name in options), None)
    if rounding is None:
        raise Unsupported(f"cvt from {source} to {destination} without a rounding to integers")
    dtype = dtype_of(destination)
    limits = np.iinfo(dtype)
    not_a_number = 1 << 63 if dtype.itemsize == 8 else 0

    def convert(raw):
        x = rounding(decode(raw, source).astype(np.float64))
        outside = (x >= float(limits.max)) | (x <= float(limits.min))
        ends = np.where(x > 0, dtype.type(limits.max), dtype.type(limits.min))
        found = np.where(outside, ends, np.where(outside, 0, x).astype(dtype))
        return np.where(np.isnan(x), np.array(not_a_number, np.uint64).astype(dtype), found)

    return convert


def _float_to_float(options, destination, source):
    to_integer = next((TO_INTEGER[name] for name in TO_INTEGER if name in options), None)

    def convert(*raw):
        values = [decode(r, source) for r in raw]
        value = np.stack(np.broadcast_arrays(values[1], values[0]), -1) if len(values) == 2 else values[0]
        if "ftz" in options and source == "f32":
            value = flush(value)
        if to_integer:
            value = to_integer(value)
        if "sat" in options:
            value = np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))  # NaN becomes 0
        return encode(value, destination)

    return convert
