"""The runs of lesson 13: a base that earns nothing, SFT, then RL, with all weights or an adapter."""

import random

import pytest
import torch

from rlcourse.course.lessons import lesson13
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task
from rlcourse.tasks.minigsm import generate


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded")


@pytest.fixture
def tiny(monkeypatch):
    """Runs that a test can wait for."""
    for name, value in {"ASKED": 2, "SAMPLED": 2, "SAMPLES": 2, "HELD_OUT": 4, "LIMIT": 8}.items():
        monkeypatch.setattr(lesson13, name, value)
    small = {"num_prompts": 2, "num_generations": 2, "steps": 1, "max_new_tokens": 8}
    monkeypatch.setattr(lesson13, "RL", lesson13.RL | small)
    monkeypatch.setattr(lesson13, "SFT", lesson13.SFT | {"sft_rows": 2})


def test_no_answer_that_the_base_learns_can_be_read_and_every_demonstration_is_right():
    task, rng = load_task("minigsm"), random.Random(0)
    for problem in generate(200, 0, "sft"):
        gold = problem.to_problem().gold
        assert not task.verify(lesson13.in_words(problem, rng), gold).strict
        assert task.verify(lesson13.worked(problem, rng), gold).strict


def test_an_example_learns_its_answer_and_its_end(policy):
    for example in lesson13.examples(policy, 8, 0, lesson13.worked):
        prompt, answer = example.ids[~example.learned], example.ids[example.learned]
        assert answer[-1] in policy.eos_ids and "####" in policy.tokenizer.decode(answer)
        assert policy.tokenizer.decode(prompt).rstrip().endswith("assistant")
        assert torch.equal(torch.cat([prompt, answer]), example.ids)


def test_fine_tuning_lowers_the_loss_and_a_twin_keeps_its_weights(policy):
    known = lesson13.examples(policy, 4, 0, lesson13.in_words)
    learner, before = lesson13.twin(policy), lesson13.answer_loss(policy, known)
    losses = lesson13.fine_tune(learner, known, 3, 4, 5e-4, seed=0)
    assert losses[0] == pytest.approx(before, rel=1e-4) and lesson13.answer_loss(learner, known) < 0.8 * before
    assert lesson13.answer_loss(policy, known) == before


@pytest.mark.thorough
def test_a_run_leaves_what_its_record_holds(policy, tiny):
    for name, found in {
        "start_3": lesson13.start(policy, 0, sft_steps=1, every=1),
        "lora_1": lesson13.lora(policy, 0, sft_steps=1, rank=1, seconds=1e-3, every=1.0),
        "lora_full": lesson13.lora(policy, 0, sft_steps=1, rank="full", seconds=1e-3, every=1.0),
    }.items():
        recorded = load_curve(f"lesson13_{name}")["results"][0]
        assert {"variant", *found} == recorded.keys()
        assert found["evals"][0].keys() == recorded["evals"][0].keys() and len(found["evals"]) == 2
        assert found.get("numbers") == recorded.get("numbers")
