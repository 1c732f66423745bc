"""Rotary positions, in decoding with the cache and in training, against complex numbers and transformers."""

import pytest
import torch
from thorough import thorough

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, launch, run, spread
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from rlcourse.course.kernels.rope import Rope, rope, rope_reference
from rlcourse.course.kernels.rotate import Rotate, rotate, rotate_reference

LENGTH = 12


def cached(rows, heads, kv_heads, head, dtype=torch.bfloat16, gap=0):
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head", "dtype"),
    [
        (14, 2, 64, "bfloat16"),
        (3, 1, 16, "float16"),
        thorough((4, 4, 128, "float16")),
        thorough((8, 1, 64, "bfloat16")),
    ],
)
def test_rows_turn_by_their_positions_into_their_slots(heads, kv_heads, head, dtype):
    *inputs, slot, k_cache, v_cache = cached(5, heads, kv_heads, head, getattr(torch, dtype), gap=24)
    slot[1] = -1  # writes nothing
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    q = torch.full((5, heads, head), torch.nan, dtype=k_cache.dtype)
    launch(Rope(heads, kv_heads, head, dtype), *inputs, slot, k_cache, v_cache, q)
    assert_close(q, rope_reference(*inputs, slot, expected_k, expected_v))
    assert_same_cache(k_cache, expected_k)
    assert_same_cache(v_cache, expected_v)
    assert k_cache[1].isnan().all() and v_cache[1].isnan().all()


def test_the_reference_is_that_of_transformers():
    qkv, cos, sin, position, slot, k_cache, v_cache = cached(3, 4, 2, 64, torch.float32)
    q = rope_reference(qkv, cos, sin, position, slot, k_cache, v_cache)
    heads = qkv.view(3, 8, 1, 64)
    full = [torch.cat([table[position]] * 2, -1)[:, None] for table in (cos, sin)]
    want_q, want_k = apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], *full)
    torch.testing.assert_close(q, want_q[:, :, 0])
    torch.testing.assert_close(k_cache[range(3), :, slot], want_k[:, :, 0])
    assert torch.equal(v_cache[range(3), :, slot], heads[:, 6:, 0])


def test_caches_may_be_views_of_one_tensor():
    qkv, *tables, k_cache, v_cache = cached(2, 4, 2, 64)
    cache = torch.full((2, 5, 3, LENGTH + 4, 64), torch.nan, dtype=torch.bfloat16)
    views = [cache[i, 1:3, :2, 2 : LENGTH + 2] for i in range(2)]
    q = run(rope, qkv, *tables, *views)
    assert_close(q, rope_reference(qkv, *tables, k_cache, v_cache))
    assert_same_cache(views[0], k_cache)
    assert_same_cache(views[1], v_cache)
    assert (~cache.isnan()).sum() == 2 * k_cache.isfinite().sum()


def training(tokens, heads, head, dtype, others=0):
    """x with `others` heads beside it in each token's row, which are nan; tables; positions in no order."""
    torch.manual_seed(tokens * heads)
    wide = torch.full((tokens, heads + others, head), torch.nan, dtype=dtype)
    x = wide[:, :heads].copy_(torch.randn(tokens, heads, head))
    angle = torch.outer(torch.arange(50), 1e4 ** -torch.linspace(0, 1, head // 2))
    return x, angle.cos(), angle.sin(), torch.randint(50, (tokens,))


def by_complex_numbers(x, cos, sin, position, back):
    first, second = x.double().chunk(2, -1)
    turn = torch.complex(cos.double(), sin.double())[position][:, None]
    turned = torch.complex(first, second) * (turn.conj() if back else turn)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize(("tokens", "heads", "head", "others"), [(1, 1, 16, 0), (5, 3, 64, 2), (33, 2, 128, 1)])
@pytest.mark.parametrize("back", [False, True], ids=["on", "back"])
def test_heads_are_turned_as_complex_numbers_are(tokens, heads, head, others, back):
    dtype = torch.float16 if others == 1 else torch.bfloat16
    x, *tables = training(tokens, heads, head, dtype, others)
    found = torch.full((tokens, heads, head), torch.nan, dtype=dtype)
    launch(Rotate(heads, head, str(dtype).removeprefix("torch."), back), x, *tables, found)
    # A difference of two products can be far smaller than they are: it has their error.
    torch.testing.assert_close(found, by_complex_numbers(x, *tables, back).to(dtype), rtol=2**-7, atol=1e-5)
    assert_close(found, rotate_reference(x, *tables, back))


@pytest.mark.parametrize("back", [False, True], ids=["on", "back"])
def test_the_gradient_turns_the_other_way(back):
    x, *tables = training(3, 2, 32, torch.bfloat16)
    dy = torch.randn(3, 2, 32).bfloat16()

    def gradient(x, cos, sin, position, dy):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(rotate(leaf, cos, sin, position, back), leaf, dy)[0]

    found = run(gradient, x, *tables, dy)
    wide = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(by_complex_numbers(wide, *tables, back), wide, dy.double())
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-5)
