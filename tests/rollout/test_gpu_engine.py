"""The engine on a GPU, and within a budget against itself with room for all; or in Triton's interpreter on a CPU. On a
CPU a block, and a tile of attention, has few tokens, so that short answers need several."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, make_policy
from reference import answers
from thorough import thorough

from rlcourse import cuda_graphs, rollout
from rlcourse.exact import layers, weights
from rlcourse.rollout import blocks, gpu_engine, make_engine, prefill, slots, triton_step
from rlcourse.rollout.blocks import BLOCK_TOKENS
from rlcourse.rollout.gpu_engine import GPUEngine
from rlcourse.rollout.scheduler import Piece
from rlcourse.sampling import GREEDY, Sampling

ON_GPU = DEVICE == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BLOCK = BLOCK_TOKENS if ON_GPU else 8
NEW = 10 * BLOCK // 8  # tokens of an answer at most
START = [(7 * i) % 90 + 5 for i in range(BLOCK)]
# Less than a block, exactly two, and two that begin with the same one.
PROMPTS = [[5, 9, 40], [(3 * i) % 80 + 4 for i in range(2 * BLOCK)], [*START, *range(30, 35)], [*START, *range(50, 53)]]


def policy_that_ends(share: int = 12 * BLOCK // 8, seed: int = 3, **kind):
    """One token of so many ends an answer."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 100}
    policy = make_policy(seed, max_position_embeddings=1024, **sizes, **kind)
    policy.eos_ids = list(range(0, 100, share))
    return policy


