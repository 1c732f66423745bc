"""Running kernels in tests: on the GPU where there is one, in the interpreter where there is none."""

import contextlib
import functools
from unittest.mock import patch

import torch
from torch import Tensor

from rlcourse.kernels import toolchain
from rlcourse.kernels.toolchain import compiled, interpreted, simulate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 512  # bytes of 0xFF around each tensor on a GPU: nan as a float, -1 as an integer


def launch(kernel, *tensors, **order) -> None:
    """Run a kernel on CPU tensors, which it changes in place. Nothing may be written beside them, and what is read
    there is poison. order: see `simulate`; a GPU takes its own."""
    if DEVICE == "cpu":
        simulate(kernel, *tensors, **order)
        return
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, Tensor)}
    guarded = {key: _guarded(storage) for key, storage in storages.items()}
    compiled(kernel)(*(_moved(t, guarded) if isinstance(t, Tensor) else t for t in tensors))
    torch.cuda.synchronize()
    for key, storage in storages.items():
        found = guarded[key].cpu()
        assert (found[:GUARD] == 0xFF).all() and (found[-GUARD:] == 0xFF).all(), f"{kernel} wrote beside its tensors"
        _bytes(storage).copy_(found[GUARD:-GUARD])


def _bytes(storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _guarded(storage) -> Tensor:
    held = torch.full((storage.nbytes() + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)
    held[GUARD:-GUARD] = _bytes(storage).to(DEVICE)
    return held


def _moved(tensor: Tensor, guarded: dict) -> Tensor:
    held = guarded[tensor.untyped_storage().data_ptr()][GUARD:-GUARD].view(tensor.dtype)
    return held.as_strided(tensor.shape, tensor.stride(), GUARD // tensor.element_size() + tensor.storage_offset())


@contextlib.contextmanager
def anywhere(**order):
    """Operations run on tensors of DEVICE, and what they leave unwritten is nan. order: see `simulate`."""
    ordered = patch.object(toolchain, "simulate", functools.partial(simulate, **order))
    torch.use_deterministic_algorithms(True)  # with which new tensors are filled
    try:
        with interpreted() if DEVICE == "cpu" else contextlib.nullcontext(), ordered:
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def on_device(tensor: Tensor) -> Tensor:
    """A copy with the same strides, and the same numbers between its rows."""
    held = _bytes(tensor.untyped_storage()).to(DEVICE, copy=True).view(tensor.dtype)
    return held.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def run(operation, *arguments, **order):
    """What an operation returns for CPU tensors, on the CPU; it changes them where it says so."""
    moved = [on_device(a) if isinstance(a, Tensor) else a for a in arguments]
    with anywhere(**order):
        found = operation(*moved)
    for before, after in zip(arguments, moved, strict=True):
        if isinstance(before, Tensor):
            _bytes(before.untyped_storage()).copy_(_bytes(after.untyped_storage()))
    return tuple(f.cpu() for f in found) if isinstance(found, tuple) else None if found is None else found.cpu()


def spread(tensor: Tensor, step: int) -> Tensor:
    """The same rows [rows, size] with nan between them, `step` elements from one row to the next."""
    wide = torch.full((len(tensor), step), torch.nan, dtype=tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def rows_of(rows: int, width: int, dtype: torch.dtype, gap: int = 8, scale: float = 1.0) -> Tensor:
    """[rows, width] with nan between the rows."""
    return spread((scale * torch.randn(rows, width)).to(dtype), width + gap)
