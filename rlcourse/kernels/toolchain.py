"""Compiles kernels, caches the machine code, and runs them on a GPU or in an interpreter on a CPU.

A kernel is an object of a frozen dataclass, whose fields are constants of the compiled code. It has

    arguments()                  a tuple of `Argument`, `Scalar`, or None where this variant takes none
    threads                      threads per block
    grid(*tensors)               blocks in x, y and z, from the tensors' shapes
    __call__(*tensors, stream)   the host function, a `cute.jit` that launches `kernel` once: usually `Kernel`'s
    kernel(*tensors)             what each thread does, a `cute.kernel`; it takes all of the arguments

`launch(kernel, *tensors)` is what operations call.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
import re
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rlcourse.kernels import KernelError, dsl
from rlcourse.kernels.arguments import Argument, check, fake, interpret  # noqa: F401  Argument: for lessons

ARCHITECTURES = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")  # what the kernels are tested for
REGISTERS, STACK = 0x2F, 0x12  # the attributes EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE
WITH_VALUE = 4  # the form of an attribute whose value follows it


@dataclass(frozen=True, eq=False)
class Compiled:
    """A kernel's code for one architecture. A call with tensors launches it on torch's current stream. shared_bytes:
    dynamic shared memory per block; registers, stack_bytes: per thread. A stack means spills, or an array in memory."""

    kernel: object
    arch: str
    folder: Path = field(repr=False)
    shared_bytes: int
    registers: int
    stack_bytes: int

    @functools.cached_property
    def ptx(self) -> str:
        return (self.folder / "kernel.ptx").read_text()

    @functools.cached_property
    def function(self):
        """The host function, in machine code: it takes torch's tensors as they are."""
        return dsl.cute.runtime.load_module(str(self.folder / "kernel.o"), enable_tvm_ffi=True).kernel

    def __call__(self, *tensors) -> None:
        try:
            self.function(*tensors)
        except Exception as error:  # it looks at dtypes, shapes and strides itself
            check(self.kernel, tensors, "cuda")  # says the same in a sentence
            raise KernelError(f"{self.kernel} did not launch: {error}") from error


def launch(kernel, *tensors) -> None:
    """Run a kernel on tensors of a GPU, or in the interpreter within `interpreted()`; nothing runs with the fake
    tensors of torch.compile, or where there is nothing to do. Raises KernelError."""
    if isinstance(tensors[0], FakeTensor) or tensors[0].is_meta or 0 in kernel.grid(*tensors):
        return
    if _interpreting:
        simulate(kernel, *tensors)
        return
    if not any(tensor.is_cuda for tensor in tensors if isinstance(tensor, Tensor)):
        name = type(kernel).__name__
        raise KernelError(f"{name} runs on an NVIDIA GPU and its tensors are on the CPU: move them with .to('cuda').")
    compiled(kernel)(*tensors)


def can_begin_early(device: torch.device) -> bool:
    """Whether kernels can begin before the one before has ended (programmatic dependent launch, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


_interpreting = False


@contextlib.contextmanager
def interpreted():
    """Within it, the operations of this package run on CPU tensors, in the interpreter: exact, and very slow."""
    global _interpreting
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def simulate(kernel, *tensors, arch: str = "sm_86", order: str = "lockstep", seed: int = 0):
    """Run a kernel's PTX on CPU tensors, in place, and return the report of `ptx_interpreter.run`. order, seed: how
    threads take turns. Raises `ptx_interpreter.PTXError` for the kernel's mistakes, KernelError for wrong tensors."""
    import ptx_interpreter as ptx  # here, because a notebook that is graded has this module and no interpreter

    check(kernel, tensors, "cpu")
    code = compiled(kernel, arch)
    (entry,) = ptx.parse(code.ptx)
    blocks = tuple(int(size) for size in kernel.grid(*tensors)), kernel.threads, code.shared_bytes
    return interpret(entry, *blocks, kernel.arguments(), tensors, order=order, seed=seed)


