"""The inputs of a trial and what binds its outputs: the judge and the process of a candidate compute both alike.

A trial is a seed, a shape and a kind, and inputs are made from them on the device. The judge draws the seed and starts
its clock before it tells, so nobody can work ahead.
"""

import torch
from torch import Tensor

KINDS = ("given", "signed", "scaled")
CHUNKS = 256  # of a tensor, of which a judge may want to see some
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of an element's bytes


def namespace(source: str, name: str = "problem") -> dict:
    """The names that a problem's text defines."""
    names: dict = {"__name__": name}
    exec(compile(source, f"<{name}>", "exec"), names)
    return names


def make_inputs(problem: dict, seed: int, kind: str, device: torch.device) -> list:
    """What the problem's `get_inputs` gives for this seed, on the device, changed by `kind`.

    given: as they are. signed: every number of a row and of a column changes its sign with it, so that zeros, triangles
    and symmetric matrices stay what they are; numbers drawn from [0, 1) hide what a kernel does with others. scaled:
    likewise, and four times as large or as small.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        inputs = problem["get_inputs"]()
        inputs = [item.to(device) if isinstance(item, Tensor) else item for item in inputs]
        if kind == "given":
            return inputs
        factor = 1.0 if kind == "signed" else (0.25, 4.0)[seed % 2]
        floats = (isinstance(item, Tensor) and item.is_floating_point() for item in inputs)
        return [signed(item) * factor if is_float else item for item, is_float in zip(inputs, floats, strict=True)]


def signed(x: Tensor) -> Tensor:
    """x with random signs for its last two dimensions; dimensions of one size share them."""
    signs: dict[int, Tensor] = {}
    for dimension, size in list(enumerate(x.shape))[-2:]:
        if size not in signs:
            signs[size] = torch.randint(0, 2, (size,), device=x.device).to(x.dtype) * 2 - 1
        shape = [1] * x.dim()
        shape[dimension] = size
        x = x * signs[size].view(shape)
    return x


def make_model(problem: dict, name: str, factory: dict, seed: int, device: torch.device) -> torch.nn.Module:
    """`name` of `factory`, built with the initial inputs of `problem`: one seed gives equal weights to equal models.

    It stays in training mode, as KernelBench has it: a batch norm takes the statistics of its batch.
    """
    torch.manual_seed(seed)
    arguments = problem["get_init_inputs"]() if "get_init_inputs" in problem else []
    torch.manual_seed(seed)
    return factory[name](*arguments).to(device)


def digest(tensors: list[Tensor]) -> list[list[int]]:
    """Numbers that hold tensors to their bits, in few passes: for each tensor one for each of its chunks.

    That is the sum of 2v² + v over the chunk's bits as whole numbers v. Modulo 2^32 and the like, as computed here, no
    two v have the same 2v² + v.
    """
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
    """Numbers in a chunk of a tensor that holds `count`: so many that there are CHUNKS, the last one shorter."""
    return max(1, -(-count // CHUNKS))


def chunks(tensor: Tensor, numbers: list[int]) -> Tensor:
    """These chunks of a tensor, one behind the other."""
    flat = tensor.detach().contiguous().flatten()
    if flat.numel() == 0:
        return flat
    return torch.cat([flat.split(chunk_size(flat.numel()))[number] for number in numbers])


def as_list(outputs) -> list:
    """What a forward pass gave, one tensor or several, as a list."""
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
