"""Cases of the kernels of the lessons: what an operation takes, and what it must give by a formula in float64."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from float64 import Case, rounded
from launching import rows_of, spread
from thorough import thorough
from torch import Tensor

from rlcourse.course.kernels.adamw import adamw, adamw_reference
from rlcourse.course.kernels.attention import attention_reference, packed_attention
from rlcourse.course.kernels.embedding import embedding, embedding_backward
from rlcourse.course.kernels.residual_norm import column_sum, residual_norm, residual_norm_reference
from rlcourse.course.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from rlcourse.course.kernels.rms_norm_backward import RMSNormBackward
from rlcourse.course.kernels.rope import rope, rope_reference
from rlcourse.course.kernels.sampler import sample, sample_reference
from rlcourse.course.kernels.swiglu import swiglu, swiglu_reference
from rlcourse.course.kernels.token_logprob import token_logprob, token_logprob_backward, token_logprob_reference
from rlcourse.kernels.toolchain import launch

EPS, BF16, F16 = 1e-6, torch.bfloat16, torch.float16


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def norm_inputs(rows: int, hidden: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, ...]:
    x, residual = (rows_of(rows, hidden, dtype, 8 * i, scale) for i in (1, 2))
    if rows:
        x[0] *= 1e-3  # where eps counts
        residual[0] *= 1e-3
    return x, residual, (1 + 0.3 * torch.randn(hidden)).to(dtype)


def norm_case(rows: int, hidden: int, dtype: torch.dtype, scale: float = 1.0) -> Case:
    x, _, weight = norm_inputs(rows, hidden, dtype, scale)
    return Case(rms_norm, (x, weight, EPS), norm, rms_norm_reference)


def add_norm_case(rows: int, hidden: int, dtype: torch.dtype) -> Case:
    def formula(x, residual, weight, eps):
        total = rounded(x + residual, dtype)
        return norm(total, weight, eps), total

    arguments = *norm_inputs(rows, hidden, dtype, 1.0), EPS
    return Case(add_rms_norm, arguments, formula, lambda *a: (add_rms_norm_reference(*a), a[1]), changed=(1,))


def residual_case(rows: int, hidden: int, dtype: torch.dtype) -> Case:
    def formula(x, residual, weight, eps):
        total = rounded(x + residual, dtype)
        return total, norm(total, weight, eps)

    grads = tuple(torch.randn(rows, hidden).to(dtype) for _ in range(2))
    arguments = *norm_inputs(rows, hidden, dtype, 1.0), EPS
    return Case(residual_norm, arguments, formula, residual_norm_reference, grads, leaves=3)


def norm_backward_case(rows: int, hidden: int, programs: int) -> Case:
    def ours(x, weight, dy):
        dx, partial = torch.empty_like(x), x.new_empty(programs, hidden)
        launch(RMSNormBackward(hidden, EPS), x, weight, dy, dx, partial)
        return dx, partial.sum(0)

    def formula(x, weight, dy):
        leaves = x.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(norm(*leaves), leaves, dy)

    x, dy = torch.randn(rows, hidden), torch.randn(rows, hidden)
    x[0] *= 1e-3
    return Case(ours, (x, 1 + 0.3 * torch.randn(hidden), dy), formula)


def swiglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate * gate.sigmoid() * up


def swiglu_case(rows: int, inner: int, dtype: torch.dtype) -> Case:
    gate_up = rows_of(rows, 2 * inner, dtype, scale=2.0)
    return Case(swiglu, (gate_up,), swiglu_formula, swiglu_reference, (torch.randn(rows, inner).to(dtype),))


def extreme_gates() -> Case:
    """Where sigmoid is 0 or 1, no inf - inf or 0 * inf."""
    gate = torch.tensor([-3e38, -1e4, -120.0, -90.0, 90.0, 1e4, 1e30, 1e38], dtype=BF16)
    gate_up, dy = torch.cat([gate, torch.full_like(gate, 3.0)])[None], torch.ones(1, 8, dtype=BF16)
    return Case(swiglu, (gate_up,), swiglu_formula, swiglu_reference, (dy,), near=(1.05, 1e-60))


def rope_case(tokens: int, heads: int, head: int, dtype: torch.dtype, back: bool) -> Case:
    def formula(x, cos, sin, position, back):
        turn = torch.complex(cos, -sin if back else sin)[position][:, None]
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    wide = torch.full((tokens, heads + 2, head), torch.nan, dtype=dtype)  # values stand beside queries and keys
    x = wide[:, :heads].copy_(torch.randn(tokens, heads, head))
    angle = torch.outer(torch.arange(50), 1e4 ** -torch.linspace(0, 1, head // 2))
    arguments = x, angle.cos(), angle.sin(), torch.randint(50, (tokens,)), back
    return Case(rope, arguments, formula, rope_reference, (torch.randn(tokens, heads, head).to(dtype),))


def attention_case(starts: list[int], heads: int, kv_heads: int, dtype: torch.dtype, scale: float = 1.5) -> Case:
    def formula(q, k, v, starts):
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        token = torch.arange(len(q))
        sequence = torch.searchsorted(starts, token, right=True)
        seen = (sequence[:, None] == sequence) & (token[:, None] >= token)
        scores = (torch.einsum("qhd,khd->hqk", q, k) / 8).masked_fill(~seen, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1) / torch.tensor(2.0).log()

    tokens = starts[-1]
    q, k, v = torch.randn(tokens, heads + 2 * kv_heads, 64).to(dtype).split([heads, kv_heads, kv_heads], 1)
    dout = torch.randn(tokens, heads, 64).to(dtype)
    arguments = scale * q, k, v, torch.tensor(starts)
    # Weights are rounded before they multiply, so errors are those of the largest numbers.
    reference = attention_reference if tokens else None
    return Case(packed_attention, arguments, formula, reference, (dout,), leaves=3, near=(1.05, 4))


def logprob_inputs(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The last target is the last token; one row does not count."""
    logits = spread((4 * torch.randn(rows, vocabulary)).to(dtype), -(-vocabulary // 8) * 8 + 8)
    target = torch.randint(vocabulary, (rows,))
    target[-1:] = vocabulary - 1
    target[1:2] = -100
    return logits, target, torch.randn(rows)


def logprob_formula(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    inside = target < logits.shape[1]
    found = -F.cross_entropy(logits, target.where(inside, 0), reduction="none", ignore_index=-100)
    return found.where(inside, torch.nan), logits.logsumexp(-1)


def logprob_case(rows: int, vocabulary: int, dtype: torch.dtype, change: Callable | None = None) -> Case:
    """Results, and the gradient in the place of the logits."""

    def ours(logits, target, grad):
        logprob, log_sum = token_logprob(logits, target)
        token_logprob_backward(logits, target, log_sum, grad)
        return logprob, log_sum

    def formula(logits, target, grad):
        leaf = logits.requires_grad_()
        logprob, log_sum = logprob_formula(leaf, target)
        (dlogits,) = torch.autograd.grad(logprob, leaf, grad)
        return logprob, log_sum, dlogits

    logits, target, grad = logprob_inputs(rows, vocabulary, dtype)
    if change:
        change(logits, target, grad)
    # A float32 of 3e4 has errors of 2e-3, so that much is a log-prob off.
    loose = {"near": (1.6, 0.02), "floor": 5e-3} if change is far_away else {"near": (1.05, 0.02), "floor": 2e-6}
    return Case(
        ours, (logits, target, grad), formula, lambda *a: token_logprob_reference(*a[:2]), changed=(0,), **loose
    )


def far_away(logits: Tensor, target: Tensor, grad: Tensor) -> None:
    """Sums of powers that would be infinite or 0, and whole threads without a token that can come."""
    logits[0] += 3e4
    logits[1] -= 3e4
    logits[2, 7:] = -torch.inf
    target[2] = 3


def not_there(logits: Tensor, target: Tensor, grad: Tensor) -> None:
    target[2] = logits.shape[1]
    grad[2] = 0.0


def sample_case(
    rows: int, vocabulary: int, dtype: torch.dtype, temperature: float, change: Callable | None = None
) -> Case:
    logits, _, _ = logprob_inputs(rows, vocabulary, dtype)
    if change:
        change(logits)
    given = logits, temperature, torch.tensor([1234567890123456789]), torch.randint(-(2**62), 2**62, (rows,))
    return Case(sample, given, sample_reference, near=(1, 0), floor=2e-5)


def with_equals(logits: Tensor) -> None:
    for row, place in zip(logits, (3, 130, 1100, 1200), strict=True):
        row[:place], row[place:] = 0.0, 2.5


def with_few_tokens(logits: Tensor) -> None:
    """That have all the mass, or half of it each."""
    logits[:2], logits[2:] = -torch.inf, -30000.0
    logits[0, 700] = logits[1, [3, -1]] = 1.0
    logits[2, 99] = logits[3, [99, -1]] = 30000.0


TOKENS = {  # of a vocabulary of 10
    "none": [],
    "one": [7],
    "all equal": [4] * 19,
    "in runs and alone": [5, 2, 5, 5, 9, 0, 2, 5, 5, 0, 9, 5, 1],
    "a run of two chunks": [4] * 33,
    "runs of one chunk and longer": [0] * 3 + [1] * 32 + [9, 3] * 33 + [2] * 64 + [8] * 290 + [6] * 30 + [7] * 31,
}


def embedding_case(name: str, hidden: int, dtype: torch.dtype) -> Case:
    token, table = torch.tensor(TOKENS[name], dtype=torch.int64), torch.randn(10, hidden).to(dtype)
    return Case(embedding, (table, token), lambda table, token: F.embedding(token, table))


def embedding_backward_case(name: str, hidden: int, dtype: torch.dtype) -> Case:
    token = torch.tensor(TOKENS[name], dtype=torch.int64)
    arguments = token, rows_of(len(token), hidden, dtype), torch.randn(10, hidden)
    return Case(embedding_backward, arguments, lambda token, dy, table: table.index_add(0, token, dy), changed=(2,))


def adamw_case(n: int, step: int, dtype: torch.dtype, eps: float = 1e-8) -> Case:
    def formula(grad, master, mean, square, weight, step, lr, beta1, beta2, eps, decay):
        optimizer = torch.optim.AdamW([master], lr, (beta1, beta2), eps, decay)
        moments = {"exp_avg": mean, "exp_avg_sq": square}
        optimizer.state[master] = {"step": torch.tensor(step - 1.0), **moments}
        master.grad = grad
        optimizer.step()
        return master, mean, square, master

    grad = (torch.randn(n) * 10.0 ** torch.randint(-4, 2, (n,))).to(dtype)
    started = step > 1
    state = torch.randn(n), started * torch.randn(n), started * torch.rand(n), torch.full((n,), torch.nan, dtype=BF16)
    numbers = step, 3e-3 / step, 0.9, 0.95, eps, 0.1
    return Case(
        adamw, (grad, *state, *numbers), formula, lambda *a: (adamw_reference(*a), a[1:5])[1], changed=(1, 2, 3, 4)
    )


def sum_case(rows: int, columns: int) -> Case:
    return Case(column_sum, (torch.randn(rows, columns),), lambda parts: parts.sum(0), near=(1, 1))


CASES = [  # what makes a case, and its sizes; without rows, an operation gives nothing
    partial(norm_case, 5, 1024, BF16),
    partial(norm_case, 9, 896, F16),
    partial(norm_case, 2, 8, BF16),
    partial(norm_case, 3, 896, BF16, 300.0),  # squares that 16 bits cannot add up
    partial(norm_case, 2, 896, F16, 1e-4),  # squares that 16 bits cannot hold
    partial(norm_case, 2, 896, F16, 0.0),
    partial(norm_case, 0, 64, BF16),
    thorough(partial(norm_case, 2, 3584, F16)),
    partial(add_norm_case, 18, 24, BF16),
    partial(add_norm_case, 3, 896, F16),
    partial(residual_case, 1, 8, BF16),
    partial(residual_case, 5, 160, F16),  # backward, lanes without a piece
    partial(residual_case, 37, 8, F16),  # several rows for each warp
    partial(residual_case, 9, 1536, BF16),  # four warps in a block instead of eight
    partial(residual_case, 0, 64, BF16),
    thorough(partial(residual_case, 19, 2048, BF16)),
    partial(norm_backward_case, 5, 896, 2),
    partial(norm_backward_case, 3, 256, 4),  # more programs than rows
    partial(swiglu_case, 1, 8, F16),
    partial(swiglu_case, 3, 40, BF16),
    partial(swiglu_case, 0, 32, BF16),
    thorough(partial(swiglu_case, 9, 1040, F16)),
    partial(extreme_gates),
    *(partial(rope_case, 5, 3, 64, BF16, back) for back in (False, True)),
    partial(rope_case, 33, 2, 128, F16, False),
    partial(rope_case, 1, 1, 16, BF16, True),
    partial(rope_case, 0, 2, 32, BF16, False),
    # Tiles of several sequences, one of them empty, one of one token.
    partial(attention_case, [0, 5, 5, 38, 39, 41], 4, 2, F16),
    partial(attention_case, [0, 1, 2, 19], 2, 2, BF16, 300.0),  # one token gets its value; large scores
    partial(attention_case, [0, 37], 7, 1, BF16),
    thorough(partial(attention_case, [0, 16, 48], 2, 2, BF16)),
    partial(attention_case, [0], 1, 1, F16),
    partial(logprob_case, 4, 24, BF16, not_there),
    partial(logprob_case, 1, 1, BF16),
    partial(logprob_case, 3, 8, F16),
    partial(logprob_case, 2, 2049, BF16),
    partial(logprob_case, 3, 4103, F16),
    partial(logprob_case, 3, 600, BF16, far_away),
    partial(logprob_case, 0, 24, BF16),
    partial(sample_case, 4, 1208, BF16, 0.7),
    partial(sample_case, 2, 3000, F16, 1.0),
    partial(sample_case, 3, 601, torch.float32, 1.7),
    partial(sample_case, 3, 5, BF16, 0.3),
    partial(sample_case, 4, 1201, BF16, 0.0, with_equals),
    partial(sample_case, 4, 1300, BF16, 1.0, with_few_tokens),
    partial(sample_case, 0, 24, BF16, 1.0),
    *(partial(case, name, 136, BF16) for case in (embedding_case, embedding_backward_case) for name in TOKENS),
    partial(embedding_backward_case, "all equal", 8, F16),
    partial(adamw_case, 1, 1, torch.float32),
    partial(adamw_case, 7, 3, F16),
    partial(adamw_case, 1031, 1, BF16),
    partial(adamw_case, 1030, 10, BF16, 1e-3),  # where eps counts
    partial(adamw_case, 0, 1, BF16),
    *(partial(sum_case, *sizes) for sizes in ((1, 8), (31, 33), (450, 40))),
]
