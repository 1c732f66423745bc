"""cvt between integers and floats, with PTX's rounding, saturation and NaNs."""

import numpy as np

from ptx_interpreter.errors import Unsupported
from ptx_interpreter.floats import FLOATS, Plan
from ptx_interpreter.formats import decode, encode, flush
from ptx_interpreter.registers import dtype_of

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
ACCEPTED = {"rn", "rz", "sat", "ftz", "relu", *TO_INTEGER}


def plan(modifiers: tuple[str, ...], count: int) -> Plan:
    """What a cvt with `count` source operands computes; two become the upper and the lower half."""
    *options, destination, source = modifiers
    options = set(options)
    if options - ACCEPTED or (count == 2) != (destination in ("bf16x2", "f16x2") and source == "f32"):
        raise Unsupported(f"cvt.{'.'.join(modifiers)}")
    if source in FLOATS and destination in FLOATS:
        convert = _float_to_float(options, destination, source)
    elif source in FLOATS:
        convert = _float_to_integer(options, destination, source)
    elif destination in FLOATS:
        convert = lambda x: encode(x.astype(dtype_of("f64" if destination != "f32" else "f32")), destination)  # noqa: E731
    else:
        convert = _integer_to_integer(options, destination)
    return Plan(convert, (source,) * count, destination)


def _integer_to_integer(options, destination):
    if "sat" not in options:
        return lambda x: x.astype(dtype_of(destination))
    limits = np.iinfo(dtype_of(destination))

    def saturate(x):
        ends = np.iinfo(x.dtype)
        return x.clip(max(limits.min, ends.min), min(limits.max, ends.max)).astype(dtype_of(destination))

    return saturate


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
        if "relu" in options:
            value = np.where(value < 0, value.dtype.type(0), value)
        if "sat" in options:
            value = np.where(value > 0, np.minimum(value, 1), 0).astype(value.dtype)
        if "rz" in options:
            return _towards_zero(value, destination)
        return encode(value, destination)

    return convert


def _towards_zero(value, destination):
    """float32 to bf16 or f16, truncated."""
    single = destination.removesuffix("x2")
    near = decode(encode(value, single), single).astype(np.float32)
    away = np.abs(near) > np.abs(value)
    raw = encode(near, single).view(np.uint16)
    raw = np.where(away, raw - 1, raw).astype(np.uint16)
    if destination.endswith("x2"):
        return np.ascontiguousarray(raw).view(np.uint32)[..., 0]
    return raw.view(dtype_of(single))
