"""The models that ship: size, format, and a start from which there is something to learn."""

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

FOLDER = data_folder() / "minigsm" / "model"


@pytest.fixture(scope="module")
def answers():
    """Greedy answers to all test problems."""
    policy, task = load_policy("embedded", DEVICE), load_task("minigsm")
    engine = make_engine(policy, "fast", torch.float32)
    return [a for (a,) in answer_problems(policy, engine, task, task.problems("test"), max_new_tokens=80)]


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
def test_it_starts_between_25_and_55_percent_on_a_thousand_problems(answers):
    assert len(answers) == 1000
    assert 0.25 <= summarize([answers])["accuracy"] <= 0.55


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
