"""The Triton kernels of a decode step against the step in PyTorch: on a GPU, or in Triton's interpreter on a CPU."""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, make_policy
from reference import recomputed_logprobs
from steps import by_rows, new_step
from thorough import thorough

from rlcourse import cuda_graphs
from rlcourse.exact import GROUP
from rlcourse.exact.weights import fused_weights
from rlcourse.rollout import gpu_engine, make_engine, tiles, triton_step
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.gpu_engine import GPUEngine
from rlcourse.sampling import GREEDY, Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36]]
SHAPES = {
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "qwen3, wide heads": {"architecture": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128},
    "llama": {"architecture": "llama", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
}
DRAWS = 20_000 if DEVICE == "cuda" else 300  # the interpreter takes many milliseconds for each
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# Cuts in which every other path is taken: pipelines, shares, several blocks of rows.
SMALL = tiles.MatmulTile(16, 32, 64, stages=2)
LATE = tiles.TileConfig(tiles.MatmulTile(16, 32, 64, stages=2), SMALL, replace(SMALL, more=16), SMALL)


def model(shape, seed=0, layers=2):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers}
    return make_policy(seed, tied=seed % 2 == 0, **sizes, **SHAPES[shape])


def rollout(policy, num_generations, max_new_tokens, sampling, slots: int | None = None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_engine, "STEPS_BETWEEN_LOOKS", 2)
        return GPUEngine(policy, DTYPE, max_slots=slots).generate(PROMPTS, num_generations, max_new_tokens, sampling)


def last_scale(step, rows):
    """1 / rms of the last norm [rows, 1], which the kernels that sample multiply the logits with."""
    squares = step.squares[:rows].sum(1, keepdim=True)
    return (squares / step.hidden + step.weights.eps).rsqrt()


def assert_as_good(found, plain, exact):
    """On a CPU in float32, equal. In bfloat16, no further from float32 than the step in PyTorch is."""
    if DEVICE == "cpu":
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)
        return
    errors, others = ((x.float() - exact).abs() for x in (found, plain))
    assert errors.mean() <= 1.2 * others.mean() + 1e-3 and errors.max() <= 1.5 * others.max() + 0.05


def assert_same_logprobs(found, policy, sampling):
    """Log-probs kept from sampling and recomputed in float32; in bfloat16 they may differ by rounding."""
    gap = (found.logprobs - recomputed_logprobs(policy, found, sampling))[found.completion_mask].abs()
    assert gap.max() < 1e-4 if DEVICE == "cpu" else gap.mean() < 0.1


