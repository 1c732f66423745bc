"""Parts of lessons: answers that have begun (04), a base that earns nothing and SFT (13), old weights (15)."""

import itertools
import random

import pytest
import torch

from rlcourse.course.lessons import lesson13, lesson15
from rlcourse.course.lessons.lesson04 import forced_prompts
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
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


def test_a_prompt_ends_with_filler_or_with_the_first_line_of_the_working(policy):
    problems = load_task("minigsm").problems("train")[:2]
    found = forced_prompts(policy, problems)
    prompts = [policy.prompt(problem.question) for problem in problems for _ in range(2)]
    texts = [policy.tokenizer.decode(ids[len(prompt) :]) for ids, prompt in zip(found, prompts, strict=True)]
    working = [problem.answer.split("\n")[0] + "\n" for problem in problems]
    assert texts == ["Let me think.\n", working[0], "Let me think.\n", working[1]]


@pytest.mark.parametrize("lag", [0, 2])
def test_the_sampler_has_the_weights_of_so_many_updates_ago(lag):
    policy = load_policy("embedded")
    engine, sampled = lesson15.LaggingEngine(policy, lag), []
    versions = []
    prompts = [policy.prompt("Emma has 3 apples. She buys 4 more. How many apples does Emma have?")]
    for update in range(5):
        with torch.no_grad():
            for p in policy.model.parameters():
                p.mul_(1.0 if update == 0 else 0.97)
        torch.manual_seed(0)
        versions.append(make_engine(policy, "fast", torch.float32).generate(prompts, 2, 6, Sampling()))
        torch.manual_seed(0)
        sampled.append(engine.generate(prompts, 2, 6, Sampling()))
    for update, found in enumerate(sampled):
        expected = versions[max(0, update - lag)]
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.logprobs, expected.logprobs)
    different = [not torch.equal(a.logprobs, b.logprobs) for a, b in itertools.pairwise(versions)]
    assert all(different)
