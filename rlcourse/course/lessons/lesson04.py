"""Openings that are forced on answers, for lesson 04: the settings of its runs, and how long the answers get."""

import torch

from rlcourse.config import make_config
from rlcourse.course.lessons.demonstrations import THINK
from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.tasks import Problem

# The length bias in isolation: 16 problems x (4 + 4) answers per step, whose opening decides what they earn.
ISOLATED = {"num_prompts": 16, "num_generations": 8, "max_new_tokens": 96, "steps": 60, "lr": 2e-5}

# Ordinary training with small steps, and its beginning.
SLOW = {"lr": 1e-5, "steps": 120, "max_new_tokens": 160}
BEGINNING = SLOW | {"steps": 30}


def forced_prompts(policy: Policy, problems: list[Problem]) -> list[list[int]]:
    """Two prompts a problem whose answer has already begun: with filler, then with the first line of the working."""
    prompts = []
    for problem in problems:
        for opening in (THINK, problem.answer.split("\n")[0]):
            ids = policy.tokenizer(opening + "\n", add_special_tokens=False)["input_ids"]
            prompts.append(policy.prompt(problem.question) + ids)
    return prompts


@torch.no_grad()
def forced_lengths(policy: Policy, engine: RolloutEngine, problems: list[Problem], limit: int) -> dict[str, float]:
    """Mean tokens of the answers after each opening, and the share that is cut off at `limit`; 4 answers a problem."""
    with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
        torch.manual_seed(0)
        rollout = engine.generate(forced_prompts(policy, problems), 4, limit, make_config().sampling)
    lengths, finished = rollout.completion_lengths.view(-1, 2, 4).float(), rollout.finished.view(-1, 2, 4).float()
    found = {}
    for i, name in enumerate(("filler", "worked")):
        found[name] = lengths[:, i].mean().item()
        found[f"{name}_cut"] = 1 - finished[:, i].mean().item()
    return found
