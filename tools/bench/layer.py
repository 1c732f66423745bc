"""The kernels of a layer's training pass in CuTe DSL beside PyTorch doing the same, eagerly and compiled.

What a formula written by hand gives to `torch.compile` is one fused kernel, too, so this is a race of equals; the rate
of a copy says how far either can get. Measured as in `cute.py`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.course.kernels import adamw as optimizer
from rlcourse.course.kernels import attention as packed
from rlcourse.course.kernels import embedding as table_rows
from rlcourse.course.kernels import residual_norm as norm
from rlcourse.course.kernels import rope as rotary
from rlcourse.course.kernels import swiglu as gate
from rlcourse.course.kernels import token_logprob as head
from rlcourse.course.kernels.rms_norm import rms_norm_reference
from tools.bench.cute import (
    EPS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    VOCABULARY,
    Case,
    Rows,
    measure_cases,
    three,
)

LENGTH = 512  # of the sequences that attend
STEP, LR, BETAS, DECAY = 5, 1e-5, (0.9, 0.95), 0.1  # of AdamW


def layer(repeats: int = 5) -> tuple[dict, Rows]:
    """As `cute.cute`: microseconds, bytes a second, and the error against float32. Raises ValueError without a GPU or
    without CuTe DSL."""
    return measure_cases(cases, repeats)


def cases(tokens: int = 16384, rows: int = 2048, vocabulary: int = VOCABULARY, parameters: int = 1 << 26,
          device: str = "cuda") -> Iterator[Case]:  # fmt: skip
    """tokens: rows of a layer; rows: of logits; parameters: of AdamW."""

    def half(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def wide(*shape: int) -> Tensor:
        return torch.rand(shape, device=device)

    place = torch.randint(vocabulary, (rows,), device=device)
    yield from per_token(tokens, half, torch.arange(tokens, device=device))
    yield from logits(rows, vocabulary, half, wide, place)
    yield from weights(tokens, vocabulary, parameters, half, wide)
    yield from attention(max(1, tokens // LENGTH), min(tokens, LENGTH), half)


def per_token(tokens: int, half, position: Tensor) -> Iterator[Case]:
    """SwiGLU backward, rotary positions, and the norm with its residual, forward and backward."""
    shape, size = (tokens, HIDDEN), 2 * tokens * HIDDEN

    def swiglu_backward(gate_up: Tensor, dy: Tensor) -> Tensor:
        (g, u), d = gate_up.float().chunk(2, -1), dy.float()
        s = g.sigmoid()
        return torch.cat([d * u * s * (1 + g * (1 - s)), d * g * s], -1).to(dy.dtype)

    def exact_swiglu(gate_up: Tensor, dy: Tensor) -> Tensor:
        return gradients(gate.swiglu_reference, (gate_up.float(),), dy.float())[0]

    yield Case(
        "swiglu_backward", (tokens, INNER), 5 * 2 * tokens * INNER,
        lambda: (half(tokens, 2 * INNER), half(tokens, INNER)), exact_swiglu,
        three(swiglu_backward, gate.swiglu_backward),
    )  # fmt: skip

    turned = HEADS + KV_HEADS
    angle = torch.outer(position % 4096, 1e6 ** -torch.linspace(0, 1, HEAD_SIZE // 2, device=position.device))

    def exact_rotate(x: Tensor, *tables: Tensor) -> Tensor:
        return rotary.rope_reference(x.float(), *tables)

    yield Case(
        "rotate", (tokens, turned, HEAD_SIZE), 2 * 2 * tokens * turned * HEAD_SIZE,
        lambda: (half(tokens, turned, HEAD_SIZE), angle.cos(), angle.sin(), position), exact_rotate,
        three(rotary.rope_reference, rotary.rope),
    )  # fmt: skip

    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return norm.residual_norm_reference(*tensors, EPS)

    def exact_norm(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return forward(*(t.float() for t in tensors))

    yield Case(
        "residual_norm", shape, 4 * size, lambda: (half(*shape), half(*shape), half(HIDDEN)), exact_norm,
        three(forward, lambda *t: norm.residual_norm(*t, EPS)),
    )  # fmt: skip

    def backward(total: Tensor, weight: Tensor, dtotal: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = total.float(), dy.float() * weight.float()
        s = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        dx = dtotal.float() + s * slope - x * s**3 * (slope * x).mean(-1, keepdim=True)
        return dx.to(total.dtype), (dy.float() * x * s).sum(0)

    def exact_backward(total: Tensor, weight: Tensor, dtotal: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        dx, dweight = gradients(lambda x, w: rms_norm_reference(x, w, EPS), (total.float(), weight.float()), dy.float())
        return dx + dtotal.float(), dweight

    yield Case(
        "residual_norm_backward", shape, 4 * size,
        lambda: (half(*shape), half(HIDDEN), half(*shape), half(*shape)), exact_backward,
        three(backward, lambda *t: norm.residual_norm_backward(*t, EPS)),
    )  # fmt: skip


@torch.enable_grad()
def gradients(function, tensors: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Of the tensors, by autograd."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves, dy)


def logits(rows: int, vocabulary: int, half, wide, target: Tensor) -> Iterator[Case]:
    """The log-prob of a token, and the gradient in the place of the logits."""
    shape, size = (rows, vocabulary), 2 * rows * vocabulary

    def logprob(logits: Tensor, target: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(1, target[:, None])[:, 0]

    yield Case(
        "token_logprob", shape, size, lambda: (half(*shape), target), logprob,
        three(logprob, lambda *t: head.token_logprob(*t)[0]),
    )  # fmt: skip

    def gradient(logits: Tensor, target: Tensor, log_sum: Tensor, grad: Tensor) -> Tensor:
        hot = torch.arange(vocabulary, device=logits.device) == target[:, None]
        return grad[:, None] * (hot.float() - (logits.float() - log_sum[:, None]).exp())

    def backward(logits: Tensor, *others: Tensor) -> Tensor:
        return logits.copy_(gradient(logits, *others))

    def ours(logits: Tensor, *others: Tensor) -> Tensor:
        head.token_logprob_backward(logits, *others)
        return logits

    def make() -> tuple:
        values = half(*shape)
        return values, target, values.float().logsumexp(-1), wide(rows)

    yield Case("token_logprob_backward", shape, 2 * size, make, gradient, three(backward, ours))


def weights(tokens: int, vocabulary: int, parameters: int, half, wide) -> Iterator[Case]:
    """What touches weights: the optimizer, and the embedding with its gradient."""

    def update(*tensors: Tensor) -> Tensor:
        optimizer.adamw_reference(*tensors, STEP, LR, *BETAS, 1e-8, DECAY)
        return tensors[1]

    def ours(*tensors: Tensor) -> Tensor:
        optimizer.adamw(*tensors, STEP, LR, *BETAS, 1e-8, DECAY)
        return tensors[1]

    yield Case(
        "adamw", (parameters,), 28 * parameters,
        lambda: (half(parameters), *(wide(parameters) for _ in range(3)), half(parameters)), update,
        three(update, ours),
    )  # fmt: skip

    def draw() -> (
        Tensor
    ):  # of words, the one in place r of the list by frequency comes about 1 / r as often as the first
        shares = 1 / torch.arange(1, vocabulary + 1, device=table.device)
        return shares.multinomial(tokens, replacement=True)

    table, size = half(vocabulary, HIDDEN), 2 * tokens * HIDDEN
    yield Case(
        "embedding", (tokens, HIDDEN), 2 * size, lambda: (table, draw()), Tensor.__getitem__,
        three(Tensor.__getitem__, table_rows.embedding),
    )  # fmt: skip

    def add(token: Tensor, dy: Tensor, dtable: Tensor) -> Tensor:
        return dtable.index_add_(0, token, dy.float())

    def add_ours(token: Tensor, dy: Tensor, dtable: Tensor) -> Tensor:
        table_rows.embedding_backward(token, dy, dtable)
        return dtable

    yield Case(
        "embedding_backward", (tokens, HIDDEN), size + 8 * HIDDEN * len(draw().unique()),
        lambda: (draw(), half(tokens, HIDDEN), wide(vocabulary, HIDDEN)), add, three(add, add_ours),
    )  # fmt: skip


def attention(sequences: int, length: int, half) -> Iterator[Case]:
    """Causal attention with grouped queries over sequences of one length, so that PyTorch's needs no padding either:
    forward, and forward and backward together. Bound by products, not by the bytes that are counted here."""
    tokens, sizes = sequences * length, (HEADS, KV_HEADS, KV_HEADS)
    numbers = sum(sizes) + HEADS  # of heads that are read and written

    def make() -> tuple:
        ends = length * torch.arange(sequences + 1, device=half(1).device)
        return *(half(tokens, heads, HEAD_SIZE) for heads in sizes), ends, half(tokens, HEADS, HEAD_SIZE)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (sequences, length)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Tensor) -> Tensor:
        return packed.packed_attention(q, k, v, ends)[0]

    def exact(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Tensor) -> Tensor:
        return packed.attention_reference(q.float(), k.float(), v.float(), ends)

    def with_gradients(attend, dtype: torch.dtype = torch.bfloat16):
        @torch.enable_grad()
        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            leaves = [t.detach().to(dtype).requires_grad_() for t in tensors[:3]]
            return torch.autograd.grad(attend(*leaves, *tensors[3:]), leaves, tensors[4].to(dtype))

        return run

    shape, moved, ways = (sequences, length), 2 * tokens * numbers * HEAD_SIZE, {"sdpa": sdpa, "cute": ours}
    yield Case("packed_attention", shape, moved, make, exact, ways)
    ways = {way: with_gradients(attend) for way, attend in ways.items()}
    yield Case("packed_attention_gradients", shape, 3 * moved, make, with_gradients(exact, torch.float32), ways)