@pytest.mark.parametrize("cut", [tiles.TILES_UP_TO_16_ROWS, LATE], ids=["early", "late"])
@pytest.mark.parametrize(
    ("shape", "rows"), [("qwen2", 1), ("qwen3, wide heads", 1), *map(thorough, [("llama", 1), ("qwen2", 19)])]
)
def test_a_step_writes_the_cache_and_the_logits_of_the_step_in_pytorch(shape, cut, rows, monkeypatch):
    def cut_for(rows, shared, processors, hidden, inner, head_dim: int, normed: bool) -> tiles.TileConfig:
        return replace(cut, qkv=replace(cut.qkv, columns=head_dim // 2)) if normed else cut

    monkeypatch.setattr(triton_step, "tiles_for", cut_for)
    splits = 2 if cut is LATE else 1
    monkeypatch.setattr(triton_step, "attention_tile", lambda *sizes: tiles.AttentionTile(splits, stages=3))
    policy = model(shape)
    decoder, exact = Decoder(policy.model, DTYPE, False), Decoder(policy.model, torch.float32, False)
    step = new_step(fused_weights(policy.model, DTYPE), 24, 40, new_tokens=4)
    slots, room = step.slots, tiles.KEYS
    torch.manual_seed(0)
    step.cache.normal_()
    slots.token.random_(3, 200)
    slots.position.random_(0, 39)
    slots.position[0] = 0  # one token, and a cache that is full
    slots.position[rows - 1] = room - 1 if rows > 1 else 0
    slots.done[rows:] = True
    caches = {d: by_rows(step.cache, 24).to(d.dtype, copy=True) for d in (decoder, exact)}
    token, position = slots.token[:rows].clone(), slots.position[:rows].clone()
    with torch.no_grad():
        plain, wanted = (d.decode(token, position, caches[d][:, :, :rows], room).float() for d in (decoder, exact))
        step(rows, GREEDY)
    assert_as_good(by_rows(step.cache, 24), caches[decoder], caches[exact])
    logits = step.logits[:rows].float() * last_scale(step, rows)
    assert_as_good(logits, plain, wanted)
    assert slots.token[:rows].tolist() == logits.argmax(-1).tolist() == slots.tokens[:rows, 0].tolist()
    chosen = logits.log_softmax(-1).amax(-1)
    torch.testing.assert_close(slots.logprobs[:rows, 0], chosen, atol=1e-4, rtol=0)
    assert torch.equal(slots.position[:rows], position + 1) and slots.num_tokens[:rows].tolist() == [1] * rows
    assert not step.arrived.any()  # counters are ready for the next step


@pytest.mark.parametrize("shape", ["llama", thorough("qwen3, wide heads")])
def test_greedy_tokens_are_those_of_generate(shape):
    policy = model(shape, seed=3)
    found = rollout(policy, 1, 4, GREEDY)
    if DEVICE == "cpu":
        expected = make_engine(policy, "hf-dynamic", torch.float32).generate(PROMPTS, 1, 4, GREEDY)
        assert torch.equal(found.ids, expected.ids)
    assert_same_logprobs(found, policy, GREEDY)


@pytest.mark.thorough
def test_slots_are_taken_over_within_the_step():
    """Who continues in a slot, and when, does not change what is said."""
    policy = model("qwen2", seed=3, layers=1)
    policy.eos_ids = list(range(0, len(policy.tokenizer), 7))
    everyone, found = rollout(policy, 2, 5, GREEDY), rollout(policy, 2, 5, GREEDY, slots=3)
    if DEVICE == "cpu":  # in bfloat16 the best two tokens can be as good
        assert torch.equal(found.ids, everyone.ids)
        assert torch.equal(found.completion_lengths, everyone.completion_lengths)
    assert_same_logprobs(found, policy, GREEDY)


def test_sampling_logprobs_equal_recomputed_ones(monkeypatch):
    sampling, policy = Sampling(temperature=0.6), model("qwen2", layers=1)
    policy.eos_ids = list(range(0, len(policy.tokenizer), 3))
    monkeypatch.setattr(cuda_graphs, "SMALLEST", 1)
    torch.manual_seed(1)
    found = rollout(policy, 2, 4, sampling, slots=4)
    assert_same_logprobs(found, policy, sampling)
    ends = torch.isin(found.completion_ids, torch.tensor(policy.eos_ids, device=DEVICE))
    for row, length in enumerate(found.completion_lengths.tolist()):
        assert not ends[row, : length - 1].any() and (ends[row, length - 1] or length == 4)
    assert len(found.completion_lengths.unique()) > 1


def sample(logits, draws, temperature=1.0, tile=64, monkeypatch=None, of_one=False):
    """`draws` tokens and log-probs from one row of logits, by the two sampling kernels: each the first of a completion,
    or all of one."""
    monkeypatch.setattr(triton_step, "VOCABULARY_TILE", tile)
    step = new_step(fused_weights(model("qwen2").model, DTYPE), draws, 8, draws if of_one else 1)
    slots = step.slots
    slots.completion.copy_(torch.zeros(draws) if of_one else torch.arange(draws))
    slots.num_tokens.copy_(torch.arange(draws) if of_one else torch.zeros(draws))
    slots.max_new_tokens.fill_(slots.tokens.shape[1])
    step.squares.fill_(GROUP)  # an rms of 1
    step.vocabulary, step.vocabulary_tiles = len(logits), -(-len(logits) // tile)
    logits = logits.to(DEVICE).repeat(draws, 1).contiguous()
    torch.manual_seed(5)
    step.new_seed()
    step._sample(slots, logits, step.squares, Sampling(temperature=temperature))
    drawn = 0 if of_one else (slice(draws), 0)
    return slots.tokens[drawn].cpu(), slots.logprobs[drawn].cpu()


@pytest.mark.thorough
def test_frequencies_match_the_softmax(monkeypatch):
    vocabulary, tile, temperature = 100, 64, 0.7
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(vocabulary)
    tokens, logprobs = sample(logits, DRAWS, temperature, tile, monkeypatch)
    pi = (logits / temperature).softmax(0)
    torch.testing.assert_close(logprobs, pi.log()[tokens], atol=1e-4, rtol=0)
    expected = DRAWS * pi
    counts = torch.bincount(tokens, minlength=vocabulary)
    likely = expected > 5
    chi = ((counts - expected).square() / expected)[likely].sum()
    freedom = int(likely.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


def test_each_token_of_a_completion_and_each_completion_has_its_own_random_number(monkeypatch):
    for of_one in (False, True):
        tokens, again = (sample(torch.zeros(150), 12, monkeypatch=monkeypatch, of_one=of_one)[0] for _ in range(2))
        assert len(set(tokens.tolist())) > 8 and torch.equal(tokens, again)  # sample() sets the seed


def test_a_token_without_mass_is_never_drawn_and_one_with_all_of_it_always(monkeypatch):
    logits = torch.full((130,), float("-inf"))
    logits[[3, 70, 129]] = torch.tensor([0.0, 1.0, 0.5])
    tokens, _ = sample(logits, 30, 1.0, 64, monkeypatch)
    assert set(tokens.tolist()) == {3, 70, 129}
    tokens, logprobs = sample(torch.tensor([0.0] * 99 + [80.0]), 5, 1.0, 64, monkeypatch)
    assert set(tokens.tolist()) == {99} and logprobs.abs().max() < 2e-5  # 80 has so many digits in float32


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_p=0.8), thorough(Sampling(top_k=3))])
def test_restricted_sampling_leaves_the_right_tokens_out(sampling):
    torch.manual_seed(0)
    policy = model("qwen2", layers=1)
    found = rollout(policy, 1, 3, sampling)
    assert_same_logprobs(found, policy, sampling)


@pytest.mark.parametrize(
    ("hidden", "inner", "head_dim"), [(896, 4864, 64), (1024, 3072, 128), (1536, 8960, 128), (2048, 8192, 64)]
)
@pytest.mark.parametrize("rows", [1, 16, 17, 97, 256])
def test_tiles_fit_the_shared_memory_of_a_small_gpu(rows, hidden, inner, head_dim):
    gpus = (227 * 1024, 132), (tiles.LEAST_SHARED, 80)
    for (shared, processors), normed in itertools.product(gpus, (False, True)):
        config = tiles.tiles_for(rows, shared, processors, hidden, inner, head_dim, normed)
        columns = config.qkv.columns
        assert columns == head_dim // 2 if normed else head_dim // 2 % columns == 0
        for p, matrices in ((config.qkv, 2), (config.out, 1), (config.gate_up, 2), (config.down, 1)):
            assert p.stages * 2 * p.depth * (p.rows + matrices * (p.columns + p.more)) < shared
            assert p.stages >= 2 and p.depth >= 32
