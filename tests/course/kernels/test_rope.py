"""Rotary positions and the cache, against float32 and against transformers."""

import pytest
import torch
from thorough import thinned, thorough

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, launch, run, spread
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from rlcourse.course.kernels.rope import Rope, rope, rope_reference
from rlcourse.kernels import KernelError

LENGTH = 12
HEADS = [(14, 2, 64), (4, 4, 128), (3, 1, 16), (8, 1, 64)]


def case(rows, heads, kv_heads, head, dtype, gap=0):
    torch.manual_seed(rows * head)
    width = (heads + 2 * kv_heads) * head
    qkv = spread(torch.randn(rows, width).to(dtype), width + gap)
    angles = torch.arange(40.0)[:, None] / 1e6 ** (torch.arange(0, head, 2) / head)
    position, slot = torch.randint(0, 40, (rows,)), torch.randint(0, LENGTH, (rows,))
    slot[-1], position[0] = LENGTH - 1, 0
    both = torch.full((2, rows, kv_heads, LENGTH, head), torch.nan, dtype=dtype)
    return qkv, angles.cos(), angles.sin(), position, slot, *both


def assert_same_cache(found, expected):
    assert torch.equal(found.isnan(), expected.isnan()), "written to another slot"
    assert_close(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head"), thinned(HEADS, every=2))
@pytest.mark.parametrize("rows", [thorough(1), 5])
def test_rows_turn_by_their_positions_into_their_slots(rows, heads, kv_heads, head, dtype):
    *inputs, k_cache, v_cache = case(rows, heads, kv_heads, head, dtype, gap=24)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    q = torch.full((rows, heads, head), torch.nan, dtype=dtype)
    launch(Rope(heads, kv_heads, head, str(dtype).removeprefix("torch.")), *inputs, k_cache, v_cache, q)
    assert_close(q, rope_reference(*inputs, expected_k, expected_v))
    assert_same_cache(k_cache, expected_k)
    assert_same_cache(v_cache, expected_v)


def test_the_reference_is_that_of_transformers():
    qkv, cos, sin, position, slot, k_cache, v_cache = case(3, 4, 2, 64, torch.float32)
    q = rope_reference(qkv, cos, sin, position, slot, k_cache, v_cache)
    heads = qkv.view(3, 8, 1, 64)
    full = [torch.cat([table[position]] * 2, -1)[:, None] for table in (cos, sin)]
    want_q, want_k = apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], *full)
    torch.testing.assert_close(q, want_q[:, :, 0])
    torch.testing.assert_close(k_cache[range(3), :, slot], want_k[:, :, 0])
    assert torch.equal(v_cache[range(3), :, slot], heads[:, 6:, 0])


def test_a_row_without_a_slot_writes_nothing():
    *inputs, slot, k_cache, v_cache = case(3, 4, 2, 64, torch.bfloat16)
    slot[1] = -1
    q = run(rope, *inputs, slot, k_cache, v_cache)
    assert_close(q, rope_reference(*inputs, slot, k_cache.clone(), v_cache.clone()))
    assert k_cache[1].isnan().all() and v_cache[1].isnan().all()
    assert not k_cache[[0, 2], :, slot[[0, 2]]].isnan().any()


def test_caches_may_be_views_of_one_tensor():
    qkv, *tables, k_cache, v_cache = case(2, 4, 2, 64, torch.bfloat16)
    cache = torch.full((2, 5, 3, LENGTH + 4, 64), torch.nan, dtype=torch.bfloat16)
    views = [cache[i, 1:3, :2, 2 : LENGTH + 2] for i in range(2)]
    q = run(rope, qkv, *tables, *views)
    assert_close(q, rope_reference(qkv, *tables, k_cache, v_cache))
    assert_same_cache(views[0], k_cache)
    assert_same_cache(views[1], v_cache)
    assert (~cache.isnan()).sum() == 2 * k_cache.isfinite().sum()


def test_what_it_cannot_read_is_refused():
    qkv, cos, sin, position, slot, k_cache, v_cache = case(2, 4, 2, 64, torch.bfloat16)
    with pytest.raises(KernelError, match="position of Rope must be int64 and is int32"):
        run(rope, qkv, cos, sin, position.int(), slot, k_cache, v_cache)
    with pytest.raises(KernelError, match=r"k_cache of Rope must have stride 64 in dimension 2"):
        swapped = k_cache.transpose(1, 2).contiguous().transpose(1, 2)
        run(rope, qkv, cos, sin, position, slot, swapped, v_cache)
    with pytest.raises(KernelError, match="cannot cut heads of 24"):
        Rope(4, 2, 24, "bfloat16")
