"""Values on their way from the worker, which is not trusted, to the grader.

JSON holds the structure, an npz the numbers. Nothing is unpickled. What is no tensor, number, text or container of
those arrives as the name of its type.
"""

import io
import json
import struct
import zipfile
from typing import Any

import numpy as np
import torch

MAX_BYTES = 1 << 28  # of one reply; an answer to an exercise has a few numbers


class Unreadable(Exception):
    """A reply that is not what `encode` makes."""


def encode(value: Any) -> bytes:
    """A value as bytes: tensors and arrays go into an npz, the rest into JSON. Raises Unreadable for one too large."""
    arrays: list[np.ndarray] = []

    def tree(item, depth=0):
        if depth > 20:
            return {"other": "a structure nested too deeply"}
        if isinstance(item, torch.Tensor):
            item = item.detach().cpu()
            item = item.float() if item.dtype == torch.bfloat16 else item
            arrays.append(item.contiguous().numpy())
            return {"tensor": len(arrays) - 1}
        if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "biuf":
            arrays.append(np.asarray(item))
            return {"tensor": len(arrays) - 1}
        if item is None or type(item) in (bool, int, float, str):
            return {"plain": item}
        if type(item) in (tuple, list):
            return {type(item).__name__: [tree(i, depth + 1) for i in item]}
        if type(item) is dict and all(type(key) is str for key in item):
            return {"dict": {key: tree(i, depth + 1) for key, i in item.items()}}
        return {"other": type(item).__name__}

    text = json.dumps(tree(value)).encode()
    if len(text) + sum(array.nbytes for array in arrays) > MAX_BYTES:
        raise Unreadable("the result is too large")
    numbers = io.BytesIO()
    np.savez(numbers, **{str(i): array for i, array in enumerate(arrays)})
    return struct.pack("<I", len(text)) + text + numbers.getvalue()


def decode(data: bytes) -> Any:
    """The value that `encode` was given, arrays as tensors. Raises Unreadable for anything else."""
    try:
        (length,) = struct.unpack("<I", data[:4])
        archive = zipfile.ZipFile(io.BytesIO(data[4 + length :]))
        if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
            raise Unreadable("the result is too large")
        arrays = np.load(io.BytesIO(data[4 + length :]), allow_pickle=False)
        return _untree(json.loads(data[4 : 4 + length]), arrays)
    except Unreadable:
        raise
    except Exception as error:  # the bytes come from the reader's process: anything may be wrong with them
        raise Unreadable(f"the result could not be read ({type(error).__name__})") from None


def _untree(node: dict, arrays) -> Any:
    ((kind, content),) = node.items()
    match kind:
        case "tensor":
            return torch.from_numpy(np.array(arrays[str(int(content))]))
        case "plain":
            return content
        case "list":
            return [_untree(item, arrays) for item in content]
        case "tuple":
            return tuple(_untree(item, arrays) for item in content)
        case "dict":
            return {key: _untree(item, arrays) for key, item in content.items()}
        case "other":
            raise Unreadable(f"the result is {content}, expected a tensor or a number")
    raise Unreadable("the result could not be read")


def read_frame(read) -> bytes | None:
    """One message: four bytes of length, then so many bytes; None at the end.

    `read(n)` returns n bytes, fewer at the end. Raises Unreadable for a message of more than `MAX_BYTES`.
    """
    head = read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    if length > MAX_BYTES:
        raise Unreadable("the result is too large")
    body = read(length)
    return body if len(body) == length else None


def frame(data: bytes) -> bytes:
    """`data` as one message for `read_frame`."""
    return struct.pack("<I", len(data)) + data
