"""All engines sample from the model's own distribution, keep the log-probs they sampled with, and mask alike.

vLLM is tried where it is installed and has a GPU; elsewhere our engine drives a stand-in for it.
"""

from itertools import pairwise

import pytest
import torch
import vllm_in_memory
from policies import DEVICE, make_policy
from reference import answers, assert_logprobs_are_the_models

from rlcourse.rollout import fast, make_engine, vllm
from rlcourse.rollout.hf import left_pad
from rlcourse.sampling import GREEDY, Sampling

ENGINES = ["hf-dynamic", "hf-static", "fast", "vllm"] + (["fast-compiled"] if DEVICE == "cuda" else [])
PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36], [8, 8]]


LLMS = {}  # vLLM's, which takes a minute to start, by the config of its model; there can be one
SIZES = {"vllm": {"hidden_size": 128}}  # its attention has heads of 32 numbers at least
APART = {"vllm": 0.1} if vllm_in_memory.is_there() else {}  # its kernels round float32 as they multiply


@pytest.fixture(autouse=True)
def vllm_or_its_stand_in(monkeypatch):
    if not vllm_in_memory.is_there():
        vllm_in_memory.put_in(monkeypatch)


@pytest.fixture
def policy(request):
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    return make_policy(**SIZES.get(name, {}))


def engine(policy, name):
    if name == "vllm" and vllm_in_memory.is_there():
        shape = policy.model.config.to_json_string()
        if shape not in LLMS:
            LLMS.clear()
            vllm.free_memory()
            LLMS[shape] = make_engine(policy, name, torch.float32, cache_gb=0.2)
        LLMS[shape].policy = policy  # whose weights it takes over
        return LLMS[shape]
    if name == "fast-compiled":
        torch._dynamo.reset()
        return make_engine(policy, "fast", torch.float32, compile=True)
    return make_engine(policy, name, torch.float32)


