"""All kernels compile for GPUs that are not here, and keep what they hold in registers."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from rlcourse.course.kernels.decode_ahead import AheadDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.kernels import cubin, examples
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.toolchain import ARCHITECTURES, compiled
from rlcourse.ptx import parse

KERNELS = examples() + examples("rlcourse.course.kernels")
# Every kernel for an H100, and some for the other architectures, in turn.
OTHERS = itertools.cycle([arch for arch in ARCHITECTURES if arch != "sm_90a"])
CASES = [(kernel, "sm_90a") for kernel in KERNELS] + [(kernel, next(OTHERS)) for kernel in KERNELS[::3]]
SHARED = {"sm_80": 163, "sm_86": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}  # kB that a block can have


@pytest.mark.parametrize(("kernel", "arch"), thinned(CASES, every=8), ids=str)
def test_kernels_compile_and_stay_in_registers(kernel, arch):
    code = compiled(kernel, arch)
    assert f".target {arch}" in code.ptx and code.cubin.startswith(b"\x7fELF")
    assert ".local" not in code.ptx, "an array is addressed by a number that is not known when compiling"
    full = isinstance(kernel, AheadDecode) and arch in ("sm_80", "sm_86")  # two tiles ahead, and one number too many
    assert code.stack_bytes <= (8 if full else 0), f"{kernel} spills"
    assert code.shared_bytes <= SHARED[arch] * 1024
    assert code.registers * kernel.threads <= 65536
    (entry,) = parse(code.ptx)
    assert re.search(r"\.reqntid (\d+)", code.ptx)[1] == str(kernel.threads)
    taken = [argument for argument in kernel.arguments() if argument is not None]
    assert len(entry.params) == len(taken), "the kernel must take all of its arguments"


def test_the_numbers_are_those_of_cuobjdump(tmp_path):
    code = compiled(examples()[0], "sm_90a")
    text = cuobjdump("-res-usage", code, tmp_path)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    assert cubin.resources(code.cubin) == {"registers": int(registers), "stack_bytes": int(stack)}


def cuobjdump(option: str, code, folder: Path) -> str:
    """What NVIDIA's tool prints of a kernel's machine code; Triton has it."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    tool = shutil.which("cuobjdump", path=Path(nvidia.__file__).parent / "bin")
    if tool is None:
        pytest.skip("there is no cuobjdump here")
    (folder / "kernel.cubin").write_bytes(code.cubin)
    return subprocess.run([tool, option, folder / "kernel.cubin"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("kernel", "late"),
    [
        (SplitDecode(14, 2, 64, splits=2), False),
        (AheadDecode(14, 2, 64, splits=2), True),
        (DecodeAttention(14, 2, 64, warps=16, tiles=2), True),
    ],
    ids=str,
)
def test_the_assembler_puts_the_loads_of_a_round_behind_its_arithmetic(kernel, late, tmp_path):
    """Lesson 09 says so of machine code for an H200, though the kernels load as soon as a product has been computed."""
    text = cuobjdump("-sass", compiled(kernel, "sm_90a"), tmp_path)
    code = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4})\*/\s+([^;]*);", text)]
    loops = [(int(m[1], 16), at) for at, line in code if (m := re.search(r"BRA 0x([0-9a-f]+)", line))]
    begin, end = max((loop for loop in loops if loop[0] < loop[1]), key=lambda loop: loop[1] - loop[0])
    names = [line for at, line in code if begin <= at <= end]
    works = [re.search(r"FFMA|HMMA|MUFU|SHFL", line) is not None for line in names]
    before = [sum(works[:i]) / sum(works) for i, line in enumerate(names) if "LDG.E.128" in line]
    assert min(before) > 0.85 if late else max(before) == 0
