"""A training loop for a language model and a verifier, on one page: the file of lessons 01 to 05.

Exercise 01 leaves `sample`, `log_probs`, `verify`, `weigh` and `loss` to the reader; `rlcourse.course.own` saves the
page with their functions as `my_loop.py`. Each later lesson changes one function. `python my_loop.py` trains.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from rlcourse.batch import Rollout, completion_lengths, make_rollout
from rlcourse.evaluation import answer_problems, summarize
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import make_engine
from rlcourse.tasks import Problem, load_task
from rlcourse.tasks.prompts import PromptSampler

PROMPTS, GROUP, LIMIT = 4, 8, 80  # problems per step, answers to each, tokens per answer at most
LR = 4e-5  # learning rate
REFERENCE = False  # whether `ref` is of the model before training, for a KL to it (lesson 03), or just `old`
task = load_task("minigsm")


def sample(logits: Tensor) -> Tensor:
    """One token per row, drawn from softmax(logits): [rows]. logits: [rows, vocabulary]."""
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


def log_probs(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """log pi of each token but the first, 0 where mask is False: [rows, width - 1].

    logits: [rows, width, vocabulary]; ids: [rows, width]; mask: bool [rows, width - 1].
    """
    found = -F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return found.masked_fill(~mask, 0.0)


def verify(text: str, gold: str) -> float:
    """1.0 if the last number that is announced by `#### ` is `gold`, else 0.0."""
    announced = re.findall(r"#### (-?[0-9][0-9,]*(?:\.[0-9]+)?)", text)
    return float(bool(announced) and float(announced[-1].replace(",", "")) == float(gold))


def weigh(rewards: Tensor, group: int) -> Tensor:
    """Each reward minus the mean of the others in its group: [rows]. Row i answers prompt i // group."""
    groups = rewards.view(-1, group)
    others = (groups.sum(1, keepdim=True) - groups) / (group - 1)
    return (groups - others).flatten()


def loss(new: Tensor, old: Tensor, ref: Tensor, A: Tensor, mask: Tensor) -> Tensor:
    """Minus the sum of advantage times log-prob, over rows * LIMIT: a scalar.

    new, old, ref: log-probs under the policy (with gradient), the one that sampled and the one before training,
    [rows, width - 1]; A: advantages, [rows, 1] or [rows, width - 1]; mask: bool [rows, width - 1].
    """
    return -(A * new * mask).sum() / (len(mask) * LIMIT)


@torch.no_grad()
def roll_out(policy: Policy, problems: list[Problem]) -> Rollout:
    """GROUP sampled answers to each problem, up to and including the token that ends them."""
    prompts, answers = policy.prompts([problem.question for problem in problems]), []
    for prompt in prompts:
        tokens, cache, drawn = torch.tensor([prompt] * GROUP), DynamicCache(), []
        while len(drawn) < LIMIT:
            tokens = sample(policy.model(tokens, past_key_values=cache).logits[:, -1])[:, None]
            drawn.append(tokens)
            if torch.isin(torch.cat(drawn, 1), torch.tensor(policy.eos_ids)).any(1).all():
                break
        answers.append(F.pad(torch.cat(drawn, 1), (0, LIMIT - len(drawn)), value=policy.pad_id))
    ids = torch.cat(answers)
    return make_rollout(policy, prompts, ids, completion_lengths(ids, policy.eos_ids), torch.zeros(ids.shape))


def answer_mask(rollout: Rollout) -> Tensor:
    """Which of `ids[:, 1:]` belong to the answer, its end token included: bool [rows, width - 1]."""
    position = torch.arange(1, rollout.ids.shape[1])
    start = rollout.prompt_lengths[:, None]
    return (position >= start) & (position < start + rollout.completion_lengths[:, None])


def judge(policy: Policy, problems: list[Problem], rollout: Rollout) -> Tensor:
    """The reward of each answer, 0 for one that was cut off: [rows]."""
    texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
    golds = [problem.gold for problem in problems for _ in range(GROUP)]
    return torch.tensor([verify(*pair) for pair in zip(texts, golds, strict=True)]) * rollout.finished


def advantages(policy: Policy, rewards: Tensor, rollout: Rollout) -> Tensor:
    """[rows, 1], one per answer; lesson 02's critic gives one per token."""
    return weigh(rewards, GROUP)[:, None]


def token_log_probs(policy: Policy, rollout: Rollout) -> Tensor:
    """`log_probs` of a rollout under a policy: [rows, width - 1]."""
    return log_probs(policy.model(rollout.ids).logits, rollout.ids, answer_mask(rollout))


def greedy_accuracy(policy: Policy, problems: int = 200, split: str = "validation") -> float:
    """The share of greedy answers to problems held out from training that the task's own verifier calls right."""
    engine = make_engine(policy, "fast", torch.float32)
    return summarize(answer_problems(policy, engine, task, task.problems(split)[:problems], LIMIT))["accuracy"]


def train(
    steps: int, seed: int = 0, updates: int = 1, every: int = 5, problems: int = 200
) -> tuple[Policy, list[dict]]:
    """Train the embedded model for `steps` rollouts, with `updates` gradient steps on each.

    Returns the policy and a row of numbers per step; `problems` greedy answers are judged every `every` steps.
    """
    torch.manual_seed(seed)
    policy = load_policy("embedded")
    reference = load_policy("embedded") if REFERENCE else None
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    order, log = PromptSampler(task.problems("train"), seed), []
    for step in range(steps + 1):
        accuracy = greedy_accuracy(policy, problems) if step % every == 0 else None
        asked = order.sample(PROMPTS)
        rollout = roll_out(policy, asked)
        rewards = judge(policy, asked, rollout)
        length = rollout.completion_lengths.float().mean().item()
        log.append({"step": step, "reward": rewards.mean().item(), "length": length, "accuracy": accuracy})
        if step == steps:
            return policy, log
        A, mask = advantages(policy, rewards, rollout), answer_mask(rollout)
        for update in range(updates):
            new = token_log_probs(policy, rollout)
            if update == 0:
                old = new.detach()
                ref = token_log_probs(reference, rollout).detach() if REFERENCE else old
            optimizer.zero_grad()
            loss(new, old, ref, A, mask).backward()
            torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()
        warm_up.step()


if __name__ == "__main__":
    for row in train(30)[1]:
        print(row)
