"""What lesson 01 writes, for the lessons after it: the three functions that its training loop calls, and their sizes.

The loop itself stands in every lesson that changes a line of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.batch import Rollout
from rlcourse.evaluation import answer_problems, summarize
from rlcourse.tasks import Problem, load_task

PROMPTS, GROUP, LIMIT = 4, 8, 80  # problems a step, answers to each, tokens of an answer at most
task = load_task("minigsm")


def log_probs(model, rollout: Rollout) -> Tensor:
    """log pi of every token of every answer, 0 on the prompt and after the end: [rows, width - 1]."""
    logits = model(rollout.ids).logits[:, :-1]  # the last output predicts nothing that is there
    mask = answer_mask(rollout)
    return -F.cross_entropy(logits.transpose(1, 2), rollout.ids[:, 1:], reduction="none") * mask


def answer_mask(rollout: Rollout) -> Tensor:
    """Which of the tokens that `log_probs` looks at belong to the answer, its end token included: [rows, width - 1]."""
    position = torch.arange(1, rollout.ids.shape[1])
    start = rollout.prompt_lengths[:, None]
    return (position >= start) & (position < start + rollout.completion_lengths[:, None])


def verify(problems: list[Problem], rollout: Rollout, policy) -> Tensor:
    """The reward of each answer, group after group, 1 for one that ended and is right: [rows]."""
    texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
    ended = rollout.finished.tolist()
    golds = [problem.gold for problem in problems for _ in range(len(texts) // len(problems))]
    right = [task.verify(text, gold).strict for text, gold in zip(texts, golds, strict=True)]
    return torch.tensor([float(a and b) for a, b in zip(right, ended, strict=True)])


def greedy_accuracy(policy, engine, problems: int = 200) -> float:
    """Greedy answers to the first validation problems: the share that is right. Training never looks at it."""
    asked = task.problems("validation")[:problems]
    return summarize(answer_problems(policy, engine, task, asked, LIMIT))["accuracy"]
