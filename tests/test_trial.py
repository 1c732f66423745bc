"""Models that compute more than ours do: training has the numbers of the model itself, or a sentence refuses it."""

import json
import shutil

import pytest
import torch
from policies import make_policy
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from rlcourse.head import trunk_of
from rlcourse.logprobs import hidden_states, token_logprobs
from rlcourse.paths import model_folder
from rlcourse.policy import Policy, compile_layers, layers_of, load_policy, positions_of
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import Sampling
from rlcourse.sft.data import Example
from rlcourse.sft.packing import pack, summed_loss
from rlcourse.trial import checkpoint_activations, try_model

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.02,
}  # fmt: skip
MORE = {  # a head that does more than a product
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "cohere": {"logit_scale": 0.0625},
    "gemma2": {"final_logit_softcapping": 30.0},
    "phi": {},  # a bias of zero that would learn
    "nanochat": {},
    "modernbert-decoder": {"global_attn_every_n_layers": 1},  # calls its head `decoder`
}
DROPOUT = {
    "llama": {"attention_dropout": 0.1},
    "gpt2": {},
    "opt": {"dropout": 0.3, "layerdrop": 0.5},
    "mixtral": {"router_jitter_noise": 0.2, "num_local_experts": 2},
}


def tiny(architecture: str, **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    known = AutoConfig.for_model(architecture)
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    tokens = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes | tokens | changes))


def loaded(model: PreTrainedModel, folder) -> Policy:
    model.save_pretrained(folder)
    make_policy().tokenizer.save_pretrained(folder)
    return load_policy(str(folder))


@pytest.mark.parametrize("architecture", MORE)
def test_sampler_trainer_and_fine_tuning_have_the_models_own_logits(architecture, tmp_path, capfd):
    policy = loaded(tiny(architecture, **MORE[architecture]), tmp_path)
    assert "are more than hidden states times output embeddings" in capfd.readouterr().err
    torch.manual_seed(0)
    rollout = HFEngine(policy).generate([[7, 8, 9], [5]], 2, 9, Sampling())
    logprobs, hidden = token_logprobs(policy.model, rollout, Sampling(), 4)
    torch.testing.assert_close(logprobs, rollout.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden, hidden_states(policy.model, rollout))
    ids = torch.arange(10, 22)
    rows = pack([[Example(ids.int(), torch.ones(12, dtype=torch.bool))]], 0, policy.device)
    own = policy.model(ids[None], labels=ids[None]).loss * 11
    torch.testing.assert_close(summed_loss(policy.model, rows, 4), own)
    own.backward()
    expected = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    summed_loss(policy.model, rows, 4).backward()
    torch.testing.assert_close([p.grad for p in policy.model.parameters()], expected)


@pytest.mark.parametrize("architecture", DROPOUT)
def test_nothing_is_dropped_in_training(architecture, tmp_path, capfd):
    policy = loaded(tiny(architecture, **DROPOUT[architecture]), tmp_path / "model")
    assert "embeddings" not in capfd.readouterr().err
    rollout = HFEngine(policy).generate([[7, 8, 9], [5]], 2, 9, Sampling())
    checkpoint_activations(policy.model)
    for _ in range(2):
        found, _ = token_logprobs(policy.model, rollout, Sampling(), 4)
        torch.testing.assert_close(found, rollout.logprobs, rtol=0, atol=1e-5)
    policy.model.save_pretrained(tmp_path / "again")
    assert all(
        getattr(load_policy(str(tmp_path / "model")).model.config, n) == v for n, v in DROPOUT[architecture].items()
    )


