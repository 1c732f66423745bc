"""Answers that have already begun, for lesson 04."""

from rlcourse.course.lessons.lesson04 import forced_prompts
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task


def test_a_prompt_ends_with_filler_or_with_the_first_line_of_the_working():
    policy, problems = load_policy("embedded"), load_task("minigsm").problems("train")[:2]
    found = forced_prompts(policy, problems)
    prompts = [policy.prompt(problem.question) for problem in problems for _ in range(2)]
    texts = [policy.tokenizer.decode(ids[len(prompt) :]) for ids, prompt in zip(found, prompts, strict=True)]
    working = [problem.answer.split("\n")[0] + "\n" for problem in problems]
    assert texts == ["Let me think.\n", working[0], "Let me think.\n", working[1]]
