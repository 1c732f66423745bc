"""All kernels compile for GPUs that are not here, and keep what they hold in registers."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from ptx_interpreter import parse
from rlcourse.course.kernels.adamw import AdamW
from rlcourse.course.kernels.attention import Attention, AttentionBackwardKeys, AttentionBackwardQueries
from rlcourse.course.kernels.decode_ahead import AheadDecode
from rlcourse.course.kernels.decode_simple import SimpleDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.course.kernels.embedding import Embedding, EmbeddingBackward, LongRuns
from rlcourse.course.kernels.residual_norm import ColumnSum, ResidualNormBackward
from rlcourse.course.kernels.rms_norm import RMSNorm
from rlcourse.course.kernels.rms_norm_backward import RMSNormBackward
from rlcourse.course.kernels.rope import Rope
from rlcourse.course.kernels.sampler import Sampler
from rlcourse.course.kernels.swiglu import Swiglu, SwigluBackward
from rlcourse.course.kernels.token_logprob import TokenLogprob, TokenLogprobBackward
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.toolchain import ARCHITECTURES, compiled, resources

BF16, F16 = "bfloat16", "float16"
KERNELS = [  # at the shapes of Qwen2.5 and Qwen3
    AheadDecode(14, 2, 64, padded=True),
    AheadDecode(16, 8, 128, F16, splits=8),
    *(kernel(14, 2) for kernel in (Attention, AttentionBackwardQueries, AttentionBackwardKeys)),
    AdamW(BF16, BF16),
    ColumnSum(896),
    DecodeAttention(14, 2, 64, padded=True),
    DecodeAttention(14, 2, 64, warps=16, tiles=2, ahead=True),  # as the graph engine calls it for few rows
    DecodeAttention(14, 2, 64, padded=True, splits=8, angles=BF16),
    DecodeAttention(14, 2, 64, splits=2, warps=16, angles="float32"),
    DecodeAttention(12, 2, 128, F16, padded=True, splits=4),
    DecodeAttention(16, 8, 128, splits=16, angles="float32"),
    *(Embedding(896, BF16), EmbeddingBackward(896, BF16), LongRuns(896)),
    *(ResidualNormBackward(hidden, BF16) for hidden in (896, 2048)),
    *(RMSNorm(hidden, BF16, add=True) for hidden in (896, 1024, 2560, 5120)),
    *(RMSNorm(hidden, BF16, add=True, apart=True) for hidden in (896, 1536, 2048)),
    *(RMSNorm(hidden, F16) for hidden in (896, 5120)),
    *(RMSNormBackward(hidden) for hidden in (896, 1024)),
    Rope(16, 64, BF16),
    *(Sampler(dtype, greedy) for dtype in (BF16, "float32") for greedy in (False, True)),
    SimpleDecode(14, 2, 64, padded=True),
    SimpleDecode(16, 8, 128, F16),
    SplitDecode(14, 2, 64, padded=True),
    SplitDecode(16, 8, 128, F16, splits=8),
    *(Swiglu(4864, BF16), Swiglu(3072, F16), SwigluBackward(4864, BF16)),
    *(TokenLogprob(BF16), TokenLogprobBackward(BF16)),
]
# Every kernel for an H100, and some for the other architectures, in turn.
OTHERS = itertools.cycle([arch for arch in ARCHITECTURES if arch != "sm_90a"])
CASES = [(kernel, "sm_90a") for kernel in KERNELS] + [(kernel, next(OTHERS)) for kernel in KERNELS[::3]]
SHARED = {"sm_80": 163, "sm_86": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}  # kB that a block can have


@pytest.mark.parametrize(("kernel", "arch"), thinned(CASES, every=8), ids=str)
def test_kernels_compile_and_stay_in_registers(kernel, arch):
    code = compiled(kernel, arch)
    assert f".target {arch}" in code.ptx
    assert ".local" not in code.ptx, "an array is addressed by a number that is not known when compiling"
    full = isinstance(kernel, AheadDecode) and arch in ("sm_80", "sm_86")  # two tiles ahead, and one number too many
    assert code.stack_bytes <= (8 if full else 0), f"{kernel} spills"
    assert code.shared_bytes <= SHARED[arch] * 1024
    assert code.registers * kernel.threads <= 65536
    (entry,) = parse(code.ptx)
    assert re.search(r"\.reqntid (\d+)", code.ptx)[1] == str(kernel.threads)
    taken = [argument for argument in kernel.arguments() if argument is not None]
    assert len(entry.params) == len(taken), "the kernel must take all of its arguments"


def tool(name: str) -> str:
    """One of NVIDIA's tools, which Triton has."""
    found = shutil.which(name, path=Path(pytest.importorskip("triton.backends.nvidia").__file__).parent / "bin")
    return found or pytest.skip(f"there is no {name} here")


def test_the_numbers_are_those_of_cuobjdump():
    code = compiled(KERNELS[0], "sm_90a")
    machine_code = code.folder / "kernel.cubin"
    done = subprocess.run([tool("cuobjdump"), "-res-usage", machine_code], capture_output=True, text=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups()
    assert resources(machine_code.read_bytes()) == {"registers": int(registers), "stack_bytes": int(stack)}


@pytest.mark.parametrize(
    ("kernel", "loads", "late"),
    [(SplitDecode(14, 2, 64, splits=2), 2, False), (AheadDecode(14, 2, 64, splits=2), 4, True)],
)
def test_loads_that_are_ahead_still_come_after_the_arithmetic(kernel, loads, late):
    """What lesson 09 says of its two tiles: where the loop over tokens requests memory in the machine code."""
    machine_code = compiled(kernel, "sm_90a").folder / "kernel.cubin"
    text = subprocess.run([tool("nvdisasm"), machine_code], capture_output=True, text=True).stdout
    begin, body = max(re.findall(r"^(\.L_x_\d+):\n(.*?) BRA `\(\1\)", text, re.M | re.S), key=lambda loop: len(loop[1]))
    lines = [line for line in body.splitlines() if ";" in line]
    places = [place / len(lines) for place, line in enumerate(lines) if "LDG.E.128" in line]
    assert len(places) == loads, f"the loop at {begin} isn't the one over tokens"
    assert min(places) > 0.85 if late else max(places) < 0.15
