"""The functions that lessons 02 on share with lesson 01 compute what its cells compute."""

import ast
from pathlib import Path

import pytest
import torch

from rlcourse.course import loop
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling

LESSON = Path(__file__).parents[2] / "notebooks" / "_src" / "01_policy_gradient.py"


@pytest.fixture(scope="module")
def lesson():
    """The functions of lesson 01, as they stand in its cells."""
    import torch.nn.functional as F

    from rlcourse.course import pick
    from rlcourse.evaluation import answer_problems, summarize

    names = {"torch": torch, "F": F, "pick": pick, "answer_problems": answer_problems, "summarize": summarize}
    names |= {"task": loop.task, "LIMIT": loop.LIMIT}
    tree = ast.parse(LESSON.read_text())
    wanted = {"log_probs", "verify", "greedy_accuracy"}
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    exec(compile(tree, str(LESSON), "exec"), names)
    return names


def test_sizes_and_functions_are_those_of_lesson_01(lesson, monkeypatch):
    assert "PROMPTS, GROUP, LIMIT = 4, 8, 80" in LESSON.read_text()
    monkeypatch.setenv("RLCOURSE_PROFILE", "smoke")
    policy = load_policy("embedded")
    engine = make_engine(policy, "fast", torch.float32)
    problems = loop.task.problems("train")[: loop.PROMPTS]
    prompts = [policy.prompt(problem.question) for problem in problems]
    torch.manual_seed(0)
    rollout = engine.generate(prompts, loop.GROUP, loop.LIMIT, Sampling())
    with torch.no_grad():
        found = loop.log_probs(policy.model, rollout)
        assert torch.equal(found, lesson["log_probs"](policy.model, rollout))
    assert torch.equal(found != 0, loop.answer_mask(rollout) & (found != 0))
    assert torch.equal(loop.answer_mask(rollout).sum(1), rollout.completion_lengths)
    rewards = loop.verify(problems, rollout, policy)
    assert torch.equal(rewards, lesson["verify"](problems, rollout, policy)) and 0 < rewards.mean() < 1
    assert loop.greedy_accuracy(policy, engine, 8) == lesson["greedy_accuracy"](policy, engine)