def greedy_by_hand(policy, prompt: list[int], max_new_tokens: int) -> list[int]:
    """One prompt, no padding, no cache: the whole sequence through the model for each token."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            ids.append(int(policy.model(torch.tensor([ids], device=DEVICE)).logits[0, -1].argmax()))
        if ids[-1] in policy.eos_ids:
            break
    return ids[len(prompt) :]


def test_left_pad_puts_padding_before_the_prompt():
    ids, mask = left_pad([[1, 2], [3]], 9, torch.device("cpu"))
    assert ids.tolist() == [[1, 2], [9, 3]]
    assert mask.tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_are_those_of_the_model_without_cache_or_padding(name, tied):
    policy = make_policy(seed=3, tied=tied, **SIZES.get(name, {}))
    rollout = engine(policy, name).generate(PROMPTS, 1, 12, GREEDY)
    for row, prompt in enumerate(PROMPTS):
        assert answers(rollout)[row] == greedy_by_hand(policy, prompt, 12)


@pytest.mark.thorough
def test_the_compiled_step_samples_the_same_greedy_tokens(policy):
    """On a GPU the other tests run it too; compiling for a CPU takes a minute."""
    compiled = engine(policy, "fast-compiled").generate(PROMPTS, 1, 6, GREEDY)
    assert torch.equal(compiled.ids, engine(policy, "fast").generate(PROMPTS, 1, 6, GREEDY).ids)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=5), Sampling(temperature=1.5, top_p=0.8)]
)
def test_sampling_logprobs_equal_recomputed_ones(policy, name, sampling):
    torch.manual_seed(1)
    rollout = engine(policy, name).generate(PROMPTS, 3, 10, sampling)
    assert_logprobs_are_the_models(policy, rollout, sampling, APART.get(name, 1e-4))


@pytest.mark.parametrize("name", ENGINES)
def test_generation_defaults_of_the_model_do_not_leak_into_sampling(policy, name):
    """Qwen2.5-Instruct ships top-k 20, top-p 0.8 and a repetition penalty in its generation config."""
    torch.manual_seed(0)
    few = engine(policy, name).generate([PROMPTS[0]], 2000, 1, Sampling(temperature=2.0 if name == "vllm" else 3.0))
    assert len(few.completion_ids.unique()) > 100  # top-k 50 would leave 50


@pytest.mark.parametrize("name", ENGINES)
def test_frequencies_of_the_first_token_match_the_softmax(policy, name):
    torch.manual_seed(0)
    draws = 4000
    rollout = engine(policy, name).generate([PROMPTS[2]], draws, 1, Sampling())
    with torch.no_grad():
        probabilities = policy.model(torch.tensor([PROMPTS[2]], device=DEVICE)).logits[0, -1].double().softmax(-1)
    counts = torch.bincount(rollout.completion_ids[:, 0], minlength=len(probabilities)).double()
    expected = probabilities * draws
    common = expected >= 5  # the usual rule for a chi-square test; the rest is one more cell
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    freedom = int(common.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


@pytest.mark.parametrize("name", ENGINES)
def test_rows_end_with_their_first_eos_and_are_masked_after_it(policy, name):
    torch.manual_seed(0)
    policy.eos_ids = list(range(0, 300, 6))  # so many that rows end at different steps, some at once
    policy.model.generation_config.eos_token_id = policy.eos_ids
    rollout = engine(policy, name).generate(PROMPTS, 16, 14, Sampling())
    assert rollout.completion_lengths.min() == 1
    assert len(rollout.completion_lengths.unique()) > 5
    for row, (ids, logprobs, finished) in enumerate(
        zip(rollout.completion_ids, rollout.logprobs, rollout.finished, strict=True)
    ):
        length = int(rollout.completion_lengths[row])
        assert (rollout.ids[row, len(PROMPTS[row // 16]) + length :] == policy.pad_id).all()
        assert not any(int(i) in policy.eos_ids for i in ids[: length - 1])
        assert bool(finished) == (int(ids[length - 1]) in policy.eos_ids)
        assert finished or length == 14
        assert (logprobs[length:] == 0).all()
    # Rows that stay while others leave keep their own cache.
    assert_logprobs_are_the_models(policy, rollout, Sampling(), APART.get(name, 1e-4))


@pytest.mark.parametrize("name", ENGINES)
def test_rows_are_group_major(policy, name):
    rollout = engine(policy, name).generate(PROMPTS, 2, 2, Sampling())
    for row in range(8):
        assert rollout.ids[row, : rollout.prompt_lengths[row]].tolist() == PROMPTS[row // 2]


@pytest.mark.parametrize("name", ENGINES)
def test_no_stale_weight_is_sampled_from(policy, name):
    sampler = engine(policy, name)
    sampler.generate(PROMPTS, 1, 4, Sampling())
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    rollout = sampler.generate(PROMPTS, 4, 8, Sampling())
    assert_logprobs_are_the_models(policy, rollout, Sampling(), APART.get(name, 1e-4))


@pytest.mark.parametrize("name", ENGINES)
def test_one_engine_answers_batch_after_batch(policy, name):
    """On a GPU a shape's first batch runs eagerly, the second is captured, the third replayed: with prompts of its own,
    and after a change of the weights."""
    used = engine(policy, name)
    for batch in range(4):
        prompts = [[(7 * batch + 3 * i + j) % 200 + 5 for j in range(3 + (batch + i) % 4)] for i in range(3)]
        found = used.generate(prompts, 2, 8, GREEDY)
        for row in range(6):
            expected = greedy_by_hand(policy, prompts[row // 2], 8)
            assert answers(found)[row] == expected
        with torch.no_grad():
            policy.model.model.norm.weight.mul_(1 + 0.5 * torch.randn_like(policy.model.model.norm.weight))
    used.sleep()
    assert torch.equal(
        used.generate(PROMPTS, 1, 8, GREEDY).completion_ids, used.generate(PROMPTS, 1, 8, GREEDY).completion_ids
    )


def test_a_static_cache_is_kept_while_it_has_room(policy):
    """Captured graphs know it by its address. Rollouts of other lengths must not see what an earlier one left."""
    used, addresses = make_engine(policy, "hf-static", torch.float32, longest=48), []
    calls = ((PROMPTS, 1, 30), (PROMPTS, 1, 8), (PROMPTS[:2], 2, 40), (PROMPTS, 2, 8), (PROMPTS, 2, 50))
    for prompts, rows, new in calls:
        expected = engine(policy, "hf-dynamic").generate(prompts, rows, new, GREEDY)
        found = used.generate(prompts, rows, new, GREEDY)
        assert torch.equal(found.completion_ids, expected.completion_ids)
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)
        addresses.append((used.kept[2], used.kept[2].layers[0].keys.data_ptr(), used.kept[1]))
    same = [a[0] is b[0] and a[1] == b[1] for a, b in pairwise(addresses)]
    assert same == [True, True, False, False] and [room for *_, room in addresses] == [48, 48, 48, 48, 57]
    used.sleep()
    assert used.kept is None


@pytest.mark.parametrize("rows", [1, 257])
def test_one_row_and_many_rows(policy, rows):
    """One row, and more rows than any power of two that a kernel might be made for."""
    sampler = engine(policy, "fast")
    for _ in range(2):  # the second time a captured graph is used again
        rollout = sampler.generate([PROMPTS[0]], rows, 9, Sampling())
        assert_logprobs_are_the_models(policy, rollout, Sampling())
    assert rows == 1 or len({tuple(ids) for ids in rollout.completion_ids.tolist()}) > 200  # rows are independent draws


@pytest.mark.parametrize("tokens", [1, 14, 15, 21])
def test_prompts_prefilled_a_few_at_a_time_are_those_prefilled_at_once(policy, tokens, monkeypatch):
    at_once = engine(policy, "fast").generate(PROMPTS, 2, 10, GREEDY)
    monkeypatch.setattr(fast, "PREFILL_TOKENS", tokens)  # four prompts, padded to seven tokens each
    in_pieces = engine(policy, "fast").generate(PROMPTS, 2, 10, GREEDY)
    assert torch.equal(in_pieces.completion_ids, at_once.completion_ids)
    assert torch.allclose(in_pieces.logprobs, at_once.logprobs, atol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 16])  # 16: queries wider than the hidden state, as in Qwen3
@pytest.mark.parametrize("name", ["fast"] + (["fast-compiled"] if DEVICE == "cuda" else []))
def test_qwen3_is_sampled_from_as_it_is(name, head_dim):
    policy = make_policy(seed=5, architecture="qwen3", head_dim=head_dim)
    greedy = engine(policy, name).generate(PROMPTS, 1, 12, GREEDY)
    for row, prompt in enumerate(PROMPTS):
        assert answers(greedy)[row] == greedy_by_hand(policy, prompt, 12)
    rollout = engine(policy, name).generate(PROMPTS, 3, 10, Sampling(temperature=0.7))
    assert_logprobs_are_the_models(policy, rollout, Sampling(temperature=0.7))


@pytest.mark.parametrize("name", ["fast", "hf-dynamic", "hf-static", "vllm"])
def test_a_prompt_longer_than_the_cache_is_refused_in_one_sentence(name, policy):
    with pytest.raises(ValueError, match=r"270 tokens exceed the model's 256 positions"):
        engine(policy, name).generate([[5] * 250], 1, 20, Sampling())


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match="Unknown engine 'graph'"):
        make_engine(None, "graph", torch.float32)