@pytest.fixture
def small(monkeypatch):
    """Kernels also on a CPU and in float32, and there small blocks."""
    monkeypatch.setattr(rollout, "has_kernels", weights.fits)
    monkeypatch.setattr(gpu_engine, "STEPS_BETWEEN_LOOKS", BLOCK // 4)
    monkeypatch.setattr(cuda_graphs, "SMALLEST", 1)  # so that the batch becomes smaller, too
    if not ON_GPU:
        for module in (triton_step, layers):
            monkeypatch.setattr(module, "KEYS", BLOCK)
        for module in (blocks, gpu_engine, slots):
            monkeypatch.setattr(module, "BLOCK_TOKENS", BLOCK)
        monkeypatch.setattr(blocks.BlockManager.__init__, "__defaults__", (BLOCK,))
        monkeypatch.setattr(gpu_engine, "SHORTEST_PIECE", 8)


class Watched(GPUEngine):
    """An engine with so many blocks besides nobody's, which keeps its plans, and looks who is in the slots."""

    def __init__(self, policy, usable: int | None, slots: int = 16):
        super().__init__(policy, DTYPE, max_slots=slots)
        self.budget, self.plans = usable + 1 if usable else 0, []

    def _prepare(self, plan, *arguments):
        self.plans.append(plan)
        assert len(self.plans) < 200, "it does not end"
        super()._prepare(plan, *arguments)
        live = self.slots.completion[~self.slots.done].tolist()
        assert len(set(live)) == len(live) and self.slots.no_completion not in live

    @property
    def pieces(self) -> list[Piece]:
        return [piece for plan in self.plans for piece in plan.pieces]


def sent_back(plans) -> list[int]:
    """Who is admitted after each time that something was sent back."""
    return [after.admitted for before, after in itertools.pairwise(plans) if after.admitted < before.admitted]


def assert_same(found, expected) -> None:
    """The same answers; log-probs, on a GPU, to the last bit."""
    assert answers(found) == answers(expected)
    mask = expected.completion_mask
    near = 0 if ON_GPU else 1e-5  # of numbers to about 10 in float32, whose sums have other orders
    torch.testing.assert_close(found.logprobs[mask], expected.logprobs[mask], atol=near, rtol=near)
    assert torch.equal(found.finished, expected.finished)


def with_room(policy, prompts, num_generations: int, new: int, sampling: Sampling, seed: int = 1):
    """With blocks for all, all at once."""
    return generate(GPUEngine(policy, DTYPE), prompts, num_generations, new, sampling, seed)


def generate(engine, prompts, num_generations: int, new: int, sampling: Sampling, seed: int = 1):
    torch.manual_seed(seed)
    return engine.generate(prompts, num_generations, new, sampling)


@pytest.mark.parametrize("kind", ["update", *map(thorough, ("sleep", "update, synced by another"))])
def test_a_prompt_of_whole_blocks_is_found_again_until_the_weights_change(kind, small):
    policy, prompt = policy_that_ends(), PROMPTS[1]
    engine = Watched(policy, 20)
    before = generate(engine, [prompt], 1, 2, Sampling())
    assert_same(generate(engine, [prompt], 1, 2, Sampling()), before)
    # The last token is not found but computed, as the logits come from it: so its block is not found, either.
    assert [(piece.begin, piece.end) for piece in engine.pieces] == [(0, 2 * BLOCK), (BLOCK, 2 * BLOCK)]
    if "update" in kind:
        for parameter in policy.model.parameters():
            parameter.grad = parameter.detach().clone()
        torch.optim.AdamW(policy.model.parameters(), lr=0.01, fused=True).step()  # which PyTorch does not count
    if "synced" in kind:
        engine.weights.sync(policy.model)
    if "sleep" in kind:
        engine.sleep()
        assert engine.slots is engine.cache is engine.step is None
    engine.plans = []
    found = generate(engine, [prompt], 1, 2, Sampling())
    assert [piece.begin for piece in engine.pieces] == [0]
    assert_same(found, with_room(policy, [prompt], 1, 2, Sampling()))
    assert torch.equal(found.logprobs, before.logprobs) == (kind == "sleep")


def test_pieces_are_joined_as_long_as_padding_allows():
    pieces = [Piece(i, 0, n, True) for i, n in enumerate((5, 3, 4, 20, 1, 1))]
    found = prefill.passes(pieces, 15, 2)
    assert [[piece.completion for piece in group] for group in found] == [[4, 5], [1, 2], [0], [3]]
    assert [len(group) for group in prefill.passes(pieces, 16, 9)] == [4, 1, 1]
    assert [len(group) for group in prefill.passes(pieces, 15, 9)] == [3, 2, 1]
    assert prefill.passes([], 15, 9) == []
    late = [Piece(0, 8, 10, True), Piece(1, 0, 9, True), Piece(2, 8, 9, True)]  # what begins at 8 may read the other's
    assert [[p.completion for p in group] for group in prefill.passes(late, 9, 9)] == [[1], [2, 0]]


def test_a_short_piece_is_not_computed_before_the_long_one_that_it_reads(small, monkeypatch):
    policy, prompts = policy_that_ends(), [[*START, *range(30, 30 + BLOCK // 2)], [*START, 50]]
    monkeypatch.setattr(gpu_engine, "PREFILL_TOKENS", 2 * BLOCK)  # enough, but not if both are as long
    engine = Watched(policy, 40)
    found = generate(engine, prompts, 1, 2, GREEDY)
    assert [(p.begin, p.end) for p in engine.plans[0].pieces] == [(0, BLOCK + BLOCK // 2), (BLOCK, BLOCK + 1)]
    assert len(prefill.passes(engine.plans[0].pieces, 2 * BLOCK, 9)) == 2
    assert_same(found, with_room(policy, prompts, 1, 2, GREEDY))


def test_what_does_not_fit_is_refused_in_a_sentence(small, monkeypatch):
    policy = policy_that_ends()
    with pytest.raises(ValueError, match="give it a larger budget"):
        Watched(policy, 2).generate(PROMPTS, 1, NEW, GREEDY)
    with pytest.raises(ValueError, match="A paged cache is for the engines fast and vllm"):
        make_engine(policy, "hf-dynamic", DTYPE, cache_gb=1.0)
    with pytest.raises(ValueError, match="Unknown engine 'graph'"):
        make_engine(policy, "graph", DTYPE)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="A paged cache needs an NVIDIA GPU"):
        make_engine(policy, "fast", torch.float32, cache_gb=1.0)


def test_the_budget_is_that_of_the_cache(small):
    engine = make_engine(policy_that_ends(), "fast", DTYPE, cache_gb=0.001)
    assert isinstance(engine, GPUEngine)
    engine.generate(PROMPTS[:1], 1, 1, GREEDY)
    size = engine.cache.numel() * engine.cache.element_size()
    assert 0.8e6 < size <= 1e6


def test_without_a_budget_nobody_is_sent_back_and_room_is_used_again(small):
    policy = policy_that_ends()
    policy.eos_ids = [policy.model.config.vocab_size]
    engine = Watched(policy, None, 2)
    found = generate(engine, PROMPTS[:2], 2, 3, GREEDY)
    assert not sent_back(engine.plans) and len(engine.pieces) == 2
    assert_same(found, with_room(policy, PROMPTS[:2], 2, 3, GREEDY))
    cache = engine.cache
    generate(engine, PROMPTS[:1], 1, 2, GREEDY)
    assert engine.cache is cache
    engine._make_room(PROMPTS[:1], 1, 6 * BLOCK)
    assert engine.cache.shape[2] > cache.shape[2]


def test_what_was_sent_back_says_what_it_would_have_said(small):
    """Of three blocks two are the prompts' own, and one is shared."""
    policy = policy_that_ends()
    policy.eos_ids = [policy.model.config.vocab_size]
    engine, prompts = Watched(policy, 3, 4), PROMPTS[2:]
    new = BLOCK - 3  # so that an answer needs a third block
    found = generate(engine, prompts, 1, new, GREEDY)
    assert sent_back(engine.plans)
    assert_same(found, with_room(policy, prompts, 1, new, GREEDY))
