"""The config: each setting, presets and algorithms that work, what wins over what, and what is refused."""

import math
from dataclasses import fields, replace

import pytest

from rlcourse.config import ALGORITHMS, PRESETS, TrainConfig, make_config
from rlcourse.settings import field_type

FIELDS = {f.name: f for f in fields(TrainConfig)}
NUMBERS = [f for f in FIELDS.values() if field_type(f) in (int, float)]
NO_NUMBERS = [math.nan, math.inf, -math.inf, 1e30, -1e30, 10**400, "1", True, None, [1], 1j]
# Some bounds again, by hand: the largest and smallest that work, and the nearest beyond them.
BOUNDS = {
    "kl_coef": ([0, 1000], [-1e-9, 1001]),
    "temperature": ([0.01, 100], [0, 0.001, -1, 101]),
    "top_p": ([1e-9, 1], [0, -0.5, 1.01]),
    "clip_low": ([0, 1], [-0.1, 5]),
    "reward_format": ([-1000, 1000], [-1001, 1001]),
    "eval_validation": ([1, 10**9], [0, -3]),
    "pass_k": ([0, 1024], [-1, 1025]),
    "seed": ([0, 2**31 - 1], [-1, 2**31, 10**22]),
}


def refusal(**setting) -> str:
    """The sentence with which a setting is refused."""
    [name] = setting
    with pytest.raises(ValueError) as caught:
        TrainConfig.check_settings(setting)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} must be ") and sentence.endswith(".")
    assert "\n" not in sentence and len(sentence) < 200
    return sentence


@pytest.mark.parametrize("f", NUMBERS, ids=lambda f: f.name)
def test_a_number_has_a_range_and_is_one(f):
    assert f.metadata["within"]
    for value in NO_NUMBERS:
        if value is not None or f.default is not None:
            refusal(**{f.name: value})
    if field_type(f) is int:
        refusal(**{f.name: 2.0})


@pytest.mark.parametrize("name", BOUNDS)
def test_a_range_holds_its_ends_and_nothing_beyond(name):
    good, bad = BOUNDS[name]
    kind = field_type(FIELDS[name])
    for value in good:
        found = TrainConfig.check_settings({name: kind(value)})[name]
        assert found == value and type(found) is kind
    for value in bad:
        assert f"must be {FIELDS[name].metadata['within']}, not " in refusal(**{name: kind(value)})


@pytest.mark.parametrize("text", ["", "  ", "a\nb", "a\0b", "\x1b[31m", "\udcff", 7, True, ["x"]])
def test_a_text_is_one_that_can_be_printed(text):
    for name in ("model", "name"):
        refusal(**{name: text})


@pytest.mark.parametrize("name", ["../../x", "/x/y", "a/b", "..", ".", "a\\b", "x" * 201, "ü" * 101])
def test_the_name_of_a_run_stays_in_its_folder(name):
    assert "name must be that of a folder in --output" in refusal(name=name)
    for fine in ("my run", ".hidden", "ü", "x" * 200, "a..b"):
        assert TrainConfig.check_settings({"name": fine}) == {"name": fine}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_preset_works_with_every_algorithm(preset, algorithm):
    config = make_config(preset, algorithm=algorithm)
    for name, value in (PRESETS[preset] | {"algorithm": algorithm} | ALGORITHMS[algorithm]).items():
        assert getattr(config, name) == value
    assert config.preset == preset and config.algorithm == algorithm


def test_what_is_set_by_hand_wins_over_the_algorithm_which_wins_over_the_preset(monkeypatch):
    monkeypatch.setitem(PRESETS, "a10g", {"clip_high": 0.9, "lr": 0.5, "algorithm": "dapo"})
    assert (make_config("a10g").clip_high, make_config("a10g").lr) == (0.28, 0.5)
    assert make_config("a10g", clip_high=0.7).clip_high == 0.7
    assert make_config("a10g", algorithm="grpo").clip_high == 0.9
    assert make_config("a10g").dynamic_sampling and not make_config("a10g", algorithm="grpo").dynamic_sampling


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"preset": "b200"}, r"preset must be one of laptop, a10g, .*, not 'b200'"),
        ({"learning_rate": 1.0}, r"Unknown setting 'learning_rate': `rlcourse train --help` lists them all\."),
        ({"num_generations": 1}, r"advantage 'group_centered' compares completions of a prompt: num_gen"),
        ({"num_generations": 1, "algorithm": "rloo"}, r"advantage 'leave_one_out' compares completions of"),
        ({"algorithm": "rloo", "inner_epochs": 2}, r"surrogate 'reinforce' has no importance ratio: use inner_"),
        ({"num_prompts": 2, "num_generations": 4, "minibatches": 9}, r"minibatches \(9\) must not exceed .* \(8\)\."),
        ({"dtype": "bfloat16", "device": "cpu"}, r"dtype bfloat16 is for a GPU: use --dtype float32 on a CPU\."),
        ({"cache_gb": 1, "device": "cpu"}, r"A paged cache is for the engines fast and vllm on a GPU"),
        ({"judge": "http://host/v1"}, r"A judge needs a model and an address: --judge MODEL@http:"),
        ({"judge": "m@http://me:secret@host/v1"}, r"judge has no user, password or query: the key"),
        ({"engine": "fastest"}, r"Unknown engine 'fastest': use hf-dynamic, hf-static, fast, vllm or vllm@http://HOST"),
        ({"engine": "fast@http://host"}, r"Unknown engine 'fast@http://host': use hf-dynamic"),
        ({"engine": "vllm@http://host", "sleep": True}, r"A vLLM server has its own cache: leave out --cache-gb and"),
        ({"engine": "vllm", "device": "cpu"}, r"The engine vllm needs an NVIDIA GPU: use --engine fast or hf-dynamic"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}") as caught:
        make_config(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("f", [f for f in fields(TrainConfig) if f.metadata["choices"]], ids=lambda f: f.name)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(f):
    with pytest.raises(ValueError, match=f"{f.name} must be one of {', '.join(f.metadata['choices'])}, not 'else'"):
        replace(TrainConfig(), **{f.name: "else"}).check()
    assert TrainConfig.__dataclass_fields__[f.name].default in f.metadata["choices"]


def test_a_whole_number_is_a_float_too():
    config = make_config(lr=1, kl_coef=0)
    assert type(config.lr) is float and type(config.kl_coef) is float


def test_the_presets_and_algorithms_are_those_of_the_papers():
    """The numbers that their authors give: clip-higher of DAPO, the clip of GSPO, the cap of CISPO. What a loss is made
    of is compared with the papers in test_step.py."""
    clips = {name: (make_config(algorithm=name).clip_low, make_config(algorithm=name).clip_high) for name in ALGORITHMS}
    assert clips["ppo"] == clips["grpo"] == clips["dr_grpo"] == (0.2, 0.2)
    assert (clips["dapo"], clips["gspo"], clips["cispo"][1]) == ((0.2, 0.28), (3e-4, 4e-4), 4.0)
    several = {name for name in ALGORITHMS if make_config(algorithm=name).minibatches > 1}
    assert several == {"ppo", "gspo", "cispo"}  # what they do with the ratio has no effect in one update
    special = {name for name in ALGORITHMS if make_config(algorithm=name).mask_truncated}
    assert special == {name for name in ALGORITHMS if make_config(algorithm=name).dynamic_sampling} == {"dapo"}
