"""What lies behind the lessons' figures: records with several seeds and a command, made by the package's own step."""

import json

import pytest
import torch

from rlcourse.config import ALGORITHMS, make_config
from rlcourse.course.lessons import (
    gain,
    lesson00,
    lesson01,
    lesson02,
    lesson03,
    lesson04,
    lesson05,
    lesson13,
    lesson14,
    lesson15,
)
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.records import KEYS
from rlcourse.paths import data_folder
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task

CURVES = sorted((data_folder() / "curves").glob("*/*.json"))
RECORDS = [path for path in CURVES if path.stem.startswith("lesson") or path.stem in ALGORITHMS]
SMALL = {"num_prompts": 2, "num_generations": 4, "max_new_tokens": 12, "steps": 1}


@pytest.fixture
def few_problems(monkeypatch):
    """Evaluations that a test can wait for."""
    monkeypatch.setattr(lesson02, "EVAL_PROBLEMS", 2)
    monkeypatch.setattr(lesson03, "VALIDATION", 2)
    monkeypatch.setattr(lesson04, "PROBES", 2)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_curve_that_ships_has_three_seeds_and_its_command(path):
    record = load_curve(path.stem)
    assert record == json.loads(path.read_text()) and record.keys() == set(KEYS)
    seeds = [row["variant"] for row in record["results"]]
    assert len(seeds) >= 3 and len(set(seeds)) == len(seeds) and all(seed.startswith("seed ") for seed in seeds)
    module, *names = record["command"].removeprefix("python -m rlcourse.course.lessons.").split()
    assert record["name"] == path.stem == "_".join(names if module == "curves" else [module, *names])


def test_every_variant_of_a_lesson_has_been_recorded_with_its_settings():
    of_lesson04 = [f"{kind}_{variant}" for kind in lesson04.SETTINGS for variant in lesson04.VARIANTS[kind]]
    for lesson, names in {
        "lesson00": ["gain"],
        "lesson01": lesson01.VARIANTS,
        "lesson02": lesson02.VARIANTS,
        "lesson03": [*lesson03.SHAPES, "dynamic", *lesson03.BONUS],
        "lesson04": of_lesson04,
        "lesson05": lesson05.RUNS,
        "lesson13": lesson13.RUNS,
        "lesson14": lesson14.RUNS,
        "lesson15": lesson15.RUNS,
    }.items():
        names = {f"{lesson}_{name}" for name in names}
        assert names == {path.stem for path in RECORDS if path.stem.startswith(lesson)}
    common = {lesson13: lesson13.BASE | lesson13.SFT | lesson13.RL, lesson15: lesson15.COMMON}
    for lesson, settings in common.items():
        for name, own in lesson.RUNS.items():
            record = load_curve(f"{lesson.__name__.rpartition('.')[2]}_{name}")
            assert record["setup"] == settings | own


@pytest.mark.thorough
def test_a_run_leaves_what_its_record_holds(few_problems):
    for name, found in {
        "lesson02_all": lesson02.run("all", 0, **SMALL),
        "lesson03_16x8": lesson03.training_run("16x8", 0, **SMALL),
        "lesson04_isolated_grpo": lesson04.isolated_run("grpo", 0, **SMALL),
    }.items():
        recorded = load_curve(name)["results"][0]
        assert found["evals"][0].keys() <= recorded["evals"][0].keys()
        assert found["steps"].keys() <= recorded.get("steps", {"grad_norm": []}).keys()
        assert all(len(values) == 1 for values in found["steps"].values())


def test_the_gain_is_recorded_at_its_steps_with_the_samples_that_its_setup_says(monkeypatch):
    monkeypatch.setattr(lesson00, "SAMPLES", 1)
    monkeypatch.setattr(lesson00, "SAMPLES_AT_START", 2)
    monkeypatch.setattr(lesson00, "PROBLEMS", 8)
    found = lesson00.run(0, at=(0, 1), **SMALL)["evals"]
    assert [e["step"] for e in found] == [0, 1]
    assert [sum(c[kind] for c in e["counts"].values() for kind in gain.KINDS) for e in found] == [16, 8]


def test_the_record_of_the_gain_is_whole():
    record = load_curve("lesson00_gain")
    assert lesson00.is_this_setup(record["setup"])
    assert not lesson00.is_this_setup(record["setup"] | {"lr": 1.0})
    assert [e["step"] for e in record["results"][0]["evals"]] == [*lesson00.STEPS]
    for row in record["results"]:
        for e, samples in zip(row["evals"], [lesson00.SAMPLES_AT_START, *[lesson00.SAMPLES] * 9], strict=True):
            answers = sum(c[kind] for c in e["counts"].values() for kind in gain.KINDS)
            assert answers == lesson00.PROBLEMS * samples


def test_what_the_readme_says_of_the_gain():
    """Choice comes first and brings most, about half; the rest is less garbage and better numbers."""
    record = load_curve("lesson00_gain")
    found = gain.summary(record)
    whole = found["accuracy"]["points"]
    assert 0.4 * whole < found["choice"]["points"] < 0.6 * whole
    assert found["clean"]["points"] + found["arithmetic"]["points"] > 0.4 * whole
    assert found["choice"]["points"] > max(found["clean"]["points"], found["arithmetic"]["points"])
    assert sum(found[name]["points"] for name in (*gain.FACTORS, "luck")) == pytest.approx(whole)
    for seed in record["results"]:
        start, *_, end = evals = [e["counts"] for e in seed["evals"]]
        half = evals[lesson00.STEPS.index(20)]
        done = {n: (gain.factors(half)[n] - gain.factors(start)[n]) for n in gain.FACTORS}
        all_of_it = {n: (gain.factors(end)[n] - gain.factors(start)[n]) for n in gain.FACTORS}
        assert done["choice"] > 0.8 * all_of_it["choice"] and done["clean"] < 0.7 * all_of_it["clean"]


def test_forced_answers_begin_as_told_and_the_opening_is_not_trained():
    policy, problems = load_policy("embedded"), load_task("minigsm").problems("train")[:3]
    asked = []

    class Engine:
        def generate(self, prompts, num_generations, max_new_tokens, sampling):
            asked.extend(prompts)
            return num_generations

    engine = lesson04.ForcedOpenings(policy, Engine(), problems)
    prompts = [policy.prompt(problem.question) for problem in problems[1:]]
    assert engine.generate(prompts, 8, 96, None) == 4
    texts = [policy.tokenizer.decode(ids[len(prompts[i // 2]) :]) for i, ids in enumerate(asked)]
    working = [problem.answer.split("\n")[0] + "\n" for problem in problems[1:]]
    assert texts == ["Let me think.\n", working[0], "Let me think.\n", working[1]]


def test_fate_is_decided_by_the_opening_alone():
    config, answers = make_config(num_generations=4), [None] * 8
    worked = torch.tensor([0.0, 0.0, 1.0, 1.0] * 2)
    assert torch.equal(torch.tensor(lesson04.fated_rewards("worked earns 1")(answers, config)), worked)
    assert torch.equal(torch.tensor(lesson04.fated_rewards("filler earns 1")(answers, config)), 1 - worked)
    coins = [lesson04.fated_rewards("a coin")(answers, config) for _ in range(9)]
    assert {sum(coin) for coin in coins} == {4.0} and len({*map(tuple, coins)}) > 1
