"""The recorded runs of lesson 13, three seeds each: `python -m rlcourse.course.lessons.lesson13`.

`start_N` takes a base that earns nothing, learns N steps from a few demonstrations, then trains with rewards; `lora_R`
trains with rewards from one warm start, an adapter of rank R or, as `lora_full`, all weights, for the same seconds.
Takes names of `RUNS`, or does them all, and writes the record `lesson13_<name>` of each.
"""

import copy
import random
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from rlcourse.config import TrainConfig, make_config
from rlcourse.course.embedded.demonstrations import ANSWER, Mix, demonstration
from rlcourse.course.lessons.curve_records import record_seeds
from rlcourse.evaluation import answer_problems, mean_pass_at_k, summarize
from rlcourse.learner import Learner
from rlcourse.lora import add_adapter
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import RolloutEngine, make_engine
from rlcourse.sampling import Sampling
from rlcourse.sft.data import Example
from rlcourse.sft.packing import pack, plan_rows, summed_loss
from rlcourse.step import train_step
from rlcourse.tasks import load_task
from rlcourse.tasks.minigsm import GeneratedProblem, generate
from rlcourse.tasks.prompts import PromptSampler

SEEDS = (0, 1, 2)
IN_WORDS = Mix(worked=0, guess=0, prose=1)  # steps, now and then checked or wrong, then "The answer is N."
GUESSED = 0.6  # share of the base's answers that are "The answer is N." alone
BASE = {"base_steps": 40, "base_rows": 32, "base_lr": 1e-3}
DEMONSTRATIONS, HELD_OUT = 64, 64
SFT = {"demonstrations": DEMONSTRATIONS, "sft_rows": 32, "sft_lr": 5e-4}
RL = {"num_prompts": 8, "num_generations": 8, "steps": 24, "lr": 1e-4, "warmup_steps": 1}
ASKED, SAMPLED, SAMPLES = 200, 48, 16  # validation problems: answered greedily; sampled, each so often
WIDTH, LIMIT = 256, 80  # tokens of a packed row; of an answer

RUNS: dict[str, dict[str, Any]] = {
    **{f"start_{steps}": {"sft_steps": steps, "every": 6} for steps in (0, 1, 3, 10, 80)},
    **{f"lora_{rank}": {"sft_steps": 3, "rank": rank, "seconds": 24, "every": 8} for rank in (1, "full")},
}


def examples(policy: Policy, number: int, seed: int, text) -> list[Example]:
    """Fresh problems of the sft split, each with the answer that `text(problem, rng)` gives."""
    rng, found = random.Random(seed), []
    for problem in generate(number, seed, "sft"):
        prompt = policy.prompt(problem.question)
        answer = policy.tokenizer(text(problem, rng) + policy.tokenizer.eos_token, add_special_tokens=False)
        ids = torch.tensor([*prompt, *answer["input_ids"]], dtype=torch.int32)
        found.append(Example(ids, torch.arange(len(ids)) >= len(prompt)))
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


def measure(policy: Policy, engine: RolloutEngine) -> dict[str, float]:
    """Greedy accuracy; pass@k from samples; entropy in nats a token, estimated from the same samples."""
    task = load_task("minigsm")
    problems = task.problems("validation")
    asked, sampled = problems[:ASKED], problems[ASKED : ASKED + SAMPLED]
    found = {"accuracy": summarize(answer_problems(policy, engine, task, asked, LIMIT))["accuracy"]}
    answers = answer_problems(policy, engine, task, sampled, LIMIT, Sampling(), SAMPLES)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        rollout = engine.generate([policy.prompt(problem.question) for problem in sampled], 4, LIMIT, Sampling())
    entropy = -rollout.logprobs[rollout.completion_mask].mean().item()
    return found | mean_pass_at_k(answers) | {"entropy": entropy}


