"""Compiles the kernels whose PTX lies in this folder: python tests/ptx/kernels/freeze.py, where CuTe DSL is installed.

The texts stay as they are when the kernels of the course change: they are real code for the interpreter to run and for
the tests to break.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from cutlass import BFloat16

from rlcourse.course.kernels.rms_norm import RMSNorm
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.dsl import Float32, cute, cutlass, range_constexpr
from rlcourse.kernels.toolchain import compiled


@dataclass(frozen=True)
class Product:
    """c [64, 64] = a [64, 32] @ b [64, 32]^T in the classic way: asynchronous copies to shared memory in two stages,
    ldmatrix, mma. Two warps."""

    threads = 64

    def arguments(self):
        half = (Argument(name, "bfloat16", (64, 32)) for name in "ab")
        return (*half, Argument("c", "float32", (64, 64), output=True))

    def grid(self, *tensors):
        return 1, 1, 1

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        self.kernel(a, b, c).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        from cutlass.cute.nvgpu import cpasync, warp

        thread, _, _ = cute.arch.thread_idx()
        memory = cutlass.memory.SmemAllocator()
        room = cute.make_layout((64, 16, 2), stride=(16, 1, 1024))
        stages_a, stages_b = (memory.allocate_tensor(BFloat16, room, 16) for _ in range(2))
        in_16_bytes = cute.make_copy_atom(cpasync.CopyG2SOp(), BFloat16, num_bits_per_copy=128)
        copy = cute.make_tiled_copy_tv(in_16_bytes, cute.make_layout((32, 2), stride=(2, 1)), cute.make_layout((1, 8)))
        mine = copy.get_slice(thread)
        for stage in range_constexpr(2):
            for whole, stages in ((a, stages_a), (b, stages_b)):
                part = cute.local_tile(whole, (64, 16), (0, stage))
                cute.copy(copy, mine.partition_S(part), mine.partition_D(stages[None, None, stage]))
            cute.arch.cp_async_commit_group()

        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)), (2, 1, 1))
        lane = mma.get_slice(thread)
        held_a = mma.make_fragment_A(lane.partition_A(stages_a[None, None, 0]))
        held_b = mma.make_fragment_B(lane.partition_B(stages_b[None, None, 0]))
        sums = cute.make_rmem_tensor(lane.partition_shape_C((64, 64)), Float32)
        sums.fill(0.0)
        four = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
        load_a, load_b = cute.make_tiled_copy_A(four, mma), cute.make_tiled_copy_B(four, mma)
        from_a, from_b = load_a.get_slice(thread), load_b.get_slice(thread)
        for stage in range_constexpr(2):
            cute.arch.cp_async_wait_group(1 - stage)
            cute.arch.sync_threads()
            cute.copy(load_a, from_a.partition_S(stages_a[None, None, stage]), from_a.retile(held_a))
            cute.copy(load_b, from_b.partition_S(stages_b[None, None, stage]), from_b.retile(held_b))
            cute.gemm(mma, sums, held_a, held_b, sums)
        cute.autovec_copy(sums, lane.partition_C(c))


KERNELS = {
    "rms_norm": (RMSNorm(hidden=256, dtype="bfloat16"), "sm_100a"),
    "decode_attention": (DecodeAttention(heads=8, kv_heads=2, head_size=64, splits=2), "sm_86"),
    "product": (Product(), "sm_90a"),
}

if __name__ == "__main__":
    for name, (kernel, arch) in KERNELS.items():
        code = compiled(kernel, arch)
        text = re.sub(r"^//.*\n|^\s*// \.globl.*\n", "", code.ptx, flags=re.M).strip() + "\n"
        head = f"// {name}, compiled by CuTe DSL for {arch}; {code.shared_bytes} bytes of shared memory at launch\n"
        Path(__file__).with_name(f"{name}.ptx").write_text(head + text)
