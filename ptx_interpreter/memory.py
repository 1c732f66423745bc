"""Memory whose bytes have a state: allocated, written, by which warp."""

from dataclasses import dataclass

import numpy as np

from ptx_interpreter.errors import Misaligned, OutOfBounds, Uninitialised
from ptx_interpreter.order import Order

ALLOCATED, INITIALISED, WRITTEN, ATOMIC, PENDING = 1, 2, 4, 8, 16  # a byte's state; WRITTEN: by this launch
GUARD = 4096  # least bytes on each side of a buffer that no access may touch
ALIGN = 256  # bytes, as cudaMalloc aligns
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Space:
    """An address space from `base` on. stride: bytes from one block's (or thread's) own memory to the next."""

    def __init__(self, name: str, base: int, size: int, stride: int = 0):
        self.name, self.base, self.stride = name, base, stride
        self.data, self.state = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self.stamp = np.zeros(size, np.int64)  # of the last write, see `order`
        self.reads: dict[int, np.ndarray] = {}  # size of an access -> stamps of the last reads of that size
        self.readers = 1  # how many readers are remembered per byte

    def locate(self, address: np.ndarray, owner: np.ndarray, size: int, threads: np.ndarray) -> np.ndarray:
        """Indices of the accesses' first bytes, after checking alignment and wild pointers."""
        offset = address - self.base
        if (bad := offset % size != 0).any():
            at = int(address[bad][0])
            message = f"{size}-byte access to {self.name} memory at address {at:#x}, {at % size} bytes off a multiple"
            raise Misaligned(message, buffer=self.name, offset=int(offset[bad][0]), indices=threads[bad])
        limit = self.stride or len(self.data)
        if (bad := (offset < 0) | (offset + size > limit)).any():
            at = int(offset[bad][0])
            message = f"{size}-byte access far outside of {self.name} memory, at address {at + self.base:#x}"
            raise OutOfBounds(message, buffer=self.name, offset=at, indices=threads[bad])
        return offset + owner * self.stride if self.stride else offset

    def check_read(self, at: np.ndarray, size: int, threads: np.ndarray, order: Order, strong: bool = False):
        """Raise unless all bytes are allocated, initialised and ordered after their writers.

        strong: an atomic, volatile, relaxed or similar access; these never race with each other.
        """
        unit = min(size, 8)
        state, first = self.state.view(UNSIGNED[unit]), at // unit
        plain = _repeat(ALLOCATED | INITIALISED, unit)
        if not strong:
            self._remember_read(at, size, threads, order)
        if all((state[first + i] == plain).all() for i in range(size // unit)):
            return
        bytes_at = at[:, None] + np.arange(size)
        states = self.state[bytes_at]
        self._check_bounds(states, bytes_at, threads, "read")
        for bits, missing, why in (
            (INITIALISED, 0, "that nobody wrote"),
            (PENDING, PENDING, "that a cp.async is still writing: wait for its group first"),
        ):
            if (bad := (states & bits) == missing).any():
                where, offset, buffer = self.describe(bytes_at[bad][0])
                message = f"{size}-byte read of {where} {why}"
                raise Uninitialised(message, buffer=buffer, offset=offset, indices=threads[bad.any(1)])
        self._check_order("read", states, bytes_at, threads, order, strong)

    def check_write(self, at: np.ndarray, size: int, threads: np.ndarray, order: Order, strong: bool = False):
        """Raise unless the bytes are allocated and ordered after their last users; then stamp them."""
        bytes_at = at[:, None] + np.arange(size)
        states = self.state[bytes_at]
        self._check_bounds(states, bytes_at, threads, "write")
        self._check_order("write", states, bytes_at, threads, order, strong)
        for length, reads in self.reads.items():
            units = bytes_at[:, ::length] // length  # that the access touches
            stamps = reads[units].reshape(len(at), -1)
            order.check(self, "write", np.repeat(bytes_at[:, ::length], self.readers, 1), stamps, threads, did="read")
        own = order.stamps(threads)
        self.state[bytes_at] = ALLOCATED | INITIALISED | WRITTEN | (ATOMIC if strong else 0)
        self.stamp[bytes_at] = own[:, None]
        if not strong and (self.stamp[at] != own).any():
            order.fail(self, "write", bytes_at, self.stamp[bytes_at], threads, self.stamp[bytes_at] != own[:, None])

    def _remember_read(self, at, size, threads, order):
        if size not in self.reads:
            self.reads[size] = np.zeros((len(self.data) // size, self.readers), np.int64)
        self.reads[size][at // size, threads // 32 % self.readers] = order.stamps(threads)

    def _check_order(self, verb, states, bytes_at, threads, order, strong):
        before = states & WRITTEN != 0
        if strong:
            before &= states & ATOMIC == 0
        if before.any():
            order.check(self, verb, bytes_at, np.where(before, self.stamp[bytes_at], 0), threads)

    def _check_bounds(self, states, bytes_at, threads, verb):
        if (bad := (states & ALLOCATED) == 0).any():
            where, offset, buffer = self.describe(bytes_at[bad][0])
            message = f"{verb} of {bytes_at.shape[1]} bytes at {where}"
            raise OutOfBounds(message, buffer=buffer, offset=offset, indices=threads[bad.any(1)])

    def describe(self, at: int) -> tuple[str, int, str]:
        """A byte as text, its offset in its buffer, and the buffer's name."""
        offset = int(at) % self.stride
        last = np.flatnonzero(self.state[: self.stride] & ALLOCATED)[-1:]
        beyond = f", which ends at {int(last[0]) + 1 if len(last) else 0}" if not self.state[at] & ALLOCATED else ""
        return f"byte {offset} of the {self.name} memory{beyond}", offset, self.name


@dataclass
class Buffer:
    name: str
    start: int
    size: int
    dtype: np.dtype
    shape: tuple[int, ...]


class Memory(Space):
    """Global memory: NumPy arrays between guard zones that are at least as large as the array."""

    def __init__(self):
        super().__init__("global", 0x7F0000000000, GUARD)
        self.buffers: list[Buffer] = []
        self.end = 0  # of the last guard zone

    def place(self, name: str, array: np.ndarray, initialised=True) -> int:
        """Copy an array in and return its address, a multiple of ALIGN and of no larger power of two.

        initialised: a bool, or an array of bools with the array's shape.
        """
        array = np.asarray(array)
        guard = max(GUARD, array.nbytes)
        start = -(-(self.end + guard) // (2 * ALIGN)) * 2 * ALIGN + ALIGN
        self.end = start + array.nbytes + guard
        self._grow(self.end)
        self.buffers.append(Buffer(name, start, array.nbytes, array.dtype, array.shape))
        inside = slice(start, start + array.nbytes)
        known = np.repeat(np.broadcast_to(initialised, array.shape).reshape(-1), array.dtype.itemsize)
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        self.data[inside] = np.where(known, raw, 0xFF)  # poison: NaN in most types
        self.state[inside] = ALLOCATED | known * np.uint8(INITIALISED)
        return self.base + start

    def read(self, name: str) -> np.ndarray:
        """A copy of a buffer."""
        buffer = self._named(name)
        return self.data[buffer.start : buffer.start + buffer.size].copy().view(buffer.dtype).reshape(buffer.shape)

    def initialised(self, name: str) -> np.ndarray:
        """Which elements of a buffer have been written, as an array of bools with its shape."""
        buffer = self._named(name)
        known = self.state[buffer.start : buffer.start + buffer.size] & INITIALISED != 0
        return known.reshape(*buffer.shape, buffer.dtype.itemsize).all(-1)

    def begin(self):
        """Begin a launch, which comes after everything written so far."""
        self.state &= ALLOCATED | INITIALISED
        self.reads = {}

    def holders(self, at: np.ndarray) -> tuple[list[str], list[int]]:
        """The buffers that contain some bytes, and how many of the bytes each contains."""
        found, counts = np.unique(np.searchsorted([b.start for b in self.buffers], at, "right") - 1, return_counts=True)
        return [self.buffers[i].name for i in found], list(counts)

    def describe(self, at: int) -> tuple[str, int | None, str]:
        at = int(at)
        if not self.buffers:
            return f"address {self.base + at:#x}, where there is no buffer", None, self.name
        buffer = min(self.buffers, key=lambda b: max(b.start - at, at - b.start - b.size + 1, 0))  # the nearest
        offset = at - buffer.start
        where = f"{buffer.name}, byte {offset}"
        if offset < 0:
            where = f"{-offset} bytes before {buffer.name}"
        elif offset >= buffer.size:
            where = f"{offset - buffer.size} bytes past the end of {buffer.name} ({buffer.size} bytes)"
        return where, offset, buffer.name

    def _named(self, name):
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def _grow(self, size: int):
        if size > len(self.data):
            size = -(-max(size, 2 * len(self.data)) // GUARD) * GUARD
            for field in ("data", "state", "stamp"):
                old = getattr(self, field)
                new = np.zeros(size, old.dtype)  # untouched memory costs nothing
                new[: len(old)] = old
                setattr(self, field, new)


def private(name: str, base: int, size: int, owners: int) -> Space:
    """Memory of which each of `owners` blocks or threads has its own `size` bytes, uninitialised."""
    stride = -(-size // 256) * 256 + 256
    space = Space(name, base, stride * owners, stride)
    space.state.reshape(owners, stride)[:, :size] = ALLOCATED
    return space


def _repeat(byte: int, size: int) -> np.unsignedinteger:
    return UNSIGNED[size](int.from_bytes(bytes([byte]) * size, "little"))
