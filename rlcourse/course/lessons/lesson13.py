"""The parts of lesson 13: a base that earns nothing, and SFT on a few demonstrations."""

import copy
import random
from dataclasses import replace

import torch

from rlcourse.course.lessons.demonstrations import ANSWER, Mix, demonstration
from rlcourse.policy import Policy, load_policy
from rlcourse.sft.data import Example, encode
from rlcourse.sft.packing import pack, plan_rows, summed_loss
from rlcourse.tasks.minigsm import GeneratedProblem, generate

IN_WORDS = Mix(worked=0, guess=0, prose=1)  # steps, now and then checked or wrong, then "The answer is N."
GUESSED = 0.6  # share of the base's answers that are "The answer is N." alone
BASE = {"base_steps": 40, "base_rows": 32, "base_lr": 1e-3}
DEMONSTRATIONS, HELD_OUT = 64, 64
SFT = {"demonstrations": DEMONSTRATIONS, "sft_rows": 32, "sft_lr": 5e-4}
RL = {"num_prompts": 8, "num_generations": 8, "steps": 24, "lr": 1e-4, "warmup_steps": 1}
ASKED, SAMPLED, SAMPLES = 200, 48, 16  # validation problems: answered greedily; sampled, each so often
WIDTH, LIMIT = 256, 80  # tokens of a packed row; of an answer


def examples(policy: Policy, number: int, seed: int, text) -> list[Example]:
    """Fresh problems of the sft split, each with the answer that `text(problem, rng)` gives."""
    rng, found = random.Random(seed), []
    for problem in generate(number, seed, "sft"):
        answer = {"role": "assistant", "content": text(problem, rng)}
        found.append(encode(policy, [{"role": "user", "content": problem.question}, answer]))
    return found


def in_words(problem: GeneratedProblem, rng: random.Random) -> str:
    """An answer as the base gives it. Never one that the strict verifier can read."""
    return f"{ANSWER} {problem.gold}." if rng.random() < GUESSED else demonstration(problem, rng, IN_WORDS)


def worked(problem: GeneratedProblem, rng: random.Random) -> str:
    """An answer as it should be: steps, then `#### N`."""
    return problem.to_problem().answer


def fine_tune(policy: Policy, known: list[Example], steps: int, rows: int, lr: float, seed: int) -> list[float]:
    """Learn the answers of `rows` examples a step with AdamW; the loss of each step, nats a token."""
    rng, losses = random.Random(seed), []
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        some = rng.sample(known, rows)
        learned = sum(int(example.learned.sum()) for example in some)
        loss = summed_loss(policy.model, pack(plan_rows(some, WIDTH), policy.pad_id, policy.device), 4096) / learned
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def answer_loss(policy: Policy, known: list[Example]) -> float:
    """Nats a token of the examples' answers."""
    learned = sum(int(example.learned.sum()) for example in known)
    packed = pack(plan_rows(known, WIDTH), policy.pad_id, policy.device)
    return summed_loss(policy.model, packed, 4096).item() / learned


def make_base(steps: int = BASE["base_steps"]) -> Policy:
    """The embedded model after it has learned to end every answer in words. It can calculate, and earns nothing."""
    policy = load_policy("embedded")
    rows = BASE["base_rows"]
    fine_tune(policy, examples(policy, steps * rows, 5, in_words), steps, rows, BASE["base_lr"], seed=5)
    return policy


def twin(policy: Policy) -> Policy:
    """The same policy with weights of its own."""
    return replace(policy, model=copy.deepcopy(policy.model))