class Noisy(GPT2LMHeadModel):
    """Adds noise in training mode, under a name that nobody knows."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **inputs):
        output = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **inputs)
        if self.training:
            output.logits = output.logits + torch.randn_like(output.logits)
        return output


class Drunk(GPT2LMHeadModel):
    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits + torch.randn_like(output.logits)
        return output


def test_noise_under_an_unknown_name_is_refused_where_it_would_come():
    model = Noisy(tiny("gpt2", tie_word_embeddings=False).config).eval()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(300))  # training takes the logits of `forward`
    try_model(model, [5, 6, 7, 8], 0)
    with pytest.raises(ValueError, match=r"^A model of the type gpt2 computes something else with gradient checkpoin"):
        checkpoint_activations(model)
    with pytest.raises(ValueError, match=r"^the type gpt2 gives a token a different probability when padding follows"):
        try_model(Drunk(model.config).eval(), [5, 6, 7, 8], 0)


def test_a_model_that_looks_ahead_is_refused_in_one_sentence(tmp_path):
    model = tiny("bert", initializer_range=0.3)
    with pytest.raises(ValueError, match=r"^The model in .* cannot be used \(the type bert gives a token a different"):
        loaded(model, tmp_path)


def test_rows_stay_so_short_that_none_changes_the_frequencies_of_another(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    rope |= {"original_max_position_embeddings": 20}
    policy = loaded(tiny("phi3", rope_parameters=rope, original_max_position_embeddings=20), tmp_path)
    assert policy.model.config.max_position_embeddings == 64 and positions_of(policy.model) == 20
    engine = HFEngine(policy)
    torch.manual_seed(0)
    rollout = engine.generate([list(range(5, 18)), [5]], 2, 7, Sampling())
    found, _ = token_logprobs(policy.model, rollout, Sampling(), 4)
    torch.testing.assert_close(found, rollout.logprobs, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="21 tokens exceed the model's 20 positions"):
        engine.generate([list(range(5, 18)), [5]], 2, 8, Sampling())


def test_a_model_without_gradient_checkpointing_is_refused_where_it_is_asked_for(tmp_path):
    policy = loaded(tiny("openai-gpt"), tmp_path)
    with pytest.raises(ValueError, match=r"has no gradient checkpointing: use --no-gradient-checkpointing\.$"):
        checkpoint_activations(policy.model)


@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "mixtral"])
def test_layers_are_compiled_whatever_they_are_called(architecture):
    model = tiny(architecture, **{"n_layer": 3, "n_embd": 32} if architecture != "mixtral" else {})
    compile_layers(model)
    assert all(layer._compiled_call_impl is not None for layer in layers_of(model))
    assert len(layers_of(model)) == model.config.num_hidden_layers
    del trunk_of(model)._modules["layers" if architecture == "mixtral" else "h"]
    with pytest.raises(ValueError, match=r"has no list of \d layers: leave out --compile and --shard\.$"):
        compile_layers(model)


# Tokenizers


def digits_in_threes(folder) -> None:
    """A tokenizer.json beside a Qwen2 model in which "120" is one token, as Qwen2's own splitting cannot have it."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = split["Regex"].replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for token in sorted(vocab, key=vocab.get)[-2:]:
        merges[:] = [merge for merge in merges if "".join(merge) != token]
    last = sorted(vocab, key=vocab.get)[-2:]
    for old, new, merge in zip(last, ("12", "120"), (["1", "2"], ["12", "0"]), strict=True):
        vocab[new] = vocab.pop(old)
        merges.append(merge)
    file.write_text(json.dumps(content))


@pytest.fixture
def threes(tmp_path):
    folder = shutil.copytree(model_folder("embedded"), tmp_path / "model")
    digits_in_threes(folder)
    return folder


def test_a_tokenizer_reads_as_its_file_says_and_is_saved_so(threes, tmp_path):
    expected = Tokenizer.from_file(str(threes / "tokenizer.json")).encode("120 apples").ids
    for place in (threes, tmp_path / "again"):
        policy = load_policy(str(place))
        assert policy.tokenizer("120 apples")["input_ids"] == expected
        assert policy.tokenizer.tokenize("120") == ["120"]
        assert policy.tokenizer.decode(policy.prompt("120?")).startswith("<|im_start|>user\n120?<|im_end|>")
        policy.model.save_pretrained(tmp_path / "again")
        policy.tokenizer.save_pretrained(tmp_path / "again")


def test_a_tokenizer_that_cannot_be_read_as_its_file_says_is_refused(threes, monkeypatch):
    monkeypatch.setattr("rlcourse.model_files.reads_like", lambda tokenizer, plain: False)
    with pytest.raises(ValueError, match=r"reads text in another way than its tokenizer\.json: correct tokenizer_conf"):
        load_policy(str(threes))
