"""The operations as PyTorch sees them: fakes, mutation, compilation, CUDA graphs."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, run, spread

from rlcourse.course.kernels.adamw import adamw
from rlcourse.course.kernels.attention import packed_attention
from rlcourse.course.kernels.attention_backward import AttentionBackwardKeys
from rlcourse.course.kernels.embedding import embedding, embedding_backward
from rlcourse.course.kernels.residual_norm import ResidualNorm, residual_norm
from rlcourse.course.kernels.residual_norm_backward import residual_norm_backward
from rlcourse.course.kernels.rms_norm import RMSNorm, add_rms_norm, add_rms_norm_reference, rms_norm
from rlcourse.course.kernels.rms_norm_backward import RMSNormBackward, rms_norm_backward
from rlcourse.course.kernels.rope import Rope, rope
from rlcourse.course.kernels.rotate import rotate
from rlcourse.course.kernels.sampler import sample
from rlcourse.course.kernels.swiglu import swiglu, swiglu_reference
from rlcourse.course.kernels.swiglu_backward import swiglu_backward
from rlcourse.course.kernels.token_logprob import token_logprob
from rlcourse.course.kernels.token_logprob_backward import token_logprob_backward
from rlcourse.course.kernels.vector_add import vector_add
from rlcourse.kernels import KernelError
from rlcourse.kernels.toolchain import interpreted

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="about CUDA graphs")


@pytest.fixture(autouse=True)
def anywhere():
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        yield


def calls():
    """Each operation with tensors that it takes, some of them strided."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    x, residual, weight = (t.to(torch.bfloat16) for t in (x, residual, weight))
    where = torch.tensor([0, 3, 1])
    caches = [torch.zeros(3, 2, 4, 16, dtype=torch.float16) for _ in range(2)]
    qkv = spread(torch.randn(3, 8 * 16).half(), 8 * 16 + 8)
    return {
        "vector_add": (vector_add, torch.randn(5), torch.randn(5)),
        "rms_norm": (rms_norm, spread(x, 72), weight, 1e-6),
        "add_rms_norm": (add_rms_norm, x, spread(residual, 80), weight, 1e-6),
        "rms_norm_backward": (rms_norm_backward, torch.randn(3, 128), torch.rand(128), torch.randn(3, 128), 1e-6),
        "rope": (rope, qkv, torch.rand(9, 8), torch.rand(9, 8), where, where, *caches),
        "swiglu": (swiglu, x),
        "swiglu_backward": (swiglu_backward, x, residual[:, :32]),
        "packed_attention": (
            packed_attention,
            *(torch.randn(3, n, 64).half() for n in (2, 1, 1)),
            torch.tensor([0, 3]),
        ),
        "rotate": (rotate, qkv.view(3, 8, 16), torch.rand(9, 8), torch.rand(9, 8), where),
        "residual_norm": (residual_norm, spread(x, 72), residual, weight, 1e-6),
        "residual_norm_backward": (residual_norm_backward, x, weight, residual, x.clone(), 1e-6),
        "token_logprob": (token_logprob, spread(x, 72), where),
        "token_logprob_backward": (token_logprob_backward, x, where, torch.rand(3), torch.rand(3)),
        "adamw": (adamw, torch.rand(5), *(torch.rand(5) for _ in range(3)), torch.rand(5).half(), 1, 0.1),
        "embedding": (embedding, x, torch.tensor([2, 0])),
        "embedding_backward": (embedding_backward, torch.tensor([2, 0]), x[:2], torch.rand(3, 64)),
        "sample": (sample, torch.randn(3, 40), 0.9, torch.tensor([5]), where),
    }


@pytest.mark.parametrize("name", calls())
def test_operations_are_what_they_say(name):
    operation, *arguments = calls()[name]
    torch.library.opcheck(operation, [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments])


def layer(x, residual, weight):
    y = add_rms_norm(x, residual, weight, 1e-6)
    return swiglu(torch.cat([y, residual], -1))


def layer_reference(x, residual, weight):
    y = add_rms_norm_reference(x, residual, weight, 1e-6)
    return swiglu_reference(torch.cat([y, residual], -1))


def test_a_compiled_function_keeps_them_in_one_graph():
    _, x, residual, weight, _ = (t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in calls()["add_rms_norm"])
    again = residual.clone()
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    torch.testing.assert_close(compiled(x, residual, weight), layer_reference(x, again, weight))
    assert torch.equal(residual, again)


