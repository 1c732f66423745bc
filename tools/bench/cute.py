"""The kernels in CuTe DSL beside PyTorch doing the same, eagerly and compiled.

Each call has tensors of its own, and all are in one CUDA graph: neither the host nor the cache of the GPU has a part.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.measure.roofline import measure_machine
from tools.bench.graphs import graph_seconds
from tools.bench.kernels import relative_error
from tools.bench.results import Rows

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, INNER, VOCABULARY = 14, 2, 64, 896, 4864, 151936  # Qwen2.5-0.5B
COLD = 1e9  # bytes that the tensors of all calls have together, far more than a GPU's cache holds
ATTENTION = ((16, 512, 456), (256, 1024, 1024))  # rows, slots, tokens in use
EPS = 1e-6


@dataclass
class Case:
    """One computation: `make` gives the tensors of a call, `exact` its result in float32, one tensor or several, and
    `ways` are by name functions of these tensors that compute it."""

    name: str
    shape: tuple[int, ...]
    moved: int
    make: Callable[[], tuple]
    exact: Callable[..., Tensor | tuple[Tensor, ...]]
    ways: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]]


def cute(repeats: int = 5) -> tuple[dict[str, Any], Rows]:
    """Microseconds of each kernel and its peers, bytes it must move a second, and its error against float32.

    Raises ValueError without a GPU or without CuTe DSL.
    """
    return measure_cases(cases, repeats)


def measure_cases(cases: Callable[[], Iterator[Case]], repeats: int) -> tuple[dict[str, Any], Rows]:
    """Setup and rows of a record. Raises ValueError without a GPU or without CuTe DSL."""
    if not torch.cuda.is_available():
        raise ValueError("The kernels need a GPU, and no CUDA GPU was found: `rlcourse doctor` says what runs here.")
    if importlib.util.find_spec("cutlass") is None:
        raise ValueError("CuTe DSL is not installed: pip install 'rlcourse[kernels]'.")
    copy = measure_machine(torch.device("cuda")).bytes_per_s
    results: Rows = []
    with torch.no_grad():
        for case in cases():
            results += measure_case(case, repeats)
    return {"dtype": "bfloat16", "repeats": repeats, "copy_gb_per_s": copy / 1e9}, results


def measure_case(case: Case, repeats: int) -> Rows:
    """One row of results for each way."""
    torch.manual_seed(0)
    first = case.make()
    own = sum(t.nbytes for t in first)
    sets = [first, *(case.make() for _ in range(max(3, min(23, round(COLD / own)))))]
    rows: Rows = []
    for way, function in case.ways.items():
        error = largest_error(case, function, first)

        def run(function=function) -> None:
            for tensors in sets:
                function(*tensors)

        took, spread = graph_seconds(run, repeats)
        us = 1e6 * took / len(sets)
        row = {"variant": f"{case.name}-{way}", "shape": list(case.shape), "us": us, "spread": spread}
        rows.append(row | {"gb_per_s": case.moved / us / 1e3, "relative_error": error})
    return rows


def largest_error(case: Case, function: Callable, tensors: tuple) -> float:
    """Of all results. Some ways change what they are given, and some return a buffer."""
    found = [t.clone() for t in parts(function(*(t.clone() for t in tensors)))]
    exact = parts(case.exact(*(t.clone() for t in tensors)))
    return max(relative_error(ours, right.float()) for ours, right in zip(found, exact, strict=True))


def parts(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def cases() -> Iterator[Case]:
    yield norm()
    yield gate()
    for rows, slots, used in ATTENTION:
        yield attention(rows, slots, used)
        yield fused_attention(rows, slots, used)
    for rows in (16, 256):
        yield sampling(rows)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def three(eager: Callable, ours: Callable) -> dict[str, Callable]:
    """PyTorch eagerly, the same compiled, and our kernel."""
    return {"eager": eager, "compiled": torch.compile(eager, dynamic=False), "cute": ours}


def norm(rows: int = 16384) -> Case:
    """The residual and RMSNorm: both are read, and both results written."""
    from rlcourse.course.kernels.rms_norm import add_rms_norm, add_rms_norm_reference

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        residual += x
        wide = residual.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)

    def exact(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm_reference(x, residual, weight, EPS).float()

    def make() -> tuple:
        return randn(rows, HIDDEN), randn(rows, HIDDEN), randn(HIDDEN)

    moved = 4 * 2 * rows * HIDDEN
    return Case("add_rms_norm", (rows, HIDDEN), moved, make, exact, three(eager, lambda *t: add_rms_norm(*t, EPS)))


def gate(rows: int = 16384) -> Case:
    """silu(gate) * up of one packed projection."""
    from rlcourse.course.kernels.swiglu import swiglu, swiglu_reference

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def exact(gate_up: Tensor) -> Tensor:
        return swiglu_reference(gate_up.float())

    moved = 3 * 2 * rows * INNER
    return Case("swiglu", (rows, INNER), moved, lambda: (randn(rows, 2 * INNER),), exact, three(eager, swiglu))


def attention(rows: int, slots: int, used: int) -> Case:
    """One query token a row over `used` of `slots` slots, for all rows alike."""
    from rlcourse.course.kernels.decode_ahead import AheadDecode
    from rlcourse.course.kernels.decode_simple import SimpleDecode
    from rlcourse.course.kernels.decode_split import SplitDecode
    from rlcourse.kernels.decode_common import decode_attention_reference, workspace_arguments
    from rlcourse.kernels.decode_ops import attend, decode_attention
    from rlcourse.kernels.toolchain import launch

    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    splits = max(2, min(16, 2 * processors // (rows * KV_HEADS)))
    seen = (torch.arange(slots, device="cuda") < used)[None, None, None]
    out = randn(rows, HEADS, HEAD_SIZE)
    room = [
        torch.zeros((rows * KV_HEADS * splits, *a.shape[1:]), dtype=getattr(torch, a.dtype), device="cuda")
        for a in workspace_arguments(HEAD_SIZE)
    ]

    def sdpa_repeat(q, k, v, position) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen)[:, :, 0]

    def sdpa_gqa(q, k, v, position) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen, enable_gqa=True)[:, :, 0]

    def simple(q, k, v, position) -> Tensor:
        launch(SimpleDecode(HEADS, KV_HEADS, HEAD_SIZE), q, k, v, position.expand(rows), None, out)
        return out

    def shared(kernel) -> Callable[..., Tensor]:  # by several blocks for each row
        def run(q, k, v, position) -> Tensor:
            launch(kernel, q, k, v, position.expand(rows), None, out, *room)
            return out

        return run

    def ahead(q, k, v, position) -> Tensor:  # as the graph engine calls it: with old tokens read before the wait
        attend(q, k, v, position.expand(rows), None, out, ahead=True)
        return out

    def exact(q, k, v, position) -> Tensor:
        return decode_attention_reference(q.float(), k, v, position)

    ways = {"sdpa-repeat": sdpa_repeat, "sdpa-gqa": sdpa_gqa, "simple": simple}
    for name, kernel in (("split", SplitDecode), ("split-ahead", AheadDecode)):
        ways[name] = shared(kernel(HEADS, KV_HEADS, HEAD_SIZE, splits=splits))
    ways |= {"cute": decode_attention, "cute-ahead": ahead} | flashinfer_way(rows, slots, used)
    moved = 2 * 2 * rows * KV_HEADS * used * HEAD_SIZE
    return Case("attention", (rows, used), moved, lambda: _cache(rows, slots, used), exact, ways)


def _cache(rows: int, slots: int, used: int) -> tuple:
    """A query, a cache, and the slot of the newest token."""
    position = torch.tensor([used - 1], device="cuda")
    caches = (randn(rows, KV_HEADS, slots, HEAD_SIZE) for _ in range(2))
    return randn(rows, HEADS, HEAD_SIZE), *caches, position


def flashinfer_way(rows: int, slots: int, used: int) -> dict[str, Callable]:
    """FlashInfer's batch decode, where it is installed: each row's cache is one page."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    import flashinfer

    pages, ends = torch.arange(rows + 1, dtype=torch.int32, device="cuda"), torch.full((rows,), used, device="cuda")
    room = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=True)
    wrapper.plan(
        pages, pages[:-1], ends.int(), HEADS, KV_HEADS, HEAD_SIZE, slots, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return {"flashinfer": lambda q, k, v, position: wrapper.run(q, (k, v))}


def fused_attention(rows: int, slots: int, used: int) -> Case:
    """RoPE of the new token, the cache write and attention: the eager way is that of transformers, which repeats keys
    and values for each query head; `sdpa-gqa` does not."""
    from rlcourse.kernels.decode_new_token import fused_decode_attention_reference
    from rlcourse.kernels.decode_ops import fused_decode_attention

    seen = (torch.arange(slots, device="cuda") < used)[None, None, None]

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    def write(q, k, v, cos, sin, k_cache, v_cache, position) -> Tensor:
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k_cache.index_copy_(2, position, k[:, :, None])
        v_cache.index_copy_(2, position, v[:, :, None])
        return q[:, :, None]

    def gqa(*tensors) -> Tensor:
        q, (k_cache, v_cache) = write(*tensors), tensors[5:7]
        return F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=seen, enable_gqa=True)[:, :, 0]

    def eager(*tensors) -> Tensor:
        q, (k_cache, v_cache) = write(*tensors), tensors[5:7]
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)[:, :, 0]

    def exact(q, k, v, cos, sin, k_cache, v_cache, position) -> Tensor:
        return fused_decode_attention_reference(q.float(), k, v, cos, sin, k_cache, v_cache, position)

    def make() -> tuple:
        q, k_cache, v_cache, position = _cache(rows, slots, used)
        angle = torch.rand(rows, HEAD_SIZE // 2, device="cuda").repeat(1, 2)
        turn = angle.cos().bfloat16(), angle.sin().bfloat16()
        return q, randn(rows, KV_HEADS, HEAD_SIZE), randn(rows, KV_HEADS, HEAD_SIZE), *turn, k_cache, v_cache, position

    moved = 2 * 2 * rows * KV_HEADS * used * HEAD_SIZE
    ways = three(eager, fused_decode_attention) | {"sdpa-gqa": gqa}
    return Case("fused", (rows, used), moved, make, exact, ways)


def sampling(rows: int) -> Case:
    """A token of the softmax over the whole vocabulary, and its log-prob, which is what is compared with float32."""
    from rlcourse.course.kernels.sampler import sample

    seed, counter = torch.tensor([7], device="cuda"), torch.arange(rows, device="cuda")
    last: list[Tensor] = []  # the tokens of the latest call

    def eager(logits: Tensor) -> Tensor:
        logprobs = logits.float().log_softmax(-1)
        last[:] = [torch.multinomial(logprobs.exp(), 1)]
        return logprobs.gather(1, last[0])[:, 0]

    def ours(logits: Tensor) -> Tensor:
        token, logprob, _ = sample(logits, 1.0, seed, counter)
        last[:] = [token[:, None]]
        return logprob

    def exact(logits: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(1, last[0])[:, 0]

    ways = {"eager": eager, "cute": ours}
    return Case("sample", (rows, VOCABULARY), 2 * rows * VOCABULARY, lambda: (randn(rows, VOCABULARY),), exact, ways)