class Reinforcement:
    """Training with rewards of a policy that is in memory: `learn` does one step and returns what it measured."""

    def __init__(self, policy: Policy, seed: int, **settings: Any):
        torch.manual_seed(seed)
        self.policy, self.config, self.done = policy, rl_config(seed, settings), 0
        self.engine, self.task = make_engine(policy, "fast", torch.float32), load_task("minigsm")
        self.learner = Learner(policy, self.config)
        self.prompts = PromptSampler(self.task.problems("train"), seed)

    def learn(self) -> dict[str, Any]:
        metrics, _ = train_step(self.learner, self.engine, self.task, self.prompts, self.done)
        self.done += 1
        return metrics

    def accuracy(self) -> float:
        """Greedy answers to the first validation problems: the share that is right."""
        problems = self.task.problems("validation")[:ASKED]
        return summarize(answer_problems(self.policy, self.engine, self.task, problems, LIMIT))["accuracy"]


def rl_config(seed: int, settings: dict[str, Any]) -> TrainConfig:
    return make_config("laptop", **RL | settings, seed=seed)


def start(base: Policy, seed: int, sft_steps: int, every: int) -> dict[str, Any]:
    """SFT, then RL: what was measured before either, between them and after, and in each step of RL."""
    policy = twin(base)
    known = examples(policy, DEMONSTRATIONS, 100 + seed, worked)
    unseen = examples(policy, HELD_OUT, 99, worked)
    losses = fine_tune(policy, known, sft_steps, SFT["sft_rows"], SFT["sft_lr"], seed)
    training = Reinforcement(policy, seed)
    between = measure(policy, training.engine) | {"held_out": answer_loss(policy, unseen)}
    evals, steps = [{"step": 0, "accuracy": between["accuracy"]}], []
    while training.done < RL["steps"]:
        metrics = training.learn()
        steps.append({name: metrics[name] for name in ("reward", "groups_without_signal", "grad_norm", "entropy")})
        if training.done % every == 0:
            evals.append({"step": training.done, "accuracy": training.accuracy()})
    after = measure(policy, training.engine) | {"held_out": answer_loss(policy, unseen)}
    return {
        "losses": losses,
        "between": between,
        "after": after,
        "evals": evals,
        "steps": {name: [row[name] for row in steps] for name in steps[0]},
    }


def lora(base: Policy, seed: int, sft_steps: int, rank: int | str, seconds: float, every: float) -> dict[str, Any]:
    """RL after a short SFT of all weights, for so many seconds of one core; evaluations are not counted."""
    policy = twin(base)
    known = examples(policy, DEMONSTRATIONS, 100 + seed, worked)
    fine_tune(policy, known, sft_steps, SFT["sft_rows"], SFT["sft_lr"], seed)
    torch.manual_seed(seed)
    if rank != "full":
        add_adapter(policy.model, "embedded", rank, 32.0, "all-linear")
    training = Reinforcement(policy, seed, lr=RL["lr"] if rank == "full" else 10 * RL["lr"])
    evals, spent = [{"seconds": 0.0, "step": 0, "accuracy": training.accuracy()}], 0.0
    while spent < seconds:
        begin = time.process_time()
        training.learn()
        spent += time.process_time() - begin
        if spent >= min(every * len(evals), seconds):
            evals.append({"seconds": spent, "step": training.done, "accuracy": training.accuracy()})
    return {"evals": evals, "numbers": sum(p.numel() for p in policy.model.parameters() if p.requires_grad)}


def record(name: str, base: Policy) -> None:
    """Run `name` with every seed and write its record."""
    settings = RUNS[name]
    run = lora if name.startswith("lora") else start
    setup = BASE | SFT | RL | settings
    record_seeds(f"lesson13_{name}", [name], setup, SEEDS, lambda seed: run(base, seed, **settings))


if __name__ == "__main__":
    torch.set_num_threads(1)  # seconds are those of one core
    common = make_base()
    for chosen in sys.argv[1:] or RUNS:
        record(chosen, common)
