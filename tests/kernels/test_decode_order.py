"""Decode attention under different orders of its blocks and warps, and what its memory accesses look like."""

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from decode_cases import check, make
from thorough import thinned

from rlcourse.course.kernels.decode_simple import SimpleDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.toolchain import ARCHITECTURES, compiled, simulate

KERNELS = [
    SimpleDecode(4, 2, 64, padded=True),
    SplitDecode(4, 2, 64, padded=True, splits=4),
    DecodeAttention(14, 2, 64, padded=True, splits=4, angles="bfloat16"),
    DecodeAttention(4, 2, 128, splits=4, angles="bfloat16", norm="bfloat16"),
]
FUSED = KERNELS[2:]
each = pytest.mark.parametrize("kernel", thinned(KERNELS, every=2), ids=lambda k: f"{type(k).__name__}-{k.head_size}")


@pytest.mark.parametrize("order", thinned(["random", "warp", "serial"], every=3))
@each
def test_any_order_of_warps_and_blocks_gives_the_same(kernel, order):
    check(make(kernel, 160, [133, 5], start=[2, 0]), run=simulate, order=order, seed=1)


@pytest.mark.parametrize("arch", thinned(ARCHITECTURES, every=4))
def test_the_code_of_every_architecture_gives_the_same(arch):
    kernel = DecodeAttention(4, 2, 64, splits=2, angles="bfloat16", early=arch >= "sm_90" or arch.startswith("sm_1"))
    check(make(kernel, 80, [70, 5]), run=simulate, arch=arch)


def test_a_kernel_that_begins_early_waits_before_it_reads():
    code = compiled(DecodeAttention(4, 2, 64, splits=2, early=True, release="start"), "sm_90a").ptx
    wait = code.index("griddepcontrol.wait")
    assert (
        0
        < code.index("griddepcontrol.launch_dependents")
        < wait
        < min(code.index("ld.global"), code.index("st.global"))
    )
    assert "griddepcontrol" not in compiled(DecodeAttention(4, 2, 64, splits=2), "sm_90a").ptx


def test_a_kernel_that_reads_ahead_waits_before_query_and_newest_token():
    """Before it waits: the position, and one tile: 2 loads of 16 keys of 128 bytes, 4 of 16 values."""
    code = compiled(DecodeAttention(4, 2, 64, early=True, ahead=True, release="end"), "sm_90a").ptx
    before, after = code.split("griddepcontrol.wait")
    loop = after.rindex("mma.sync")
    assert loop < after.index("griddepcontrol.launch_dependents") < after.index("st.global")
    loads = re.findall(r"ld\.global[\w.]*", before)
    assert len(loads) == 1 + 4 + 4 and "st.global" not in before
    query, newest = 2, 2 + 1
    assert len(re.findall(r"ld\.global", after)) >= query + newest


@each
def test_blocks_read_of_each_other_only_the_workspace(kernel):
    case = make(kernel, 160, [133, 150])
    report = simulate(kernel, *case.arguments(), order="serial")
    assert set(report.cross_block_reads) <= {"partial_acc", "partial_ml", "arrived"}
    assert (kernel.splits > 1) == bool(report.cross_block_reads)
