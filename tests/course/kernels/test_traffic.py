"""What the kernels move: each byte once, 16 bytes a thread, in whole sectors. More than that no GPU can make good."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from rlcourse.course.kernels.adamw import AdamW
from rlcourse.course.kernels.column_sum import ColumnSum
from rlcourse.course.kernels.embedding import Embedding, EmbeddingBackward, runs
from rlcourse.course.kernels.residual_norm import ResidualNorm
from rlcourse.course.kernels.residual_norm_backward import ResidualNormBackward
from rlcourse.course.kernels.rms_norm import RMSNorm
from rlcourse.course.kernels.rotate import Rotate
from rlcourse.course.kernels.sampler import MOST_SPLITS, SIZE, Sampler
from rlcourse.course.kernels.swiglu import Swiglu
from rlcourse.course.kernels.swiglu_backward import SwigluBackward
from rlcourse.course.kernels.token_logprob import TokenLogprob
from rlcourse.course.kernels.token_logprob_backward import TokenLogprobBackward
from rlcourse.course.kernels.vector_add import VectorAdd
from rlcourse.kernels.toolchain import simulate

ROWS = 16


def half(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def moved(kernel, *tensors):
    """Bytes read and written by name, after a look at the accesses of all that is large."""
    report = simulate(kernel, *tensors)
    for access in report.accesses.values():
        if access.bytes > 1024 and access.efficiency < 4:  # no number of a row, which all its threads read
            assert ".v4.b32" in access.text or "cp.async.cg" in access.text, (
                access
            )  # past the L1 cache, always 16 bytes
            assert access.bytes == 512 * access.warps, access
            assert access.efficiency >= 1, access
    return dict(report.read), dict(report.written)


X, WIDE, WEIGHT = half(ROWS, 1024), half(ROWS, 2 * 1024), half(1024)
TURNED, TABLES = half(ROWS, 14, 64), [torch.zeros(2, 32) for _ in range(2)]
CASES = {  # a kernel, what it takes, and the names of what it reads and writes in full
    "sum": (VectorAdd(), [torch.zeros(4096) for _ in range(3)], "a b", "c"),
    "norm": (RMSNorm(1024, "bfloat16"), [X, None, WEIGHT, X.clone()], "x", "y"),
    "norm of a sum": (RMSNorm(1024, "bfloat16", add=True), [X, X, WEIGHT, X.clone()], "x residual", "residual y"),
    "norm in training": (ResidualNorm(1024, "bfloat16"), [X, X, WEIGHT, X, X], "x residual", "total y"),
    "gradient of a norm": (
        ResidualNormBackward(1024, "bfloat16"), [X, WEIGHT, X, X, X, torch.zeros(2, 1024)], "total dtotal dy", "dx",
    ),
    "swiglu": (Swiglu(1024, "bfloat16"), [WIDE, X], "gate_up", "out"),
    "gradient of swiglu": (SwigluBackward(1024, "bfloat16"), [WIDE, X, WIDE], "gate_up dy", "dgate_up"),
    "rotation": (Rotate(14, 64, "bfloat16"), [TURNED, *TABLES, torch.zeros(ROWS).long(), TURNED], "x", "y"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_number_is_moved_once(name):
    kernel, tensors, reads, writes = CASES[name]
    tensors = [None if t is None else t.clone() for t in tensors]
    sizes = {a.name: t.nbytes for a, t in zip(kernel.arguments(), tensors, strict=True) if a is not None}
    read, written = moved(kernel, *tensors)
    assert {n: read[n] for n in reads.split()} == {n: sizes[n] for n in reads.split()}
    written.pop("partial", None)  # a row for each block
    assert written == {n: sizes[n] for n in writes.split()}


def test_the_sampler_reads_its_logits_once():
    vocabulary, numbers = 8192, [torch.zeros(2) for _ in range(2)]
    logits, arrived = torch.zeros(2, vocabulary, dtype=torch.float16), torch.zeros(2, dtype=torch.int32)
    counter, shares = torch.arange(2), torch.zeros(2, MOST_SPLITS, SIZE)
    report = simulate(
        Sampler("float16"), logits, 1.0, 4, torch.tensor([1]), counter, counter.clone(), *numbers, shares, arrived
    )
    assert report.read["logits"] == 2 * 2 * vocabulary
    (access,) = (a for a in report.accesses.values() if a.bytes == 2 * 2 * vocabulary)
    assert ".v4.b32" in access.text and access.efficiency == 1


def test_a_sum_over_rows_reads_them_once_in_whole_sectors():
    report = simulate(ColumnSum(1024), torch.zeros(70, 1024), torch.zeros(1024))
    assert (report.read, report.written) == ({"parts": 70 * 4096}, {"total": 4096})
    assert all(access.efficiency == 1 for access in report.accesses.values())


def test_logits_are_read_once_forward_and_read_and_written_once_backward():
    rows, size = [torch.zeros(2) for _ in range(2)], 2 * 8192 * 2
    logits, target = half(2, 8192), torch.tensor([5, 8191])
    read, _ = moved(TokenLogprob("bfloat16"), logits, target, *rows)
    assert read["logits"] == size + 2 * 2  # and once more the targets
    read, written = moved(TokenLogprobBackward("bfloat16"), logits, target, *rows)
    assert (read["logits"], written) == (size, {"logits": size})


def test_adamw_moves_28_bytes_a_parameter_in_whole_sectors():
    n = 4096
    tensors = half(n), *(torch.ones(n) for _ in range(3)), half(n)
    report = simulate(AdamW("bfloat16", "bfloat16"), *tensors, 1.0, 1.0, 1.0)
    assert report.read == {"grad": 2 * n, "master": 4 * n, "mean": 4 * n, "square": 4 * n}
    assert report.written == {"weight": 2 * n, "master": 4 * n, "mean": 4 * n, "square": 4 * n}
    for access in report.accesses.values():
        each = 8 if access.bytes == 2 * n else 16  # bytes of a thread
        assert access.bytes == 32 * each * access.warps and access.efficiency == 1, access


def test_the_embedding_moves_rows_of_tokens_alone():
    token, size = torch.arange(ROWS) // 4, ROWS * 1024 * 2
    read, written = moved(Embedding(1024, "bfloat16"), half(9, 1024), token, half(ROWS, 1024))
    assert (read["table"], written) == (size, {"y": size})
    arguments = *runs(token), half(ROWS, 1024), torch.zeros(9, 1024), torch.zeros(1, 2, 1024)
    report = simulate(EmbeddingBackward(1024, "bfloat16"), *arguments)
    assert (report.read["dy"], report.read["dtable"], report.written) == (size, 4 * 4096, {"dtable": 4 * 4096})
