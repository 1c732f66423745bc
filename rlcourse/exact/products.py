"""Matrix products whose sums have one order: PyTorch's, by cuBLASLt, which may not split their depth. On Hopper the
tensor cores then give the bits of one accumulator that runs from the first number to the last, whatever library,
instruction or tile computes it, for any number of rows but one (a product of another kind, which `linear` avoids)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

SHARES = 4  # of the depth of `down`, which a decode step computes side by side
MULTIPLE = 128  # of columns in a share


def share_of(depth: int) -> int:
    """Columns of a share of a product that is `depth` deep; the last one may have fewer."""
    return -(-depth // MULTIPLE // SHARES) * MULTIPLE


@contextmanager
def one_chain() -> Iterator[None]:
    """Within, products of 16-bit numbers on a GPU are not split. It is a switch of the process: keep it short."""
    if not torch.cuda.is_available():
        yield
        return
    cuda, kinds = torch.backends.cuda, ("fp16", "bf16")
    library, before = cuda.preferred_blas_library(), {}
    for kind in kinds:
        name = f"allow_{kind}_reduced_precision_reduction"
        before[name] = getattr(cuda.matmul, name), getattr(cuda.matmul, f"{name}_split_k")
        setattr(cuda.matmul, name, (False, False))
    cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        cuda.preferred_blas_library(library)
        for name, value in before.items():
            setattr(cuda.matmul, name, value)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, k] times weight [m, k] transposed, in their dtype. A single row is computed as two."""
    if len(x) == 1:
        return F.linear(x.expand(2, -1), weight)[:1]
    return F.linear(x, weight)


def add_product(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """x [n, d] float32 plus a [n, k] times weight [d, k] transposed, in float32."""
    if not a.is_cuda or a.dtype == torch.float32:
        return x + a.float() @ weight.T.float()
    return torch.addmm(x, a, weight.T, out_dtype=torch.float32)


def add_shares(x: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """As `add_product`, of a product so deep that a decode step shares it: x + ((s0 + s1) + (s2 + s3))."""
    size, pairs = share_of(a.shape[1]), []
    for number, share in enumerate(zip(a.split(size, 1), weight.T.split(size, 0), strict=True)):
        if number % 2:
            add_to(pairs[-1], *share)
        else:
            pairs.append(product_float32(*share))
    return add_up(x, *pairs) if len(pairs) == 2 else pairs[0].add_(x)


def add_up(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """x + (first + second), of float32, in the memory of `first`: on a GPU in one kernel, which reads each once."""
    if not x.is_cuda:
        return first.add_(second).add_(x)
    from rlcourse.exact import EXACT, pass_kernels  # only where there is Triton

    count, block = x.numel(), 1024
    pass_kernels.add_up_kernel[(-(-count // block),)](x, first, second, count, block, **EXACT)
    return first


def add_to(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in float32, with the bits of `add_product`, which copies total first."""
    if not a.is_cuda or a.dtype == torch.float32:
        total += a.float() @ b.float()
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def product_float32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b in float32, in `out` if there is one."""
    if not a.is_cuda or a.dtype == torch.float32:
        return torch.matmul(a.float(), b.float(), out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)
