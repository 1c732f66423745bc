"""What a kernel takes: a description from which its compilation, the checks of its tensors and its parameters are made.
What is not known when it is compiled is handed over at launch: of a tensor its address, then its unknown sizes and
strides."""

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.kernels import KernelError, dsl

NAMES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16", "int32": "Int32", "int64": "Int64"}


@dataclass(frozen=True)
class Argument:
    """A tensor. shape: an int is a constant, a string the name of a size that is known at launch; equal names are equal
    sizes. The strides of the first `free` dimensions are known at launch, the others follow from the constants of shape
    without gaps. align: bytes by which the address and the free strides can be divided; a 16-byte load needs 16.
    output: the kernel writes it and reads nothing of it that it did not write."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    free: int = 0
    align: int = 16
    output: bool = False

    def __post_init__(self):
        last = max((place for place, size in enumerate(self.shape) if isinstance(size, str)), default=0)
        if last > self.free:
            raise KernelError(
                f"Strides of {self.name} follow from its size {self.shape[last]!r}, which is known at launch alone: "
                f"give it free={last}, or a number for that size."
            )

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def strides(self) -> tuple[int | None, ...]:
        """In elements; None where a stride is known at launch."""
        shape = self.shape
        return tuple(None if i < self.free else math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Scalar:
    """A number, given at each launch."""

    name: str
    dtype: str


def type_name(tensor: Tensor) -> str:
    """How kernels call a tensor's dtype: "bfloat16" for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def fake(arguments: tuple) -> list:
    """What `cute.compile` needs to know of the arguments, without tensors."""
    sizes = {}  # one symbol for each name

    def one(argument):
        if argument is None:
            return None
        dtype = getattr(dsl.cutlass, NAMES[argument.dtype])
        if isinstance(argument, Scalar):
            return dtype(0)
        steps = max(1, argument.align // argument.itemsize)
        strides = tuple(dsl.cute.sym_int64(divisibility=steps) if s is None else s for s in argument.strides)
        shape = (sizes.setdefault(n, dsl.cute.sym_int()) if isinstance(n, str) else n for n in argument.shape)
        return dsl.cute.runtime.make_fake_tensor(dtype, tuple(shape), strides, assumed_align=argument.align)

    return [one(argument) for argument in arguments]


def check(kernel, tensors: tuple, device: str) -> None:
    """Raises KernelError, in one sentence, where the kernel cannot take these tensors on a device of this type."""
    owner, arguments = getattr(kernel, "owner", type(kernel).__name__), kernel.arguments()
    if len(arguments) != len(tensors):
        raise KernelError(f"{owner} takes {len(arguments)} arguments and got {len(tensors)}.")
    sizes, devices = {}, set()
    for argument, tensor in zip(arguments, tensors, strict=True):
        if argument is None and tensor is not None:
            raise KernelError(f"{owner} takes no tensor where it got {tuple(tensor.shape)}: {kernel}.")
        if isinstance(argument, Argument):
            _check_one(f"{argument.name} of {owner}", argument, tensor, sizes)
            devices.add(tensor.device)
    if {found.type for found in devices} != {device} or len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise KernelError(f"{owner} needs all its tensors on one {device} device and got them on {found}.")


def _check_one(what: str, argument: Argument, tensor: Tensor, sizes: dict[str, int]) -> None:
    if not isinstance(tensor, Tensor):
        raise KernelError(f"{what} must be a tensor and is {type(tensor).__name__}.")
    if type_name(tensor) != argument.dtype:
        raise KernelError(f"{what} must be {argument.dtype} and is {type_name(tensor)}: convert it with .to().")
    wanted, found = [sizes.get(size, size) for size in argument.shape], list(tensor.shape)
    known = [size if isinstance(want, str) else want for want, size in zip(wanted, found, strict=False)]
    if len(wanted) != len(found) or known != found:
        raise KernelError(f"{what} must have shape [{', '.join(map(str, wanted))}] and has {found}.")
    sizes.update({name: size for name, size in zip(argument.shape, found, strict=True) if isinstance(name, str)})
    for place in reversed(range(tensor.dim())):
        want, stride = argument.strides[place], tensor.stride(place)
        here = f"stride {stride} in dimension {place}"
        if want not in (None, stride) and found[place] != 1:
            raise KernelError(f"{what} must have stride {want} and has {here}: make it contiguous.")
        if want is None and stride * argument.itemsize % argument.align:
            step = argument.align // argument.itemsize
            loads = f"{argument.align}-byte loads"
            raise KernelError(f"{what} has {here}, which {loads} cannot take: lay it out with a multiple of {step}.")
    if tensor.data_ptr() % argument.align:
        raise KernelError(f"{what} begins at an address that {argument.align} does not divide: copy it with .clone().")


def pack(arguments: tuple, tensors: tuple, addresses: list[int | None], parameters: list) -> bytes:
    """The bytes of a kernel's parameters, as a launch on a GPU lays them out. addresses: of the tensors, None for what
    is none; parameters: `ptx_interpreter.Param` of each, from the PTX."""
    pieces = []
    for argument, tensor, address in zip(arguments, tensors, addresses, strict=True):
        if isinstance(argument, Scalar):
            pieces.append(struct.pack({"float32": "<f", "int32": "<i", "int64": "<q"}[argument.dtype], tensor))
        elif argument is not None:
            sizes = [n for known, n in zip(argument.shape, tensor.shape, strict=True) if isinstance(known, str)]
            strides = [n for known, n in zip(argument.strides, tensor.stride(), strict=True) if known is None]
            head = struct.pack(f"<Q{len(sizes)}i", address, *sizes)
            padding = bytes(-len(head) % 8)  # strides are aligned to 8 bytes, and so is the whole
            pieces.append(head + padding + struct.pack(f"<{len(strides)}q", *strides))
    given, wanted = [len(piece) for piece in pieces], [parameter.size for parameter in parameters]
    if given != wanted:
        raise KernelError(f"arguments() gives {given} bytes, the compiled kernel takes {wanted}.")
    packed = b""
    for piece, parameter in zip(pieces, parameters, strict=True):
        packed = packed.ljust(parameter.offset, b"\0") + piece
    return packed


def interpret(entry, grid: tuple, threads: int, shared_bytes: int, arguments: tuple, tensors: tuple, **options):
    """`ptx_interpreter.run` of an entry, with these options, on CPU tensors, in place. Views of one storage stay that;
    it can be read from the start unless all of them are outputs."""
    import ptx_interpreter as ptx  # here, because a notebook that is graded has this module and no interpreter

    memory = ptx.Memory()
    pairs = [(a, t) if isinstance(a, Argument) else (None, None) for a, t in zip(arguments, tensors, strict=True)]
    storages = {}  # by address: the name of the first view, the bytes, whether they can be read
    for argument, tensor in pairs:
        if argument is not None:
            held = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
            name, held, readable = storages.get(_start(tensor), (argument.name, held, False))
            storages[_start(tensor)] = name, held, readable or not argument.output
    starts = {key: memory.place(name, held.copy(), readable) for key, (name, held, readable) in storages.items()}
    addresses = [t if a is None else starts[_start(t)] + t.data_ptr() - _start(t) for a, t in pairs]
    packed = pack(arguments, tensors, addresses, entry.params)
    report = ptx.run(entry, grid, threads, packed, memory, shared_bytes, **options)
    for name, held, _ in storages.values():
        held[:] = memory.read(name)
    return report


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
