"""A trial's inputs and the digest of its outputs, computed alike by the judge and by a candidate's process. The judge
draws the seed and starts its clock before it sends it, so a candidate can't work ahead."""

import torch
from torch import Tensor

KINDS = ("given", "signed", "scaled")
CHUNKS = 256  # per tensor; a judge looks at some of them
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def namespace(source: str) -> dict:
    names: dict = {"__name__": "problem"}
    exec(compile(source, "<problem>", "exec"), names)
    return names


def make_inputs(problem: dict, seed: int, kind: str, device: torch.device) -> list:
    """What the problem's `get_inputs` returns for this seed, on the device. kind "signed": with random signs for rows
    and columns, since inputs from [0, 1) hide what a kernel does with negative ones. "scaled": signed, and times 4 or
    1/4. "given": as it is."""
    torch.manual_seed(seed)
    with torch.device(device):
        inputs = problem["get_inputs"]()
        inputs = [item.to(device) if isinstance(item, Tensor) else item for item in inputs]
        if kind == "given":
            return inputs
        factor = 1.0 if kind == "signed" else (0.25, 4.0)[seed % 2]
        return [signed(x) * factor if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]


def signed(x: Tensor) -> Tensor:
    """x with random signs along its last two dimensions, the same for both if they have the same size, so that
    triangles and symmetric matrices stay so."""
    signs: dict[int, Tensor] = {}
    for dimension, size in list(enumerate(x.shape))[-2:]:
        if size not in signs:
            signs[size] = torch.randint(0, 2, (size,), device=x.device).to(x.dtype) * 2 - 1
        shape = [1] * x.dim()
        shape[dimension] = size
        x = x * signs[size].view(shape)
    return x


def make_model(problem: dict, name: str, factory: dict, seed: int, device: torch.device) -> torch.nn.Module:
    """`factory[name]` with the problem's initial inputs: equal models get equal weights from the same seed. It stays in
    training mode, as in KernelBench."""
    torch.manual_seed(seed)
    arguments = problem["get_init_inputs"]() if "get_init_inputs" in problem else []
    torch.manual_seed(seed)
    return factory[name](*arguments).to(device)


def digest(tensors: list[Tensor]) -> list[list[int]]:
    """A checksum of the bits of each chunk of each tensor: the sum of 2v² + v over its elements as integers v. Modulo
    2^32 and the like, no two v have the same 2v² + v."""
    found = []
    for tensor in tensors:
        raw = tensor.detach().contiguous().flatten()
        raw = raw.view(torch.uint8 if raw.dtype == torch.bool else BITS[raw.element_size()])
        mixed = (raw * 2).add_(1).mul_(raw)
        size = chunk_size(raw.numel())
        padded = torch.nn.functional.pad(mixed, (0, -raw.numel() % size))
        found.append(padded.view(-1, size).sum(1, dtype=torch.int64).tolist())
    return found


def chunk_size(count: int) -> int:
    """Elements per chunk of a tensor with `count`: at most CHUNKS chunks, the last one shorter."""
    return max(1, -(-count // CHUNKS))


def chunks(tensor: Tensor, numbers: list[int]) -> Tensor:
    parts = (flat := tensor.detach().contiguous().flatten()).split(chunk_size(flat.numel()))
    return torch.cat([parts[number] for number in numbers]) if flat.numel() else flat


def as_list(outputs) -> list:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
