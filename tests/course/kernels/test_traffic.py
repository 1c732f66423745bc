"""What the kernels move: each byte once, 16 bytes per thread, in whole sectors. Nothing else can make up for that."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from rlcourse.course.kernels.adamw import AdamW
from rlcourse.course.kernels.embedding import Embedding, EmbeddingBackward, runs
from rlcourse.course.kernels.residual_norm import ColumnSum, ResidualNormBackward
from rlcourse.course.kernels.rms_norm import RMSNorm
from rlcourse.course.kernels.rope import Rope
from rlcourse.course.kernels.sampler import MOST_SPLITS, SIZE, Sampler
from rlcourse.course.kernels.swiglu import Swiglu, SwigluBackward
from rlcourse.course.kernels.token_logprob import TokenLogprob, TokenLogprobBackward
from rlcourse.kernels.toolchain import simulate

ROWS = 16


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def floats(*shape, count=1):
    return [torch.ones(shape) for _ in range(count)]


X, WIDE, WEIGHT, TURNED = half(ROWS, 1024), half(ROWS, 2 * 1024), half(1024), half(ROWS, 14, 64)
LOGITS, TARGET, TOKEN = half(2, 8192), torch.tensor([5, 8191]), torch.arange(ROWS) // 4
SAMPLED = [LOGITS.half(), 1.0, 4, torch.tensor([1]), torch.arange(2), torch.arange(2), *floats(2, count=2)]
SHARES = [torch.zeros(2, MOST_SPLITS, SIZE), torch.zeros(2, dtype=torch.int32)]
CASES = {  # a kernel, what it takes, the names of what it reads and writes in full, and bytes per thread
    "norm": (RMSNorm(1024, "bfloat16"), [X, None, WEIGHT, X], "x", "y", 16),
    "norm of a sum": (RMSNorm(1024, "bfloat16", add=True), [X, X, WEIGHT, X], "x residual", "residual y", 16),
    "norm in training": (
        RMSNorm(1024, "bfloat16", add=True, apart=True), [X, X, WEIGHT, X, X], "x residual", "y total", 16,
    ),
    "gradient of a norm": (
        ResidualNormBackward(1024, "bfloat16"), [X, WEIGHT, X, X, X, *floats(2, 1024)], "total dtotal dy", "dx", 16,
    ),
    "sum over rows": (ColumnSum(1024), [*floats(70, 1024), *floats(1024)], "parts", "total", 4),
    "swiglu": (Swiglu(1024, "bfloat16"), [WIDE, X], "gate_up", "out", 16),
    "gradient of swiglu": (SwigluBackward(1024, "bfloat16"), [WIDE, X, WIDE], "gate_up dy", "dgate_up", 16),
    "rope": (Rope(14, 64, "bfloat16"), [TURNED, *floats(2, 32, count=2), 0 * TOKEN, TURNED], "x", "y", 16),
    "embedding": (Embedding(1024, "bfloat16"), [half(ROWS, 1024), TOKEN * 4, X], "", "y", 16),
    "log-prob": (TokenLogprob("bfloat16"), [LOGITS, TARGET, *floats(2, count=2)], "logits", "logprob log_sum", 16),
    "gradient of logits": (
        TokenLogprobBackward("bfloat16"), [LOGITS, TARGET, *floats(2, count=2)], "logits", "logits", 16,
    ),
    "sampler": (Sampler("float16"), SAMPLED + SHARES, "logits", "token logprob entropy", 16),
    "adamw": (
        AdamW("bfloat16", "bfloat16"), [half(4096), *floats(4096, count=3), half(4096), 1.0, 1.0, 1.0],
        "grad master mean square", "master mean square weight", 8,
    ),
}  # fmt: skip
MORE = {"log-prob": 2 * 2}  # bytes: the logits of the targets, once more


@pytest.mark.parametrize("name", CASES)
def test_each_number_is_moved_once_in_whole_sectors(name):
    kernel, tensors, reads, writes, least = CASES[name]
    tensors = [t.clone() if isinstance(t, torch.Tensor) else t for t in tensors]
    report = simulate(kernel, *tensors)
    sizes = {a.name: t.nbytes for a, t in zip(kernel.arguments(), tensors, strict=True) if isinstance(t, torch.Tensor)}
    assert {n: report.read[n] for n in reads.split()} == {n: sizes[n] + MORE.get(name, 0) for n in reads.split()}
    written = {n: size for n, size in report.written.items() if n not in ("partial", "shares", "arrived")}
    assert written == {n: sizes[n] for n in writes.split()}
    for access in report.accesses.values():
        if access.bytes > 1024 and access.efficiency < 4:  # no number of a row, which all its threads read
            assert access.bytes >= 32 * least * access.warps and access.efficiency >= 1, access


def test_the_embedding_moves_rows_of_tokens_alone():
    arguments = *runs(TOKEN), X.clone(), torch.zeros(9, 1024), torch.zeros(1, 2, 1024)
    report = simulate(EmbeddingBackward(1024, "bfloat16"), *arguments)
    assert (report.read["dy"], report.read["dtable"], report.written) == (X.nbytes, 4 * 4096, {"dtable": 4 * 4096})
    report = simulate(Embedding(1024, "bfloat16"), half(9, 1024), TOKEN, X.clone())
    assert report.read["table"] == X.nbytes
