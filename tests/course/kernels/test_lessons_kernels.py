"""Every kernel of the lessons against PyTorch in float64, forward and backward, from one table of cases."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from float64 import results
from kernel_cases import (
    BF16,
    CASES,
    F16,
    attention_case,
    logprob_case,
    norm_backward_case,
    residual_case,
    sample_case,
    sum_case,
)
from launching import DEVICE, on_device, run
from thorough import thinned, thorough
from torch import ones

from rlcourse.course.kernels import residual_norm as training
from rlcourse.course.kernels import sampler
from rlcourse.course.kernels.adamw import adamw
from rlcourse.course.kernels.attention import AttentionBackwardKeys
from rlcourse.course.kernels.embedding import embedding_backward
from rlcourse.course.kernels.residual_norm import ResidualNormBackward
from rlcourse.course.kernels.rms_norm import RMSNorm
from rlcourse.course.kernels.rms_norm_backward import RMSNormBackward
from rlcourse.course.kernels.rope import Rope
from rlcourse.course.kernels.swiglu import Swiglu
from rlcourse.kernels import KernelError
from rlcourse.kernels.toolchain import compiled, interpreted


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """So that a warp has several rows where there are few, and several blocks share a short row of logits."""
    monkeypatch.setattr(training, "PROGRAMS", 2)
    monkeypatch.setattr(sampler, "splits_for", lambda *_: 3)
    torch.manual_seed(0)


def named(case) -> str:
    parts = (case.func, *case.args)
    return "-".join(str(getattr(part, "__name__", part)) for part in parts).replace("_case", "").replace("torch.", "")


FIRST = {case.func: case for case in reversed(CASES) if not hasattr(case, "marks")}  # of each kind
each = pytest.mark.parametrize("case", CASES, ids=named)


@each
def test_kernels_compute_what_float64_does(case):
    case = case()
    exact = case.exact()  # before an operation changes what it takes
    case.check(case.ours(), exact)


@pytest.mark.parametrize("case", FIRST.values(), ids=named)
def test_references_compute_what_float64_does(case):
    case = case()
    if case.reference is None:
        pytest.skip("has none")
    exact = case.exact()
    found = results(case.reference(*case.arguments))
    case.check(found, exact[: len(found)])


TALKING = [(residual_case, 9, 160, F16), (norm_backward_case, 5, 256, 2), (sum_case, 450, 40),
           (attention_case, [0, 40, 50], 2, 1, BF16), (logprob_case, 2, 2049, BF16),
           (sample_case, 2, 2100, torch.float32, 1.0)]  # fmt: skip


@pytest.mark.parametrize("case", TALKING, ids=lambda case: case[0].__name__)
def test_the_order_of_threads_changes_no_bit(case):
    found = []
    for order in ("lockstep", "random", "warp"):
        torch.manual_seed(0)
        found.append(case[0](*case[1:]).ours(order=order))
    for other in found[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("case", FIRST.values(), ids=named)
def test_operations_are_what_they_say(case):
    case = case()
    if not hasattr(case.operation, "_opoverload"):
        pytest.skip("is none, or several")
    arguments = [on_device(a) if isinstance(a, torch.Tensor) else a for a in case.arguments]
    for argument in arguments[: case.leaves if case.grads else 0]:
        argument.requires_grad_()
    with interpreted() if DEVICE == "cpu" else contextlib.nullcontext():
        torch.library.opcheck(case.operation, tuple(arguments))


@pytest.mark.skipif(DEVICE == "cpu", reason="about CUDA graphs")
def test_a_graph_replays_with_the_counters_it_finds():
    logits, counter = torch.randn(16, 4096, device="cuda"), torch.arange(16, device="cuda")
    seed = torch.tensor([3], device="cuda")
    eager = [sampler.sample(logits, 1.0, seed, counter + 100 * step) for step in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sampler.sample(logits, 1.0, seed, counter)
    for expected in eager:
        graph.replay()
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
        counter += 100


@pytest.mark.parametrize("seed", thinned(range(12), every=6))
def test_runs_of_equal_tokens_may_begin_anywhere(seed):
    """Of whole numbers, so that any order of adding them gives the same, and a row too many or too few is seen."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 100, (10,)) * (torch.rand(10) < 0.8) // (1 + 30 * (torch.rand(10) < 0.3))
    token = torch.arange(10).repeat_interleave(lengths)
    token, dy, found = token[torch.randperm(len(token))], torch.randint(-9, 9, (len(token), 8)).bfloat16(), ones(10, 8)
    run(embedding_backward, token, dy, found)
    assert torch.equal(found, ones(10, 8).index_add(0, token, dy.float()))


def test_equal_tokens_are_added_in_their_order():
    """2^24, then -2^24, then 1: in another order, and in float32, the small one would lose bits."""
    for order, expected in (([0, 1, 2], 1), ([0, 2, 1], 0)):
        dy, found = torch.zeros(3, 8), torch.zeros(2, 8)
        dy[:, 0] = torch.tensor([2.0**24, -(2.0**24), 1.0])[order]
        run(embedding_backward, torch.tensor([1, 1, 1]), dy.bfloat16(), found)
        assert found[1, 0] == expected


@pytest.mark.parametrize("hidden", [896, thorough(1536)])
def test_an_h200_has_room_for_two_blocks_at_a_time(hidden):
    """So that while one waits the other one works, and `PROGRAMS` blocks are all there at once."""
    kernel = ResidualNormBackward(hidden, "bfloat16")
    code = compiled(kernel, "sm_90a")
    assert 2 * code.registers * kernel.threads <= 65536 and 2 * (code.shared_bytes + 1024) <= 228 * 1024


COUNTERS = torch.tensor([3]), torch.arange(2)
STATE = [torch.zeros(8) for _ in range(4)]
REFUSED = [  # what is not taken, and key words of the sentence that says so
    *((lambda hidden=hidden: RMSNorm(hidden, "bfloat16"), f"cut rows of {hidden}") for hidden in (100, 184, 8192)),
    *((lambda hidden=hidden: RMSNormBackward(hidden), f"cannot cut rows of {hidden}") for hidden in (192, 4096)),
    (lambda: ResidualNormBackward(2056, "bfloat16"), "cut rows of 2056"),
    (lambda: Swiglu(100, "bfloat16"), "Swiglu cannot cut rows of 100: it takes multiples of 8"),
    (lambda: Swiglu(64, "float32"), "Swiglu is for bfloat16 or float16"),
    (lambda: Rope(4, 24, "bfloat16"), "Rope cannot cut rows of 24"),
    (lambda: AttentionBackwardKeys(3, 2), "3 query heads cannot share 2"),
    (lambda: run(sampler.sample, torch.randn(2, 8).double(), 1.0, *COUNTERS), "or float32 and not for float64"),
    (lambda: run(adamw, *STATE, STATE[0].half(), 0, 0.1), "counts steps from 1 and got 0"),
]


@pytest.mark.parametrize(("refused", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_a_kernel_cannot_read_is_refused(refused, words):
    with pytest.raises(KernelError, match=words):
        refused()
