"""Registers, and functions that read and write operands.

A register is a NumPy row with one element per thread of the grid. `threads` is a slice or an array of indices.
"""

import re
from collections.abc import Callable

import numpy as np

from ptx_interpreter.dataflow import perhaps_unwritten
from ptx_interpreter.errors import Uninitialised, Unsupported
from ptx_interpreter.parse import NAME, Entry, size_of, split

Threads = slice | np.ndarray
Read = Callable[[Threads], np.ndarray]
Write = Callable[[Threads, np.ndarray], None]
KINDS = {"s": "int", "f": "float", "u": "uint", "b": "uint"}


def dtype_of(kind: str) -> np.dtype:
    """NumPy's dtype for a PTX type. Types that NumPy lacks (bf16, bf16x2, f16x2, f32x2) stay raw bits."""
    if kind == "pred":
        return np.dtype(bool)
    if kind.startswith("bf16") or "x2" in kind:
        return np.dtype(f"uint{8 * size_of(kind)}")
    if kind[0] not in KINDS or size_of(kind) > 8:
        raise Unsupported(f"the type .{kind}")
    return np.dtype(f"{KINDS[kind[0]]}{8 * size_of(kind)}")


class Registers:
    """special: values of %tid.x and the like. symbols: addresses of variables, in their space."""

    def __init__(self, entry: Entry, count: int, special: dict[str, np.ndarray], symbols: dict[str, int]):
        self.kinds, self.special, self.symbols = entry.registers, special, symbols
        self.rows = {name: np.zeros(count, dtype_of(kind)) for name, kind in entry.registers.items()}
        self.known = {name: np.zeros(count, bool) for name in perhaps_unwritten(entry)}

    def reader(self, text: str, kind: str) -> Read:
        """A function from threads to an operand's values as `kind`; a constant has one value for all."""
        dtype = dtype_of(kind)
        if text.startswith("!"):
            inverted = self.reader(text[1:], kind)
            return lambda threads: ~inverted(threads)
        if text in self.special:
            row = self.special[text].astype(f"uint{8 * dtype.itemsize}").view(dtype)
            return lambda threads: row[threads]
        if text not in self.rows:
            value = self._constant(text, dtype)
            return lambda threads: value
        row = self.rows[text]
        if row.dtype.itemsize == dtype.itemsize:
            row = row.view(dtype)
            read = lambda threads: row[threads]  # noqa: E731
        else:  # a small type in a larger register
            small = f"uint{8 * dtype.itemsize}"
            read = lambda threads: row[threads].astype(small).view(dtype)  # noqa: E731
        return self._watched(text, read) if text in self.known else read

    def writer(self, text: str, kind: str) -> Write:
        """A function that writes values of `kind` to a register, sign- or zero-extended to its size."""
        if text == "_":
            return lambda threads, value: None
        if text not in self.rows:
            raise Unsupported(f"{text} as a destination")
        dtype = dtype_of(kind)
        row = self.rows[text]
        row = row.view(dtype if row.dtype.itemsize == dtype.itemsize else f"{dtype.kind}{row.dtype.itemsize}")
        if text not in self.known:
            return row.__setitem__
        known = self.known[text]

        def write(threads, value):
            row[threads] = value
            known[threads] = True

        return write

    def address(self, text: str) -> Read:
        """The address in "[%rd1+16]", as int64."""
        match = re.fullmatch(rf"\[\s*({NAME})\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if not match:
            raise Unsupported(f"the address {text}")
        offset = int(match[2] or "0", 0)
        if match[1] not in self.rows:
            value = self._constant(match[1], np.dtype(np.int64)) + offset
            return lambda threads: np.broadcast_to(value, _size(threads))
        read = self.reader(match[1], self.kinds[match[1]])
        return lambda threads: read(threads).astype(np.int64) + offset

    def group(self, text: str) -> list[str]:
        """The operands in "{%r1, %r2}"; a single operand is a group of one."""
        return split(text[1:-1]) if text.startswith("{") else [text]

    def _watched(self, text: str, read: Read) -> Read:
        known = self.known[text]

        def watch(threads):
            if not known[threads].all():
                unknown = indices(threads)[~known[threads]]
                raise Uninitialised(f"read of the register {text}, which was never written", indices=unknown)
            return read(threads)

        return watch

    def _constant(self, text: str, dtype: np.dtype) -> np.ndarray:
        if text in self.symbols:
            return np.array([self.symbols[text]], dtype)
        if dtype.kind == "b":
            return np.array([int(text, 0) != 0])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            bits = np.array([int(text[2:], 16)], np.uint32)
            return bits.view(dtype) if dtype.itemsize == 4 else bits.view(np.float32).astype(dtype)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return np.array([int(text[2:], 16)], np.uint64).view(np.float64).astype(dtype)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
            octal = re.fullmatch(r"-?0\d+", text)
            value = int(text.rstrip("U"), 8 if octal else 0) & ((1 << 8 * dtype.itemsize) - 1)
            return np.array([value], f"uint{8 * dtype.itemsize}").view(dtype)
        if dtype.kind == "f" and re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", text):
            return np.array([float(text)], dtype)
        raise Unsupported(f"the operand {text}")


def indices(threads: Threads) -> np.ndarray:
    """A slice or an array of indices as an array."""
    return np.arange(threads.start, threads.stop) if isinstance(threads, slice) else threads


def _size(threads: Threads) -> int:
    return threads.stop - threads.start if isinstance(threads, slice) else len(threads)
