"""A real instruct model in the folder that RLCOURSE_REAL_MODEL names: what random weights and our own tokenizer can't
show. Skipped without one."""

import os

import pytest
import torch

from rlcourse.config import make_config
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks import Problem, prompts_of
from rlcourse.tasks.gsm8k import INSTRUCTION
from rlcourse.tasks.task import MathTask

FOLDER = os.environ.get("RLCOURSE_REAL_MODEL")
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(FOLDER is None, reason="RLCOURSE_REAL_MODEL is not set")]
EXAMPLES = [Problem("What is 2 plus 3?", "2+3 = 5\n#### 5", "5"), Problem("What is 9 minus 4?", "9-4 = 5\n#### 5", "5")]


@pytest.fixture(scope="module")
def policy():
    return load_policy(FOLDER)


@pytest.fixture(scope="module")
def task():
    problems = [
        Problem(f"Tom has {n} apples and buys {n + 1} more. How many?", "", str(2 * n + 1)) for n in range(3, 9)
    ]
    return MathTask("own", INSTRUCTION, [*EXAMPLES, *problems], [], problems).with_settings(make_config(examples=2))


def test_prompts_are_those_of_the_chat_template_with_the_examples_as_earlier_turns(policy, task):
    chats = [[{"role": "system", "content": INSTRUCTION}] for _ in task.test]
    for chat, problem in zip(chats, task.test, strict=True):
        for example in EXAMPLES:
            chat.append({"role": "user", "content": example.question})
            chat.append({"role": "assistant", "content": example.answer})
        chat.append({"role": "user", "content": problem.question})
    expected = [policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    assert prompts_of(task, task.test, policy) == expected


def test_sampled_log_probs_are_those_of_the_models_own_logits(policy, task):
    engine = make_engine(policy, "fast", torch.float32)
    prompts = prompts_of(task, task.test[:2], policy)
    torch.manual_seed(0)
    rollout = engine.generate(prompts, 1, 12, Sampling())
    for row, prompt in enumerate(prompts):
        answer = rollout.completion_ids[row, : rollout.completion_lengths[row]]
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(rollout.logprobs[row, : len(answer)], expected, atol=1e-3, rtol=0)
