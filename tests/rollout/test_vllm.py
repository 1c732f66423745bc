"""The engine `vllm` beyond what all engines promise (`test_engines.py`): how it starts, sleeps, and takes weights over.
Here vLLM is the stand-in of `vllm_in_memory.py`, also where vLLM itself is installed; there test_engines.py runs vLLM.
"""

import json
import random

import numpy as np
import pytest
import torch
import vllm_in_memory
from policies import make_policy
from reference import answers, assert_logprobs_are_the_models, change
from safetensors.torch import load_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from rlcourse import lora
from rlcourse import train as trainer
from rlcourse.config import make_config
from rlcourse.lora import add_adapter, merged_parameters
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine, vllm
from rlcourse.sampling import GREEDY, Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36]]


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    vllm_in_memory.put_in(monkeypatch)


def engine(policy, dtype=torch.float32, **options):
    return make_engine(policy, "vllm", dtype, **options)


def llm() -> vllm_in_memory.LLM:
    [made] = vllm_in_memory.LLM.made
    return made


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=4), Sampling(1.5, top_p=0.6)])
def test_weights_come_before_every_rollout_and_old_keys_and_values_are_forgotten(policy, sampling):
    sampler = engine(policy)
    for _ in range(3):
        assert_logprobs_are_the_models(policy, sampler.generate(PROMPTS, 2, 6, sampling), sampling)
        change(policy)
    sampler.sleep()  # it was not made for it
    assert llm().heard == ["weights"] * 3 and not llm().options["enable_sleep_mode"]


def test_it_sleeps_and_wakes_with_the_policys_weights(policy):
    sampler = engine(policy, sleeps=True)
    sampler.sleep()
    sampler.sleep()  # it does already
    change(policy)
    assert_logprobs_are_the_models(policy, sampler.generate(PROMPTS, 2, 6, Sampling()), Sampling())
    sampler.generate(PROMPTS, 1, 1, GREEDY)
    assert llm().heard == ["sleep", "wake", "weights", "weights"] and llm().options["enable_sleep_mode"]


def test_a_second_one_beside_it_is_refused(policy):
    first = engine(policy)
    with pytest.raises(ValueError, match="A process has one engine vllm at most"):
        engine(policy)
    del first
    vllm.free_memory()
    assert engine(policy).generate(PROMPTS, 1, 1, GREEDY).completion_lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_is_merged_one_matrix_at_a_time(tied):
    policy = make_policy(tied=tied)
    names = [name for name, _ in policy.model.named_parameters()]
    add_adapter(policy.model, "base", 2, 8.0, "all-linear")
    change(policy)
    sampler = engine(policy)
    assert_logprobs_are_the_models(policy, sampler.generate(PROMPTS, 2, 6, Sampling()), Sampling())
    assert [name for name, _ in merged_parameters(policy.model)] == names
    kept = {parameter.data_ptr() for parameter in policy.model.parameters()}
    made = [name for name, weight in merged_parameters(policy.model) if weight.data_ptr() not in kept]
    assert len(made) == 2 * 7 and all("_proj.weight" in name for name in made)  # two layers; the rest is not copied
    assert not any(weight.requires_grad for _, weight in merged_parameters(policy.model))


def test_the_weights_of_a_sharded_model_are_gathered(policy, monkeypatch):
    """FSDP makes classes of its own; every rank gathers the same weights in the same order."""
    gathered = []
    monkeypatch.setattr(lora, "full_tensor", lambda weight: gathered.append(weight) or weight.clone())
    policy.model.__class__ = type("FSDPQwen2ForCausalLM", (type(policy.model),), {})
    assert_logprobs_are_the_models(policy, engine(policy).generate(PROMPTS, 2, 6, Sampling()), Sampling())
    assert llm().architecture == "Qwen2ForCausalLM"
    own = [weight.data_ptr() for weight in policy.model.parameters()]
    assert [weight.data_ptr() for weight in gathered] == own


def test_weights_have_the_names_of_a_saved_model(tmp_path, model_folder):
    """transformers keeps the experts of a mixture in one tensor, and saves them one by one, which vLLM expects."""
    config = Qwen2MoeConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    policy = make_policy()
    policy.model = Qwen2MoeForCausalLM(config)
    assert vllm.has_other_names(policy.model) and not vllm.has_other_names(make_policy().model)
    assert not vllm.has_other_names(load_policy(model_folder).model)
    sampler, given = engine(policy), []
    llm().collective_rpc = lambda method, kwargs: given.extend(kwargs["weights_iterator"])
    sampler._take_weights()
    policy.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: weight.shape for name, weight in given} == {name: weight.shape for name, weight in saved.items()}
    assert all(torch.equal(weight, saved[name]) for name, weight in given)


