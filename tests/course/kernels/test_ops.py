"""The operations as PyTorch sees them: fakes, mutation, compilation, CUDA graphs."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, spread

from rlcourse.course.kernels.adamw import adamw
from rlcourse.course.kernels.attention import packed_attention
from rlcourse.course.kernels.embedding import embedding, embedding_backward
from rlcourse.course.kernels.residual_norm import residual_norm
from rlcourse.course.kernels.residual_norm_backward import residual_norm_backward
from rlcourse.course.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from rlcourse.course.kernels.rms_norm_backward import rms_norm_backward
from rlcourse.course.kernels.rope import rope
from rlcourse.course.kernels.rotate import rotate
from rlcourse.course.kernels.sampler import sample
from rlcourse.course.kernels.swiglu import swiglu, swiglu_reference
from rlcourse.course.kernels.swiglu_backward import swiglu_backward
from rlcourse.course.kernels.token_logprob import token_logprob
from rlcourse.course.kernels.token_logprob_backward import token_logprob_backward
from rlcourse.course.kernels.vector_add import vector_add
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
