"""Running kernels in tests: on the GPU where there is one, in the interpreter where there is none."""

import contextlib

import torch

from rlcourse.kernels.toolchain import compiled, interpreted, simulate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 512  # bytes of 0xFF around each tensor on a GPU: nan as a float, -1 as an integer
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def launch(kernel, *tensors, **order) -> None:
    """Run a kernel on CPU tensors, which it changes in place. Nothing may be written beside them, and what is read
    there is poison. order: see `simulate`; a GPU takes its own."""
    if DEVICE == "cpu":
        simulate(kernel, *tensors, **order)
        return
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
    guarded = {key: _guarded(storage) for key, storage in storages.items()}
    compiled(kernel)(*(_moved(t, guarded) if isinstance(t, torch.Tensor) else t for t in tensors))
    torch.cuda.synchronize()
    for key, storage in storages.items():
        found = guarded[key].cpu()
        assert (found[:GUARD] == 0xFF).all() and (found[-GUARD:] == 0xFF).all(), f"{kernel} wrote beside its tensors"
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(found[GUARD:-GUARD])


def _guarded(storage) -> torch.Tensor:
    held = torch.full((storage.nbytes() + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=DEVICE)
    held[GUARD:-GUARD] = torch.empty(0, dtype=torch.uint8).set_(storage).to(DEVICE)
    return held


def _moved(tensor: torch.Tensor, guarded: dict) -> torch.Tensor:
    held = guarded[tensor.untyped_storage().data_ptr()][GUARD:-GUARD].view(tensor.dtype)
    return held.as_strided(tensor.shape, tensor.stride(), GUARD // tensor.element_size() + tensor.storage_offset())


def run(operation, *arguments):
    """What an operation returns for CPU tensors, on the CPU; it changes them where it says so."""
    moved = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        found = operation(*moved)
    for before, after in zip(arguments, moved, strict=True):
        if isinstance(before, torch.Tensor) and before is not after:
            before.copy_(after)
    return tuple(f.cpu() for f in found) if isinstance(found, tuple) else found.cpu()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the last bit of a 16-bit dtype: `expected` is rounded once from float32, and so must `found` be."""
    assert not found.isnan().any(), "not everything was written, or poison was read"
    steps = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=steps, atol=1e-6)


def spread(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The same rows [rows, size] with nan between them, `step` elements from one row to the next."""
    wide = torch.full((len(tensor), step), torch.nan, dtype=tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def slopes(loss, x: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """The gradient of `loss`, a function of a float64 tensor like x, by finite differences."""
    x = x.detach().double()
    steps = step * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    return torch.stack([(loss(x + s) - loss(x - s)) / (2 * step) for s in steps]).view(x.shape)