@on_gpu
def test_a_graph_replays_with_the_counters_it_finds():
    logits, counter = torch.randn(16, 4096, device="cuda"), torch.arange(16, device="cuda")
    seed = torch.tensor([3], device="cuda")
    eager = [sample(logits, 1.0, seed, counter + 100 * step) for step in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sample(logits, 1.0, seed, counter)
    for expected in eager:
        graph.replay()
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
        counter += 100


HALF = torch.zeros(0, 64).bfloat16()
NO_TOKENS = torch.empty(0, dtype=torch.int64)
TABLE, ONES = torch.rand(9, 16), torch.ones(128)
EMPTY = [  # an operation, what it takes without rows, and the shapes of what it returns
    (vector_add, [torch.empty(0)] * 2, [(0,)]),
    (rms_norm, [HALF, ONES[:64].bfloat16(), 1e-6], [(0, 64)]),
    (rms_norm_backward, [HALF.float().view(0, 128), ONES, torch.zeros(0, 128), 1e-6], [(0, 128), (128,)]),
    (residual_norm, [HALF, HALF, ONES[:64].bfloat16(), 1e-6], [(0, 64)] * 2),
    (residual_norm_backward, [HALF, ONES[:64].bfloat16(), HALF, HALF, 1e-6], [(0, 64), (64,)]),
    (rotate, [HALF.view(0, 2, 32), TABLE, TABLE, NO_TOKENS], [(0, 2, 32)]),
    (swiglu, [HALF], [(0, 32)]),
    (swiglu_backward, [HALF, HALF[:, :32]], [(0, 64)]),
    (token_logprob, [HALF, NO_TOKENS], [(0,)] * 2),
    (embedding, [torch.zeros(3, 8).half(), NO_TOKENS], [(0, 8)]),
    (sample, [HALF, 1.0, torch.tensor([3]), NO_TOKENS], [(0,)] * 3),
    (packed_attention, [HALF.view(0, 1, 64)] * 3 + [torch.tensor([0])], [(0, 1, 64), (1, 0)]),
]


@pytest.mark.parametrize(("operation", "arguments", "shapes"), EMPTY, ids=str)
def test_operations_take_no_rows(operation, arguments, shapes):
    found = run(operation, *arguments)
    found = found if isinstance(found, tuple) else (found,)
    assert [tuple(f.shape) for f in found] == shapes and not any(f.any() for f in found)


def test_operations_that_change_a_tensor_take_no_rows():
    table, state = torch.ones(3, 8), [torch.empty(0) for _ in range(5)]
    run(lambda *t: (embedding_backward(*t), t[2])[1], NO_TOKENS, torch.zeros(0, 8).half(), table)
    run(lambda *t: (adamw(*t), t[1])[1], *state[:4], state[4].half(), 1, 0.1)
    assert (table == 1).all()


X = torch.zeros(4, 128).bfloat16()
COUNTERS = torch.tensor([3]), torch.arange(2)
REFUSED = [  # what is not taken, and key words of the sentence that says so
    *((lambda hidden=hidden: RMSNorm(hidden, "bfloat16"), f"cut rows of {hidden}") for hidden in (100, 184, 8192)),
    *((lambda hidden=hidden: RMSNormBackward(hidden), f"cannot cut rows of {hidden}") for hidden in (100, 192, 4096)),
    *((lambda hidden=hidden: ResidualNorm(hidden, "bfloat16"), f"cut rows of {hidden}") for hidden in (100, 2056)),
    (lambda: Rope(4, 2, 24, "bfloat16"), "cannot cut heads of 24"),
    (lambda: AttentionBackwardKeys(3, 2, 64), "AttentionBackwardKeys takes heads of size 64"),
    (lambda: run(rms_norm, spread(X, 136)._base[:, 1:129], X[0], 1e-6), "begins at an address that 16 does not divide"),
    (lambda: run(swiglu_backward, X, X[:, :64].float()), "dy of SwigluBackward must be bfloat16 and is float32"),
    (lambda: run(sample, torch.randn(2, 1001), 1.0, *COUNTERS), "stride 1001 in dimension 0, which 16-byte loads"),
    (lambda: run(sample, torch.randn(2, 8).double(), 1.0, *COUNTERS), "or float32 and not for float64"),
    (lambda: run(sample, torch.randn(3, 8), 1.0, *COUNTERS), r"counter of Sampler must have shape \[3\] and has \[2\]"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: REFUSED[number][1])
def test_what_a_kernel_cannot_read_is_refused(number):
    refused, words = REFUSED[number]
    with pytest.raises(KernelError, match=words):
        refused()