@functools.cache
def workspace(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, owner: str) -> Tensor:
    """Zeros that a kernel may write to, the same tensor at each call, since a CUDA graph keeps its address. owner: an
    operation; two that may run at once must not share. Raises KernelError for a new one while a graph is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelError(f"{owner} meets this shape for the first time: call it once before capturing a CUDA graph.")
    return torch.zeros(shape, dtype=dtype, device=device)


def compiled(kernel, arch: str | None = None) -> Compiled:
    """A kernel's machine code for an architecture ("sm_86", "sm_90a", ...), by default that of the GPU at hand. This
    package's kernels are cached in RLCOURSE_CACHE_DIR (~/.cache/rlcourse/kernels), by a hash of source, fields,
    architecture and compiler; a reader's are compiled once per object. Raises KernelError without a compiler or, by
    default, without a GPU."""
    ours = type(kernel).__module__.startswith(("rlcourse.kernels.", "rlcourse.course.kernels."))
    return _compiled(kernel, arch or _gpu_arch(), None if ours else id(kernel))


@functools.cache
def _compiled(kernel, arch: str, identity: int | None) -> Compiled:
    if not dsl.INSTALLED:
        raise KernelError("CuTe DSL is not installed: pip install 'rlcourse[kernels]'.")
    cache = os.environ.get("RLCOURSE_CACHE_DIR") or Path.home() / ".cache" / "rlcourse" / "kernels"
    folder = Path(_temporary().name if identity else cache)
    folder /= f"{_name(kernel)}-{arch}-{identity or _fingerprint(kernel, arch)}"
    if not folder.exists():
        _build(kernel, arch, folder)
    return Compiled(kernel, arch, folder, **json.loads((folder / "kernel.json").read_text()))


def _build(kernel, arch: str, folder: Path) -> None:
    """Compile into a folder on the side, and rename it when it is whole: two processes may do so at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        type(kernel).kernel.set_name_prefix(_name(kernel), remove_cutlass_symbol=True, keep_mangled_name=False)
        stream = dsl.cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        options = f"--gpu-arch={arch} --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir={aside}"
        code = dsl.cute.compile(kernel, *fake(kernel.arguments()), stream, options=options)
        whole = Path(aside, "whole")
        whole.mkdir()
        code.export_to_c(object_file_path=str(whole / "kernel.o"), function_name="kernel")
        (whole / "kernel.ptx").write_text(code.__ptx__)
        (whole / "kernel.cubin").write_bytes(code.__cubin__)
        facts = {"shared_bytes": _shared_bytes(str(code.ir_module))} | resources(code.__cubin__)
        (whole / "kernel.json").write_text(json.dumps(facts))
        with contextlib.suppress(OSError):  # somebody else was first
            whole.rename(folder)


def _shared_bytes(host_code: str) -> int:
    """What the host code asks for at launch: the third field of the launch configuration."""
    field = r"(%\d+) = llvm.getelementptr %\d+\[0, 2\][^\n]*i64, ptr, ptr, i32\)>\n\s*llvm.store (%\d+), \1 : i64"
    launches = list(re.finditer(field, host_code))
    if len(launches) != 1:
        raise KernelError(f"A kernel's host function must launch once, this one launches {len(launches)} times.")
    function = host_code[: launches[0].start()].rpartition("llvm.func")[2]
    return int(re.search(rf"{launches[0][2]} = llvm.mlir.constant\((\d+) : i64\)", function)[1])


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, from machine code. A cubin is an ELF file, whose section .nv.info
    lists attributes: a byte for the form, one for the attribute, and two for a short value or for the length of one
    that follows, here a function's number and how many it needs."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]  # name, start, length
    named = {cubin[sections[names][1] + name :].partition(b"\0")[0]: place for name, *place in sections}
    at, length = named[b".nv.info"]
    end, found = at + length, {REGISTERS: 0, STACK: 0}
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == WITH_VALUE:
            if attribute in found:
                found[attribute] = max(found[attribute], struct.unpack_from("<II", cubin, at)[1])
            at += length
    return {"registers": found[REGISTERS], "stack_bytes": found[STACK]}


@functools.cache
def _gpu_arch() -> str:
    if not torch.cuda.is_available():
        raise KernelError("There is no NVIDIA GPU here: run the kernel in the interpreter, or name an architecture.")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        name = torch.cuda.get_device_name()
        raise KernelError(f"{name} is too old for these kernels: they need an NVIDIA GPU since Ampere (2020).")
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _name(kernel) -> str:
    """RMSNorm -> rms_norm: the kernel's name in PTX and in traces."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(kernel).__name__).lower()


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    """Goes away when the process ends."""
    return tempfile.TemporaryDirectory(prefix="rlcourse-kernels-")


@functools.cache
def _source(folder: Path) -> bytes:
    folders = sorted({Path(__file__).parent, folder})
    return b"".join(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py")))


def _fingerprint(kernel, arch: str) -> str:
    import tvm_ffi

    versions = f"{dsl.cutlass.__version__} {tvm_ffi.__version__} {platform.machine()}"
    text = f"{type(kernel).__module__} {kernel!r} {arch} {versions}"
    folder = Path(inspect.getfile(type(kernel))).parent
    return hashlib.sha256(text.encode() + _source(folder)).hexdigest()[:16]
