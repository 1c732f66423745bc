"""GPU kernels in NVIDIA's CuTe DSL. Nothing outside this folder imports `cutlass`.

A kernel's file has, in this order: what it computes, in plain PyTorch (`NAME_reference`); the kernel, a small frozen
dataclass whose fields are constants of the compiled code; the operation that PyTorch sees (`torch.ops.rlcourse.NAME`);
and EXAMPLES, the kernel at the shapes of Qwen2 and Qwen3. A reference needs PyTorch alone, a kernel `pip install
'rlcourse[kernels]'`, and an operation a GPU as well. `kernel` has what all kernels and operations share. `toolchain`
compiles, caches and runs them, on a GPU or, slowly, in an interpreter on a CPU.

The products of a decode step (`products.py` and the four that build on it) are for Hopper alone: the interpreter knows
neither its tensor cores' instructions nor TMA. `rlcourse.rollout.cute_products` launches them; they have no operation.
"""

import importlib
import pkgutil


class KernelError(RuntimeError):
    """A kernel cannot run here, or not on these tensors. The message says why, and what to do."""


def examples(package: str = __name__) -> list:
    """Every kernel of a package (this folder) at the shapes of real models: the EXAMPLES of its modules."""
    folder = importlib.import_module(package).__path__
    modules = [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folder)]
    return [kernel for module in modules for kernel in getattr(module, "EXAMPLES", ())]
