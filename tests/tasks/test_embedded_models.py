"""The models that ship: size, format, a start from which there is something to learn, and the recipe that makes one."""

import pytest
import torch
from policies import DEVICE
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from rlcourse.evaluation import answer_problems, summarize
from rlcourse.paths import data_folder
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task, mean_metrics
from tools.embedded import minigsm

FOLDER = data_folder() / "minigsm" / "model"


def test_its_folder_is_at_most_8_megabytes():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 8e6


def test_transformers_loads_it_as_a_qwen2_with_its_tokenizer():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    assert type(model) is Qwen2ForCausalLM and sum(p.numel() for p in model.parameters()) < 1e6
    turn = [{"role": "user", "content": "Tom has 3 apples."}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nTom has 3 apples.<|im_end|>\n<|im_start|>assistant\n"
    assert max(tokenizer(prompt)["input_ids"]) < model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id in model.generation_config.eos_token_id


@pytest.mark.thorough
def test_it_starts_between_25_and_55_percent_on_a_thousand_problems():
    policy, task = load_policy("embedded", DEVICE), load_task("minigsm")
    engine = make_engine(policy, "fast", torch.float32)
    answers = answer_problems(policy, engine, task, task.problems("test"), max_new_tokens=80)
    assert len(answers) == 1000 and 0.25 <= summarize(answers)["accuracy"] <= 0.55


def test_the_kernel_model_writes_eager_programs_and_sometimes_faster_ones_when_it_is_sampled():
    policy, task = load_policy("embedded-kernels"), load_task("kernels")
    engine = make_engine(policy, "fast", torch.float32)
    problems = task.test[:60] + task.test[200:230]
    means = mean_metrics([a for (a,) in answer_problems(policy, engine, task, problems, 64)])
    assert means["correct"] >= 0.95 and means["long_correct"] >= 0.9
    assert means["fast_1"] <= 0.02 and means["fast_1.5"] == 0
    answers = answer_problems(policy, engine, task, task.test[:60], 64, Sampling(), 4)
    means = mean_metrics([a for group in answers for a in group])
    assert 0.05 < means["fast_1"] < 0.4 and means["optimal"] < 0.05
    assert means["correct"] > 0.85


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_the_minigsm_model_is_written_in_bfloat16_and_loads(tmp_path, monkeypatch):
    texts = minigsm.minigsm_texts
    monkeypatch.setattr(minigsm, "minigsm_texts", lambda: texts(200))
    recipe = minigsm.Recipe(worked_steps=1, uneven_steps=1, rows=8, vocab_size=300, size=SMALL)
    minigsm.sft(recipe, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    policy = load_policy(str(tmp_path / "model"))
    assert policy.tokenizer.get_vocab() == minigsm.new_policy(recipe).tokenizer.get_vocab()
    assert policy.eos_ids == [policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id]
