"""Each setting by itself: what its type, range or form lets through, by the rule it declares and by a list."""

import math
from dataclasses import fields

import pytest

from rlcourse.config import TrainConfig, check_settings
from rlcourse.settings import field_type

FIELDS = {f.name: f for f in fields(TrainConfig)}
NUMBERS = [f for f in FIELDS.values() if field_type(f) in (int, float)]
NO_NUMBERS = [math.nan, math.inf, -math.inf, 1e30, -1e30, 10**400, "1", True, None, [1], 1j]

# The bounds again, by hand: the largest and smallest that work, and the nearest beyond them.
BOUNDS = {
    "lr": ([0, 1], [-1e-9, 1.001]),
    "value_lr": ([0, 1], [-1, 2]),
    "weight_decay": ([0, 1000], [-0.1, 1001]),
    "max_grad_norm": ([1e-9, 1e9], [0, -1, 2e9]),
    "warmup_steps": ([0, 10**9], [-5, 10**9 + 1]),
    "steps": ([1, 10**9], [0, -1]),
    "temperature": ([0.01, 100], [0, 0.001, -1, 101]),
    "top_k": ([0, 10**9], [-1]),
    "top_p": ([1e-9, 1], [0, -0.5, 1.01]),
    "clip_low": ([0, 1], [-1, 1.5]),
    "clip_high": ([0, 1000], [-1, 1001]),
    "sampler_correction_cap": ([0.1, 1e9], [0, -1]),
    "kl_coef": ([0, 1000], [-1]),
    "gamma": ([0, 1], [-0.1, 5]),
    "gae_lambda": ([0, 1], [-0.1, 1.1]),
    "value_coef": ([0, 1000], [-1]),
    "value_clip": ([0.1, 1e9], [0, -1]),
    "reward_correct": ([-1000, 1000], [-1001, 1001]),
    "reward_format": ([-1000, 1000], [-1001, 1001]),
    "reward_neither": ([-1000, 1000], [-1001, 1001]),
    "inner_epochs": ([1, 1000], [0, 1001]),
    "examples": ([0, 64], [-1, 65]),
    "eval_every": ([0, 10**9], [-1]),
    "eval_validation": ([1, 10**9], [0, -3]),
    "eval_problems": ([1, 10**9], [0]),
    "pass_k": ([0, 1024], [-1, 1025]),
    "pass_k_problems": ([1, 10**9], [0, -1]),
    "save_every": ([0, 10**9], [-1]),
    "keep_checkpoints": ([1, 10**9], [0]),
    "seed": ([0, 2**31 - 1], [-1, 2**31, 10**22]),
    "cache_gb": ([0, 1000], [-1]),
    "partial_rollout_tokens": ([0, 10**9], [-1, 2e9]),
    "lora_rank": ([0, 4096], [-1, 4097]),
    "lora_alpha": ([1e-9, 1e9], [0, -1]),
    "judge_weight": ([0, 1], [-0.1, 1.1]),
    "judge_seconds": ([0.1, 3600], [0, 3601]),
    "judge_input_price": ([0, 1000], [-1]),
    "judge_output_price": ([0, 1000], [-1]),
} | {
    name: ([1, 10**9], [0, -1])
    for name in [
        *["num_prompts", "num_generations", "max_prompt_tokens", "max_new_tokens"],
        *["minibatches", "micro_batch_tokens", "logprob_chunk"],
    ]
}


def refusal(**setting) -> str:
    """The sentence with which a setting is refused."""
    [name] = setting
    with pytest.raises(ValueError) as caught:
        check_settings(setting)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} must be ") and sentence.endswith(".")
    assert "\n" not in sentence and len(sentence) < 200
    return sentence


def test_every_number_declares_its_range_and_has_bounds_here():
    assert {f.name for f in NUMBERS} == {f.name for f in FIELDS.values() if f.metadata["within"]} == set(BOUNDS)


@pytest.mark.parametrize("f", NUMBERS, ids=lambda f: f.name)
def test_what_is_no_number_or_not_finite_is_refused(f):
    for value in NO_NUMBERS:
        refusal(**{f.name: value})
    if field_type(f) is int:
        refusal(**{f.name: 2.0})


@pytest.mark.parametrize("name", BOUNDS)
def test_a_range_holds_its_ends_and_nothing_beyond(name):
    good, bad = BOUNDS[name]
    kind = field_type(FIELDS[name])
    for value in good:
        found = check_settings({name: kind(value)})[name]
        assert found == value and type(found) is kind
    for value in bad:
        refusal(**{name: kind(value)})
    numbers = FIELDS[name].metadata["within"]
    assert good[-1] == numbers.high and (numbers.above or good[0] == numbers.low)


@pytest.mark.parametrize("name", ["model", "output", "data_dir", "name"])
@pytest.mark.parametrize("text", ["", "  ", "a\nb", "a\0b", "\x1b[31m", "\udcff", 7, 1.5, True, ["x"]])
def test_a_text_is_one_that_can_be_printed(name, text):
    refusal(**{name: text})


@pytest.mark.parametrize("name", ["../../x", "/x/y", "a/b", "..", ".", "a\\b", "x" * 201, "ü" * 101])
def test_the_name_of_a_run_stays_in_its_folder(name):
    assert "name must be that of a folder in --output" in refusal(name=name)


@pytest.mark.parametrize("name", ["x", "learning rate", "", 3])
def test_a_setting_that_does_not_exist_is_named(name):
    with pytest.raises(ValueError, match=r"^Unknown setting .*: `rlcourse train --help` lists them all"):
        check_settings({name: 1})


def test_a_very_long_value_is_cut_in_the_sentence():
    assert "(2003 characters)" in refusal(name="x" * 1999 + "\n") and "thousands of digits" in refusal(lr=10**5000)
