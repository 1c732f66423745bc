"""Problems in KernelBench's format, and right kernels for them in Triton and CuTe DSL, as models write them."""

from rlcourse.tasks import Problem

TRITON = """import torch
import torch.nn as nn
import triton
import triton.language as tl

"""
POINTWISE = {  # name: [PyTorch, Triton] of one number x
    "relu": ["torch.relu(x)", "tl.maximum(x, 0.0)"],
    "gelu": ["0.5 * x * (1 + torch.erf(x * 0.7071067811865476))", "0.5 * x * (1 + tl.erf(x * 0.7071067811865476))"],
    "scale": ["3 * x + 1", "3 * x + 1"],
}


def problem(name: str, forward: str, inputs: str, init: str = "", arguments: str = "x", sizes: str = "") -> Problem:
    """A problem. init: statements of the model's __init__."""
    body = f"    def __init__(self):\n        super().__init__()\n        {init}\n\n" if init else ""
    source = (
        f"import torch\nimport torch.nn as nn\n\n{sizes}\n\nclass Model(nn.Module):\n{body}"
        f"    def forward(self, {arguments}):\n        return {forward}\n\n"
        f"def get_inputs():\n    return [{inputs}]\n\ndef get_init_inputs():\n    return []\n"
    )
    return Problem(source, "", name)


def pointwise_problem(name: str, rows: int = 24, columns: int = 1000) -> Problem:
    sizes = f"batch_size = {rows}\ndim = {columns}"
    return problem(name, POINTWISE[name][0], "torch.rand(batch_size, dim)", sizes=sizes)


def fenced(code: str) -> str:
    """A completion as a model writes it."""
    return f"The kernel reads each number once.\n\n```python\n{code}```\n"


def pointwise_triton(expression: str) -> str:
    return f"""{TRITON}
@triton.jit
def kernel(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < n)
    tl.store(target + at, {expression}, mask=at < n)


class ModelNew(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        n = x.numel()
        kernel[(triton.cdiv(n, 4096),)](x, out, n, BLOCK=4096)
        return out
"""


def pointwise_cute(expression: str) -> str:
    return f"""import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
import torch.nn as nn
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * 256 + thread
    if at < cute.size(source):
        x = source[at]
        target[at] = {expression}


@cute.jit
def launch(source: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream):
    blocks = (cute.size(source) + 255) // 256
    kernel(source, target).launch(grid=(blocks, 1, 1), block=(256, 1, 1), stream=stream)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.compiled = {{}}

    def forward(self, x):
        out = torch.empty_like(x)
        flat, to = from_dlpack(x.view(-1)), from_dlpack(out.view(-1))
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        if x.numel() not in self.compiled:
            self.compiled[x.numel()] = cute.compile(launch, flat, to, stream)
        self.compiled[x.numel()](flat, to, stream)
        return out
"""


ROWS = "batch_size = 12\ndim = 200"
ROW_PROBLEMS = {
    "mean": problem("mean", "torch.mean(x, dim=1, keepdim=True)", "torch.rand(batch_size, dim)", sizes=ROWS),
    "layer_norm": problem(
        "layer_norm", "self.norm(x)", "torch.rand(batch_size, dim)", "self.norm = nn.LayerNorm(dim)", sizes=ROWS
    ),
    "sum_and_max": problem(
        "sum_and_max", "(torch.sum(x, dim=1), torch.amax(x, dim=1))", "torch.rand(batch_size, dim)", sizes=ROWS
    ),
    "matmul": problem(
        "matmul", "torch.matmul(x, y)", "torch.rand(n, 64), torch.rand(64, n)", arguments="x, y", sizes="n = 48"
    ),
    "half": problem("half", "x * 2 + 1", "torch.rand(batch_size, dim, dtype=torch.float16)", sizes=ROWS),
}


def rows_triton(body: str, out: str = "torch.empty_like(x)", init: str = "", more: str = "") -> str:
    """A Triton kernel with a program for each row x of `dim` numbers, `at` their places, `inside` the mask."""
    start = f"    def __init__(self):\n        super().__init__()\n        {init}\n\n" if init else ""
    arguments = "".join(f", {name}" for name in more.split())
    passed = "".join(f", self.{name}" for name in more.replace("_", ".").split())
    return f"""{TRITON}
@triton.jit
def kernel(source, target{arguments}, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    x = tl.load(source + row * dim + at, mask=inside, other=0.0)
{body}


class ModelNew(nn.Module):
{start}    def forward(self, x):
        out = {out}
        kernel[(x.shape[0],)](x, out{passed}, x.shape[1], BLOCK=256)
        return out
"""


ROW_KERNELS = {
    "mean": rows_triton("    tl.store(target + row, tl.sum(x, 0) / dim)", "torch.empty_like(x[:, :1])"),
    "layer_norm": rows_triton(
        "    mean = tl.sum(x, 0) / dim\n"
        "    d = tl.where(inside, x - mean, 0.0)\n"
        "    y = d / tl.sqrt(tl.sum(d * d, 0) / dim + 1e-5)\n"
        "    y = y * tl.load(norm_weight + at, mask=inside) + tl.load(norm_bias + at, mask=inside)\n"
        "    tl.store(target + row * dim + at, y, mask=inside)",
        init="self.norm = nn.LayerNorm(200)",
        more="norm_weight norm_bias",
    ),
    "sum_and_max": rows_triton(
        "    tl.store(target + row, tl.sum(x, 0))\n"
        '    tl.store(target + tl.num_programs(0) + row, tl.max(tl.where(inside, x, float("-inf")), 0))',
        out="torch.empty(2, x.shape[0], device=x.device)",
    ).replace("return out", "return out[0], out[1]"),
    "matmul": f"""{TRITON}
@triton.jit
def kernel(x, y, out, n, K: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    a = tl.load(x + row[:, None] * K + k[None, :], mask=row[:, None] < n, other=0.0)
    b = tl.load(y + k[:, None] * n + column[None, :], mask=column[None, :] < n, other=0.0)
    c = tl.dot(a, b, input_precision="ieee")
    tl.store(out + row[:, None] * n + column[None, :], c, mask=(row[:, None] < n) & (column[None, :] < n))


class ModelNew(nn.Module):
    def forward(self, x, y):
        n = x.shape[0]
        out = torch.empty(n, n, device=x.device)
        kernel[(triton.cdiv(n, 16), triton.cdiv(n, 16))](x, y, out, n, K=64, BLOCK=16)
        return out
""",
    "half": rows_triton("    tl.store(target + row * dim + at, x * 2 + 1, mask=inside)"),
}
