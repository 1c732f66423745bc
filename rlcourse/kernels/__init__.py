"""GPU kernels in NVIDIA's CuTe DSL. Nothing outside this folder imports `cutlass`.

A kernel's file has, in this order: what it computes, in plain PyTorch (`NAME_reference`); the kernel, a small frozen
dataclass whose fields are constants of the compiled code; and the operation that PyTorch sees
(`torch.ops.rlcourse.NAME`). A reference needs PyTorch alone, a kernel `pip install 'rlcourse[kernels]'`, and an
operation a GPU as well. `toolchain` compiles, caches and runs kernels, on a GPU or, slowly, in an interpreter on a CPU.

The products of a decode step (`products.py` and the four that build on it) are for Hopper alone: the interpreter knows
neither its tensor cores' instructions nor TMA. `rlcourse.rollout.cute_products` launches them, and
compares each with the kernel in Triton it stands for; they have neither reference nor operation.
"""


class KernelError(RuntimeError):
    """A kernel cannot run here, or not on these tensors. The message says why, and what to do."""
