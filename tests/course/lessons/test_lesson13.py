"""The parts of lesson 13: a base that earns nothing, and SFT."""

import random

import pytest
import torch

from rlcourse.course.lessons import lesson13
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task
from rlcourse.tasks.minigsm import generate


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded")


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
