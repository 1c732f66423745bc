"""Decode attention in its three versions and the fused form, against a loop in float64 and PyTorch's attention."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from decode_cases import EXAMPLES, assert_near, check, exact, make
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thinned, thorough

from rlcourse.course.kernels.decode_ahead import AheadDecode
from rlcourse.course.kernels.decode_simple import SimpleDecode
from rlcourse.course.kernels.decode_split import SplitDecode
from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.decode_common import decode_attention_reference
from rlcourse.kernels.decode_new_token import fused_decode_attention_reference

PLAIN = [
    SimpleDecode(6, 2, 64, padded=True),
    SimpleDecode(4, 2, 128, "float16"),
    SplitDecode(14, 2, 64, padded=True, splits=4),
    AheadDecode(14, 2, 64, padded=True, splits=2),
    DecodeAttention(14, 2, 64, padded=True, splits=4),
    DecodeAttention(4, 2, 128, "float16", warps=8),
    DecodeAttention(14, 2, 64, padded=True, splits=2, warps=8, ahead=True, tiles=2),
]
FUSED = [
    DecodeAttention(14, 2, 64, padded=True, splits=4, angles="bfloat16"),
    DecodeAttention(14, 2, 64, "float16", splits=2, warps=16, angles="float16"),
    DecodeAttention(4, 2, 128, splits=4, angles="bfloat16", norm="bfloat16", ahead=True),
    DecodeAttention(4, 4, 128, "float16", padded=True, warps=8, angles="float32", norm="float32"),
]
ALL = PLAIN + FUSED
SLOTS = 160


def name(kernel) -> str:
    parts = {"": type(kernel).__name__} | vars(kernel)
    return "-".join(str(part) for part in parts.values() if part)


each = pytest.mark.parametrize("kernel", thinned(ALL, every=3), ids=name)


@each
def test_rows_of_differing_lengths_from_one_token_to_a_full_cache(kernel):
    check(make(kernel, SLOTS, [97, 0, 33, SLOTS - 1], start=[3, 0, 17, 50]))
    check(make(kernel, 1, (0, 2)))


@each
def test_idle_rows_and_rows_that_begin_after_their_end_give_no_nan(kernel):
    case = make(kernel, 40, [-1, 20, 40, 2**40, 12], start=[0, 21, 5, 0, 13])
    check(case)
    assert (case.out[[0, 2, 3]] == 0).all()
    if kernel.padded and not case.fused:
        assert (case.out[[1, 4]] == 0).all()


@pytest.mark.parametrize("kernel", thinned(ALL, every=5), ids=name)
def test_lengths_around_those_of_tiles(kernel):
    tokens = [2, 15, 16, 17, 63, 64, 65, 127, 129]
    check(make(kernel, SLOTS, [n + 1 for n in tokens], start=[2] * len(tokens)))


LONG = [
    DecodeAttention(6, 2, 64, padded=True, splits=2, warps=2, angles="bfloat16", norm="float32", eps=0.1),
    DecodeAttention(6, 2, 64, padded=True, splits=2, warps=2, ahead=True, tiles=2),
    thorough(AheadDecode(6, 2, 64, padded=True, splits=2)),
]


@pytest.mark.parametrize("kernel", LONG, ids=name)
def test_several_tiles_for_each_warp(kernel):
    check(make(kernel, 200, [171, 20], start=[5, 19]))


@pytest.mark.parametrize("kernel", thinned(PLAIN[::2], every=2), ids=name)
def test_large_scores_stay_finite(kernel):
    check(make(kernel, 70, [69, 40], start=[0, 39], spread=60.0))


@pytest.mark.parametrize("kernel", [PLAIN[0], *FUSED[::2]], ids=name)
def test_the_references_are_those_of_the_loop(kernel):
    case = make(kernel, 40, [30, 0, -1, 39], start=[7, 0, 0, 39])
    out, k_cache, v_cache = exact(case)
    if case.fused:
        both = case.k_cache.clone(), case.v_cache.clone()
        new = (case.k, case.v, case.cos, case.sin, *both, case.position, case.start, case.q_norm, case.k_norm)
        assert_near(fused_decode_attention_reference(case.q, *new, eps=kernel.eps), out)
        torch.testing.assert_close(both, (k_cache, v_cache), rtol=2.0**-7, atol=1e-3, equal_nan=True)
    else:
        found = decode_attention_reference(case.q, case.k_cache, case.v_cache, case.position, case.start)
        assert_near(found, out)


def test_the_fused_reference_turns_as_transformers_does():
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    case = make(DecodeAttention(4, 2, 64, angles="float32"), 8, [0, 0], seed=2)
    q, k = case.q.float(), case.k.float()
    cos, sin = (torch.cat([angle, angle], -1) for angle in (case.cos, case.sin))
    caches = torch.zeros(2, 2, 2, 8, 64)
    out = fused_decode_attention_reference(q, k, case.v.float(), cos, sin, *caches, torch.tensor([3, 7]))
    wanted_q, wanted_k = apply_rotary_pos_emb(q[:, :, None], k[:, :, None], cos[:, None], sin[:, None])
    torch.testing.assert_close(caches[0][[0, 1], :, [3, 7]], wanted_k[:, :, 0])
    again = decode_attention_reference(wanted_q[:, :, 0], *caches, torch.tensor([3, 7]))
    torch.testing.assert_close(out, again)


lengths = st.lists(st.tuples(st.integers(-1, 95), st.integers(0, 95)), min_size=1, max_size=4)


def any_rows_lengths_pads_heads_and_dtypes(data, rows, seed, slots):
    kernel = data.draw(st.sampled_from(ALL))
    positions = [min(at, slots - 1) for at, _ in rows]
    starts = [min(start, slots - 1) for _, start in rows]
    check(make(kernel, slots, positions, start=starts, seed=seed))


@pytest.mark.parametrize("examples", [4, thorough(EXAMPLES)])
def test_any_rows_lengths_pads_heads_and_dtypes(examples):
    drawn = given(data=st.data(), rows=lengths, seed=st.integers(0, 999), slots=st.integers(1, 96))
    settings(max_examples=examples, deadline=None)(drawn(any_rows_lengths_pads_heads_and_dtypes))()
