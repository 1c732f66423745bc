"""The paged engine against the one that has room for all: on a GPU, or in Triton's interpreter on a CPU.

On a CPU a block, and a tile of attention, has few tokens, so that short answers need several.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, make_policy
from reference import answers, recomputed_logprobs
from thorough import thorough

from rlcourse.exact import layers, weights
from rlcourse.rollout import fast, make_engine, paged, paged_scheduler, slots, triton_step
from rlcourse.rollout.fast import FastEngine
from rlcourse.rollout.paged import PagedEngine
from rlcourse.sampling import GREEDY, Sampling

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BLOCK = 128 if ON_GPU else 8
LONGEST = 300 if ON_GPU else 14  # new tokens
SCALE = BLOCK // 8
# A prompt of no full block, one of exactly two blocks, two that begin with the same one.
SHARED = [(7 * i) % 90 + 5 for i in range(BLOCK)]
PROMPTS = [
    [5, 9, 40], [(3 * i) % 80 + 4 for i in range(2 * BLOCK)], [*SHARED, *range(30, 30 + 5)], [*SHARED, *range(50, 53)],
]  # fmt: skip


def policy_that_ends(share: int = 9):
    """Every so many tokens one ends an answer."""
    policy = make_policy(3, hidden_size=128, intermediate_size=256, num_hidden_layers=1, head_dim=64)
    policy.eos_ids = list(range(0, len(policy.tokenizer), share))
    return policy


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Kernels also on a CPU and in float32, and there small blocks."""
    for module in (fast, paged):
        monkeypatch.setattr(module, "has_kernels", weights.fits)
    monkeypatch.setattr(fast, "is_exact", weights.fits)
    monkeypatch.setattr(paged, "STEPS_BETWEEN_LOOKS", 4 * SCALE if ON_GPU else 2)
    if not ON_GPU:
        for module, name in ((triton_step, "KEYS"), (layers, "KEYS"), (paged, "BLOCK_TOKENS"), (slots, "BLOCK_TOKENS")):
            monkeypatch.setattr(module, name, BLOCK)
        monkeypatch.setattr(paged.BlockManager.__init__, "__defaults__", (BLOCK,))
        monkeypatch.setattr(paged, "SHORTEST_PIECE", 8)


def engine_of(policy, blocks: int, slots: int = 16, cls=PagedEngine) -> PagedEngine:
    """An engine with so many blocks besides nobody's."""
    engine = cls(policy, DTYPE, 1.0, slots)
    engine.num_blocks = blocks + 1
    return engine


class Watched(PagedEngine):
    """Keeps its plans."""

    def _prepare(self, plan, *arguments):
        self.plans = [*getattr(self, "plans", []), plan]
        super()._prepare(plan, *arguments)


def sent_back(plans) -> int:
    return sum(after.limit < before.limit for before, after in zip(plans, plans[1:], strict=False))


def assert_same(found, expected) -> None:
    assert answers(found) == answers(expected)
    mask = expected.completion_mask
    if ON_GPU:
        assert torch.equal(found.logprobs[mask], expected.logprobs[mask])
    torch.testing.assert_close(found.logprobs[mask], expected.logprobs[mask], atol=1e-5, rtol=0)
    assert torch.equal(found.finished, expected.finished)


@pytest.mark.parametrize(
    ("sampling", "blocks", "slots"),
    [
        (GREEDY, 60, 12),
        (Sampling(0.8), 9, 12),
        thorough((GREEDY, 9, 12)),
        thorough((Sampling(), 12, 5)),
        thorough((Sampling(), 60, 3)),
    ],
)
def test_answers_are_those_of_the_engine_with_room_for_all(sampling, blocks, slots):
    policy = policy_that_ends()
    engine = engine_of(policy, blocks, slots, Watched)
    torch.manual_seed(1)
    found = engine.generate(PROMPTS, 3, LONGEST, sampling)
    torch.manual_seed(1)
    expected = FastEngine(policy, DTYPE).generate(PROMPTS, 3, LONGEST, sampling)
    assert_same(found, expected)
    assert (sent_back(engine.plans) > 0) == (blocks == 9)
    assert len(found.completion_lengths.unique()) > 3


def test_it_is_so():
    pass
