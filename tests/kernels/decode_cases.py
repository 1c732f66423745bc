"""Inputs of decode attention in tests, what must come out of it, and what must stay as it was."""

from dataclasses import dataclass

import torch
from launching import launch
from torch import Tensor

from rlcourse.kernels.decode_attention import DecodeAttention
from rlcourse.kernels.decode_common import workspace_arguments


@dataclass
class Case:
    """Inputs for a kernel: random, with nan in every slot of the caches that it has no business with."""

    kernel: object
    q: Tensor
    new: tuple  # k, v, cos, sin
    k_cache: Tensor
    v_cache: Tensor
    position: Tensor
    start: Tensor | None
    out: Tensor
    workspace: tuple

    @property
    def fused(self) -> bool:
        return bool(getattr(self.kernel, "angles", None))

    def arguments(self) -> tuple:
        new = self.new if self.fused else (None,) * 4 if isinstance(self.kernel, DecodeAttention) else ()
        workspace = self.workspace if "splits" in vars(self.kernel) else ()
        return (self.q, self.k_cache, self.v_cache, *new, self.position, self.start, self.out, *workspace)


def make(kernel, slots: int, position, start=None, seed: int = 0, spread: float = 1.0) -> Case:
    """position: of each row, or one number and the number of rows as a pair; start: of each row, or None. q, k and v
    are parts of one projection with 8 elements between rows; keys and values halves of one tensor, in which only some
    of the rows are used. spread: of the scores."""
    torch.manual_seed(seed)
    dtype, size, heads, kv_heads = getattr(torch, kernel.dtype), kernel.head_size, kernel.heads, kernel.kv_heads
    at = torch.tensor(position) if isinstance(position, list) else torch.tensor(position[:1]).expand(position[1])
    rows, angles = len(at), getattr(kernel, "angles", None)
    start = torch.tensor(start if start else [0] * rows) if kernel.padded else None
    packed = torch.randn(rows, (heads + 2 * kv_heads) * size + 8).to(dtype)
    q, k, v = (
        part.unflatten(1, (-1, size))
        for part in packed[:, :-8].split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    )
    q *= spread
    cache = torch.randn(2, rows + 1, kv_heads, slots, size).to(dtype)
    used = seen(at, start, slots, new=not angles)
    cache[:, :rows] = cache[:, :rows].masked_fill(~used[None, :, None, :, None], torch.nan)
    cache[:, rows:] = torch.nan
    angle = 6.3 * torch.rand(rows, size // 2)
    turn = (f(angle).to(getattr(torch, angles or kernel.dtype)) for f in (torch.cos, torch.sin))
    out = torch.full((rows, heads, size), torch.nan, dtype=dtype)
    workspace = (None,) * 3
    if kernel.splits > 1:
        partials = rows * kv_heads * kernel.splits
        poisoned = (torch.full((partials, *a.shape[1:]), torch.nan) for a in workspace_arguments(size)[:2])
        workspace = *poisoned, torch.zeros(partials, dtype=torch.int32)
    return Case(kernel, q, (k, v, *turn), cache[0, :rows], cache[1, :rows], at, start, out, workspace)


def seen(position: Tensor, start: Tensor | None, slots: int, new: bool) -> Tensor:
    """Which slots [rows, slots] hold tokens that the newest one attends to; new: itself too."""
    slot, at = torch.arange(slots), position[:, None]
    used = (slot <= at if new else slot < at) & (at < slots) & (at >= 0)
    return used if start is None else used & (slot >= start[:, None])


def exact(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """What must come out, and both caches after it: float64, row by row, head by head, RoPE as complex numbers."""
    k_cache, v_cache, q = case.k_cache.clone(), case.v_cache.clone(), case.q.double()
    rows, heads, size = q.shape
    slots, group = k_cache.shape[2], heads // k_cache.shape[1]
    used = seen(case.position, case.start, slots, new=True)
    if case.fused:
        k, _, cos, sin = (t.double() for t in case.new)

        def turned(x):
            points = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.complex(cos, sin)[:, None]
            return torch.cat([points.real, points.imag], -1)

        q, k = turned(q), turned(k)
        for row, at in enumerate(case.position.tolist()):
            if 0 <= at < slots:
                k_cache[row, :, at], v_cache[row, :, at] = k[row].to(k_cache.dtype), case.new[1][row]
                used[row, at] = True
    out = torch.zeros(rows, heads, size, dtype=torch.float64)
    for row, which in enumerate(used):
        for head in range(heads if which.any() else 0):
            keys, values = (cache[row, head // group, which].double() for cache in (k_cache, v_cache))
            out[row, head] = (keys @ q[row, head] * size**-0.5).softmax(0) @ values
    return out, k_cache, v_cache


def check(case: Case, run=launch, **order) -> None:
    """Run the case's kernel and compare with `exact`; where it counts blocks, run it again on what it left."""
    out, k_cache, v_cache = exact(case)
    both = case.k_cache._base  # [2, rows + 1, K, S, D]
    beyond = both[:, -1].clone()
    for _ in range(1 if case.workspace[2] is None else 2):
        case.out.fill_(torch.nan)
        run(case.kernel, *case.arguments(), **order)
        assert_near(case.out, out)
        assert_cache(case.k_cache, k_cache)
        assert torch.equal(bits(case.v_cache), bits(v_cache)), "values are not where they belong, or others changed"
        assert torch.equal(bits(both[:, -1]), bits(beyond)), "another row was written"
        if case.workspace[2] is not None:
            assert not case.workspace[2].any(), "a counter is not ready for the next launch"


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert not found.isnan().any(), "not everything was written, or poison was read"
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 1e-2, f"relative error {error:.1e}"


def assert_cache(found: Tensor, expected: Tensor) -> None:
    """Equal bits, but for the last bit of a rounding."""
    other = bits(found) != bits(expected)
    assert not found[other].isnan().any() and not expected[other].isnan().any(), "written to another slot"
    torch.testing.assert_close(found[other].float(), expected[other].float(), rtol=2.0**-7, atol=1e-3)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)
