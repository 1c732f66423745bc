"""Decode attention in its three versions and the fused form, against a loop in float64, in any order of threads."""

import re

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from decode_cases import assert_near, check, exact, make
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import DEVICE
from thorough import thinned, thorough

from rlcourse.course.kernels.decode_ahead import AheadDecode
from rlcourse.course.kernels.decode_simple import SimpleDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.decode_common import decode_attention_reference
from rlcourse.kernels.decode_new_token import fused_decode_attention_reference
from rlcourse.kernels.toolchain import ARCHITECTURES, compiled, simulate

SIMPLE = SimpleDecode(6, 2, 64, padded=True)
SPLIT = SplitDecode(14, 2, 64, padded=True, splits=4)
FUSED = DecodeAttention(14, 2, 64, padded=True, splits=4, angles="bfloat16")
WIDE = DecodeAttention(4, 2, 128, splits=4, angles="bfloat16", ahead=True)
ALL = [
    SIMPLE,
    SimpleDecode(4, 2, 128, "float16"),
    SPLIT,
    FUSED,
    AheadDecode(14, 2, 64, padded=True, splits=2),
    DecodeAttention(14, 2, 64, padded=True, splits=4),
    DecodeAttention(4, 2, 128, "float16", warps=8),
    DecodeAttention(14, 2, 64, padded=True, splits=2, warps=8, ahead=True, tiles=2),
    DecodeAttention(14, 2, 64, "float16", splits=2, warps=16, angles="float16"),
    WIDE,
    DecodeAttention(4, 4, 128, "float16", padded=True, warps=8, angles="float32"),
]
SLOTS = 160


def name(kernel) -> str:
    parts = {"": type(kernel).__name__} | vars(kernel)
    return "-".join(str(part) for part in parts.values() if part)


def kernels(*these, every: int):
    return pytest.mark.parametrize("kernel", thinned(these, every=every), ids=name)


@kernels(*ALL, every=3)
def test_rows_of_differing_lengths_from_one_token_to_a_full_cache(kernel):
    check(make(kernel, SLOTS, [97, 0, 33, SLOTS - 1], start=[3, 0, 17, 50]))
    check(make(kernel, 1, (0, 2)))
    tokens = [2, 15, 16, 17, 63, 64, 65, 127, 129]  # around those of tiles
    check(make(kernel, SLOTS, [n + 1 for n in tokens], start=[2] * len(tokens)))


@kernels(*ALL, every=3)
def test_idle_rows_and_rows_that_begin_after_their_end_give_no_nan(kernel):
    case = make(kernel, 40, [-1, 20, 40, 2**40, 12], start=[0, 21, 5, 0, 13])
    check(case)
    assert (case.out[[0, 2, 3]] == 0).all()
    if kernel.padded and not case.fused:
        assert (case.out[[1, 4]] == 0).all()


@kernels(
    DecodeAttention(6, 2, 64, padded=True, splits=2, warps=2, ahead=True, tiles=2),
    DecodeAttention(6, 2, 64, padded=True, splits=2, warps=2, angles="bfloat16"),
    AheadDecode(6, 2, 64, padded=True, splits=2),
    every=2,
)
def test_several_tiles_for_each_warp(kernel):
    check(make(kernel, 200, [171, 20], start=[5, 19]))


@kernels(SIMPLE, ALL[7], SPLIT, every=2)
def test_large_scores_stay_finite(kernel):
    check(make(kernel, 70, [69, 40], start=[0, 39], spread=60.0))


@kernels(SIMPLE, FUSED, every=1)
def test_the_references_are_those_of_the_loop(kernel):
    case = make(kernel, 40, [30, 0, -1, 39], start=[7, 0, 0, 39])
    out, k_cache, v_cache = exact(case)
    caches = case.k_cache.clone(), case.v_cache.clone()
    if case.fused:
        assert_near(fused_decode_attention_reference(case.q, *case.new, *caches, case.position, case.start), out)
        torch.testing.assert_close(caches, (k_cache, v_cache), rtol=2.0**-7, atol=1e-3, equal_nan=True)
    else:
        assert_near(decode_attention_reference(case.q, *caches, case.position, case.start), out)


def any_rows_lengths_pads_heads_and_dtypes(data, rows, seed, slots):
    positions, starts = ([min(place, slots - 1) for place in places] for places in zip(*rows, strict=True))
    check(make(data.draw(st.sampled_from(ALL)), slots, positions, start=starts, seed=seed))


@pytest.mark.parametrize("examples", [4, thorough(15 if DEVICE == "cpu" else 300)])
def test_any_rows_lengths_pads_heads_and_dtypes(examples):
    rows = st.lists(st.tuples(st.integers(-1, 95), st.integers(0, 95)), min_size=1, max_size=4)
    drawn = given(data=st.data(), rows=rows, seed=st.integers(0, 999), slots=st.integers(1, 96))
    settings(max_examples=examples, deadline=None)(drawn(any_rows_lengths_pads_heads_and_dtypes))()


@pytest.mark.parametrize("order", thinned(["random", "warp", "serial"], every=3))
@kernels(SIMPLE, SPLIT, FUSED, WIDE, every=2)
def test_any_order_of_warps_and_blocks_gives_the_same(kernel, order):
    check(make(kernel, SLOTS, [133, 5], start=[2, 0]), run=simulate, order=order, seed=1)


@kernels(SIMPLE, FUSED, SPLIT, WIDE, every=2)
def test_blocks_read_of_each_other_only_the_workspace(kernel):
    report = simulate(kernel, *make(kernel, SLOTS, [133, 150]).arguments(), order="serial")
    assert set(report.cross_block_reads) <= {"partial_acc", "partial_ml", "arrived"}
    assert (kernel.splits > 1) == bool(report.cross_block_reads)


@pytest.mark.parametrize("arch", thinned(ARCHITECTURES, every=4))
def test_the_code_of_every_architecture_gives_the_same(arch):
    kernel = DecodeAttention(4, 2, 64, splits=2, angles="bfloat16", early=arch >= "sm_90" or arch.startswith("sm_1"))
    check(make(kernel, 80, [70, 5]), run=simulate, arch=arch)


def test_a_kernel_that_begins_early_waits_before_it_reads():
    code = compiled(DecodeAttention(4, 2, 64, splits=2, early=True, release="start"), "sm_90a").ptx
    words = ("griddepcontrol.launch_dependents", "griddepcontrol.wait", "ld.global")
    released, wait, read = (code.index(word) for word in words)
    assert 0 < released < wait < min(read, code.index("st.global"))
    assert "griddepcontrol" not in compiled(DecodeAttention(4, 2, 64, splits=2), "sm_90a").ptx


def test_a_kernel_that_reads_ahead_waits_before_query_and_newest_token():
    """Before it waits: the position, and one tile: 2 loads of 16 keys of 128 bytes, 4 of 16 values."""
    code = compiled(DecodeAttention(4, 2, 64, early=True, ahead=True, release="end"), "sm_90a").ptx
    before, after = code.split("griddepcontrol.wait")
    loop = after.rindex("mma.sync")
    assert loop < after.index("griddepcontrol.launch_dependents") < after.index("st.global")
    assert len(re.findall(r"ld\.global[\w.]*", before)) == 1 + 4 + 4 and "st.global" not in before
    query, newest = 2, 2 + 1
    assert len(re.findall(r"ld\.global", after)) >= query + newest