def test_torchs_generator_alone_decides_what_is_sampled_and_the_others_stay_as_they_are(policy):
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    sampler = engine(policy)
    assert torch.equal(torch.get_rng_state(), states[2])
    sampler.generate(PROMPTS, 2, 3, Sampling())
    assert random.getstate() == states[0] and (np.random.get_state()[1] == states[1]).all()
    drawn = []
    for numpy_seed, seed in ((1, 7), (2, 7), (2, 8)):
        np.random.seed(numpy_seed)
        torch.manual_seed(seed)
        drawn += [answers(sampler.generate(PROMPTS, 4, 8, Sampling())) for _ in range(2)]
    assert drawn[0] == drawn[2] and drawn[1] == drawn[3]  # by torch's seed alone
    assert drawn[0] != drawn[1] and drawn[2] != drawn[4]  # from call to call, from seed to seed


def test_an_answer_ends_at_the_policys_ids_alone(policy):
    """Not at that of the model's config; an answer of nothing but its end has one token."""
    own = policy.model.config.eos_token_id
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[own] *= 30  # tied: it is drawn often
    policy.eos_ids = [t for t in range(300) if t != own and t % 3]
    rollout = engine(policy).generate(PROMPTS, 32, 5, Sampling())
    assert any(own in answer[:-1] for answer in answers(rollout))
    for answer, finished in zip(answers(rollout), rollout.finished.tolist(), strict=True):
        assert finished == (answer[-1] in policy.eos_ids) and (finished or len(answer) == 5)
    assert 1 in rollout.completion_lengths and 5 in rollout.completion_lengths


def test_what_vllm_is_told(policy, monkeypatch):
    engine(policy, cache_gb=0.25)
    options = llm().options
    assert options["dtype"] == "float32" and options["logprobs_mode"] == "processed_logprobs"
    assert options["generation_config"] == "vllm" and options["distributed_executor_backend"] is None
    assert options["max_num_seqs"] == vllm.MAX_ROWS and not options["use_tqdm_on_load"]
    assert options["gpu_memory_utilization"] < 0.05  # beside a trainer not much is free
    vllm_in_memory.LLM.made.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    engine(policy, torch.bfloat16)
    assert llm().options["distributed_executor_backend"] == "external_launcher" and llm().options["dtype"] == "bfloat16"


def test_what_it_cannot_sample_is_refused_in_one_sentence(policy):
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, numbers, bytes
    sampler = engine(policy, cache_gb=32 * token / 1e9)
    assert sampler.generate(PROMPTS, 1, 25, GREEDY).completion_lengths.max() <= 25
    with pytest.raises(ValueError, match=r"of 33 tokens do not fit vLLM's cache, which holds 32: raise --cache-gb\.$"):
        sampler.generate(PROMPTS, 1, 26, GREEDY)
    del sampler
    vllm.free_memory()
    with pytest.raises(ValueError, match=r"of 0\.01 to 2, not 2\.5: use another --engine"):
        engine(policy).generate(PROMPTS, 1, 2, Sampling(2.5))
    with pytest.raises(RuntimeError, match="one log-prob for each token"):
        vllm.rollout_of(policy, [[5]], [[7, 8]], [[-1.0]])


def test_a_run_trains_with_it(tmp_path, capsys, monkeypatch):
    """The embedded model; sampler and trainer then differ by float32's rounding, so that no step samples from weights
    of another."""
    settings = {"output": str(tmp_path), "name": "run", "steps": 3, "lr": 1e-2, "warmup_steps": 0}
    settings |= {"lora_rank": 2}
    sizes = {"num_prompts": 2, "num_generations": 4, "max_new_tokens": 6, "eval_problems": 2, "eval_validation": 2}
    config = make_config(engine="vllm", sleep=True, pass_k=0, eval_every=2, temperature=0.7, **settings, **sizes)
    monkeypatch.setattr("rlcourse.batch.rows_that_train", lambda batch, config: torch.ones_like(batch.rollout.finished))
    monkeypatch.setattr("rlcourse.advantages.completion_advantages", lambda rewards, *_: torch.randn_like(rewards))
    trainer.train(config)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3 and all(m["mismatch_max"] < 1e-4 and m["grad_norm"] > 0 for m in steps)
    assert llm().heard.count("sleep") == 3 and llm().heard[-1] == "weights"
    assert "Engine and trainer round differently on" in capsys.readouterr().out
