"""All engines sample from the model's own distribution, keep the log-probs they sampled with, and mask alike. vLLM is
tried where it is installed and has a GPU; elsewhere our engine drives a stand-in for it."""

from itertools import pairwise

import pytest
import torch
import vllm_in_memory
from policies import DEVICE, make_policy
from reference import answers, assert_logprobs_are_the_models, change

from rlcourse.rollout import make_engine, torch_engine, vllm
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


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_are_those_of_the_model_without_cache_or_padding(name, tied):
    policy = make_policy(seed=3, tied=tied, **SIZES.get(name, {}))
    rollout = engine(policy, name).generate(PROMPTS, 2, 10, GREEDY)
    for row, answer in enumerate(answers(rollout)):  # group by group
        assert rollout.ids[row, : rollout.prompt_lengths[row]].tolist() == PROMPTS[row // 2]
        assert answer == greedy_by_hand(policy, PROMPTS[row // 2], 10)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(top_k=5), Sampling(1.5, top_p=0.8)])
def test_sampling_logprobs_equal_recomputed_ones(policy, name, sampling):
    torch.manual_seed(1)
    rollout = engine(policy, name).generate(PROMPTS, 3, 10, sampling)
    assert_logprobs_are_the_models(policy, rollout, sampling, APART.get(name, 1e-4))


@pytest.mark.parametrize("name", ENGINES)
def test_frequencies_of_the_first_token_match_the_softmax(policy, name):
    """And not the defaults of transformers or of the model: Qwen2.5-Instruct ships top-k 20 and top-p 0.8."""
    torch.manual_seed(0)
    draws, sampling = 2000, Sampling(temperature=2.0)
    rollout = engine(policy, name).generate([PROMPTS[2]], draws, 1, sampling)
    with torch.no_grad():
        logits = policy.model(torch.tensor([PROMPTS[2]], device=DEVICE)).logits[0, -1].double()
    expected = (logits / sampling.temperature).softmax(-1) * draws
    observed = torch.bincount(rollout.completion_ids[:, 0], minlength=len(expected)).double()
    common = expected >= 5  # the usual rule for a chi-square test; the rest is one more cell
    observed, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (observed, expected))
    chi_square, freedom = ((observed - expected) ** 2 / expected).sum().item(), int(common.sum())
    assert freedom > 50 and chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


@pytest.mark.parametrize("name", ENGINES)
def test_rows_end_with_their_first_eos_and_are_masked_after_it(policy, name):
    torch.manual_seed(0)
    policy.eos_ids = list(range(0, 300, 6))  # so many that rows end at different steps, some at once
    policy.model.generation_config.eos_token_id = policy.eos_ids
    rollout = engine(policy, name).generate(PROMPTS, 16, 14, Sampling())
    assert rollout.completion_lengths.min() == 1
    assert len(rollout.completion_lengths.unique()) > 5
    of_rows = zip(rollout.completion_ids, rollout.logprobs, rollout.finished, strict=True)
    for row, (ids, logprobs, finished) in enumerate(of_rows):
        length = int(rollout.completion_lengths[row])
        assert (rollout.ids[row, len(PROMPTS[row // 16]) + length :] == policy.pad_id).all()
        assert not any(int(i) in policy.eos_ids for i in ids[: length - 1])
        assert bool(finished) == (int(ids[length - 1]) in policy.eos_ids)
        assert finished or length == 14
        assert (logprobs[length:] == 0).all()
    # Rows that stay while others leave keep their own cache.
    assert_logprobs_are_the_models(policy, rollout, Sampling(), APART.get(name, 1e-4))


@pytest.mark.parametrize("name", ENGINES)
def test_one_engine_answers_batch_after_batch(policy, name):
    """On a GPU a shape's first batch runs eagerly, the second is captured, the third replayed: with prompts of its own,
    and after a change of the weights."""
    used = engine(policy, name)
    for batch in range(4 if DEVICE == "cuda" else 2):
        prompts = [[(7 * batch + 3 * i + j) % 200 + 5 for j in range(3 + (batch + i) % 4)] for i in range(3)]
        found = used.generate(prompts, 2, 8, GREEDY)
        for row in range(6):
            expected = greedy_by_hand(policy, prompts[row // 2], 8)
            assert answers(found)[row] == expected
        change(policy)
    used.sleep()
    assert answers(used.generate(PROMPTS[:1], 1, 8, GREEDY)) == [greedy_by_hand(policy, PROMPTS[0], 8)]
    with pytest.raises(ValueError, match=r"270 tokens exceed the model's 256 positions"):
        used.generate([[5] * 250], 1, 20, Sampling())


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


@pytest.mark.parametrize("tokens", [1, 14, 15])
def test_prompts_prefilled_a_few_at_a_time_are_those_prefilled_at_once(policy, tokens, monkeypatch):
    at_once = engine(policy, "fast").generate(PROMPTS, 2, 10, GREEDY)
    monkeypatch.setattr(torch_engine, "PREFILL_TOKENS", tokens)  # four prompts, padded to seven tokens each
    in_pieces = engine(policy, "fast").generate(PROMPTS, 2, 10, GREEDY)
    assert torch.equal(in_pieces.completion_ids, at_once.completion_ids)
    assert torch.allclose(in_pieces.logprobs, at_once.logprobs, atol=1e-5)
