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
from rlcourse.course.kernels.decode_ahead import AheadDecode
from rlcourse.kernels import cubin, examples
from rlcourse.kernels.toolchain import ARCHITECTURES, compiled

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
