"""Values from a process that is not trusted: JSON for the structure, then the numbers' raw bytes. No pickle."""

import io
import json
import math
import socket
import struct
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_BYTES = 1 << 26  # of one reply; an answer to an exercise has a few numbers
MAX_TEXT = 1 << 20  # of its JSON, whose objects take more room than their text
MAX_KEYS = 1000  # of a dict: keys of one hash are compared with each other
NAMES = "float16 bfloat16 float32 float64 complex64 complex128 bool uint8 int8 int16 int32 int64"
DTYPES = {name: getattr(torch, name) for name in NAMES.split()}


class Unreadable(Exception):
    """A value that `encode` can't write, or bytes that it didn't write."""


def plain(value: Any) -> Any:
    """A value as it arrives in another process: arrays become tensors on the CPU. Raises Unreadable."""
    return decode(encode(value))


def encode(value: Any, most: int = MAX_BYTES) -> bytes:
    """A value as at most `most` bytes: a length, JSON of that length, the tensors' bytes. Raises Unreadable for
    anything but tensors, numpy arrays, numbers, strings, bools, None, and tuples, lists and dicts of them."""
    tensors: list[bytes] = []
    text = json.dumps(_tree(value, tensors, 0, most)).encode()
    data = b"".join([struct.pack("<I", len(text)), text, *tensors])
    if len(data) > most or len(text) > MAX_TEXT:
        raise Unreadable("the result is too large")
    return data


def _tree(item: Any, tensors: list[bytes], depth: int, most: int) -> Any:
    """A value as JSON: plain values as they are, all others as a list that begins with their kind."""
    if depth > 20:
        raise Unreadable("the result is nested too deeply")
    if item is None or isinstance(item, bool | str):
        return item
    if isinstance(item, int | float):
        return int(item) if isinstance(item, int) else float(item)
    if isinstance(item, np.ndarray | np.generic):
        item = torch.from_numpy(np.array(item))
    if isinstance(item, Tensor):
        name = str(item.dtype).removeprefix("torch.")
        if name not in DTYPES or item.layout != torch.strided:
            raise Unreadable(f"the result is a tensor of {item.dtype} and {item.layout}, expected an ordinary one")
        if item.numel() * item.element_size() > most:
            raise Unreadable("the result is too large")
        numbers = torch.empty(item.numel(), dtype=item.dtype)  # whose strides are what they seem
        tensors.append(numbers.copy_(item.detach().flatten()).view(torch.uint8).numpy().tobytes())
        return ["tensor", name, list(item.shape)]
    if isinstance(item, tuple | list):
        return ["tuple" if isinstance(item, tuple) else "list", *(_tree(i, tensors, depth + 1, most) for i in item)]
    if isinstance(item, dict) and len(item) <= MAX_KEYS:
        return ["dict", *([_tree(i, tensors, depth + 1, most) for i in pair] for pair in item.items())]
    if isinstance(item, dict):
        raise Unreadable("the result is too large")
    raise Unreadable(f"the result is {type(item).__name__}, expected a tensor or a number")


def decode(data: bytes) -> Any:
    """The value that `encode` was given, arrays as tensors. Raises Unreadable for other bytes."""
    stream = io.BytesIO(data)
    try:
        (length,) = struct.unpack("<I", stream.read(4))
        if length > MAX_TEXT:
            raise ValueError("too much text")
        value = _untree(json.loads(stream.read(length)), stream)
        if stream.read(1):
            raise ValueError("bytes are left over")
        return value
    except Exception as error:  # anything may be wrong with the bytes
        raise Unreadable(f"the result could not be read ({type(error).__name__})") from None


def _untree(node: Any, numbers: io.BytesIO) -> Any:
    """The value of a node; its tensors' bytes come next in `numbers`."""
    if isinstance(node, dict):
        raise ValueError("no value")
    if not isinstance(node, list):
        return node
    kind, *items = node
    if kind == "tensor":
        return _tensor(*items, numbers)
    if kind == "dict":
        if len(items) > MAX_KEYS:
            raise ValueError("too many keys")
        return {_untree(key, numbers): _untree(item, numbers) for key, item in items}
    return {"tuple": tuple, "list": list}[kind](_untree(item, numbers) for item in items)


def _tensor(name: str, shape: list[int], numbers: io.BytesIO) -> Tensor:
    if len(shape) > 16 or not all(type(size) is int and 0 <= size < 1 << 32 for size in shape):
        raise ValueError("no shape")
    size = math.prod(shape) * DTYPES[name].itemsize
    data = bytearray(numbers.read(size))
    if len(data) < size:
        raise ValueError("bytes are missing")
    if size == 0:
        return torch.empty(shape, dtype=DTYPES[name])
    raw = torch.frombuffer(data, dtype=torch.uint8)
    # A bool whose byte is neither 0 nor 1 would compare as nothing does.
    found = raw != 0 if name == "bool" else raw.view(DTYPES[name])
    return found.view(shape)


def send(connection: socket.socket, data: bytes, seconds: float | None = None) -> None:
    """Send one message. Raises TimeoutError after `seconds`, OSError if the other side has ended."""
    connection.settimeout(seconds)
    connection.sendall(struct.pack("<I", len(data)) + data)


def receive(connection: socket.socket, seconds: float | None = None, limit: int = (1 << 32) - 1) -> bytes:
    """The next message. Raises TimeoutError if it isn't complete after `seconds`, EOFError if the other side ended,
    Unreadable if it is longer than `limit` bytes."""
    deadline = time.monotonic() + (math.inf if seconds is None else seconds)

    def read(count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left if left < math.inf else None)
            piece = connection.recv(min(count - len(found), 1 << 20))
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)

    (length,) = struct.unpack("<I", read(4))
    if length > limit:
        raise Unreadable("the result is too large")
    return read(length)
