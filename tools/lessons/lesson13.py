"""The recorded runs of lesson 13, three seeds each: `python -m tools.lessons.lesson13`.

`start_N` takes a base that earns nothing, learns N steps from a few demonstrations, then trains with rewards; `lora_R`
trains with rewards from one warm start, an adapter of rank R or, as `lora_full`, all weights, for the same seconds.
Takes names of `RUNS`, or does them all, and writes the record `lesson13_<name>` of each.
"""

import sys
import time
from typing import Any

import torch

from rlcourse.config import make_config
from rlcourse.course.lessons.experiment import Experiment
from rlcourse.course.lessons.lesson13 import (
    ASKED,
    BASE,
    DEMONSTRATIONS,
    HELD_OUT,
    LIMIT,
    RL,
    SAMPLED,
    SAMPLES,
    SFT,
    answer_loss,
    examples,
    fine_tune,
    make_base,
    twin,
    worked,
)  # fmt: skip
from rlcourse.evaluation import answer_problems, mean_pass_at_k, summarize
from rlcourse.lora import add_adapter
from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task
from tools.lessons.recording import record_seeds

SEEDS = (0, 1, 2)

RUNS: dict[str, dict[str, Any]] = {
    **{f"start_{steps}": {"sft_steps": steps, "every": 6} for steps in (0, 1, 3, 10, 80)},
    **{f"lora_{rank}": {"sft_steps": 3, "rank": rank, "seconds": 24, "every": 8} for rank in (1, "full")},
}


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


def accuracy(training: Experiment) -> float:
    return training.evaluate(training.task.problems("validation")[:ASKED])["accuracy"]


def start(base: Policy, seed: int, sft_steps: int, every: int) -> dict[str, Any]:
    """SFT, then RL: what was measured before either, between them and after, and in each step of RL."""
    policy = twin(base)
    known = examples(policy, DEMONSTRATIONS, 100 + seed, worked)
    unseen = examples(policy, HELD_OUT, 99, worked)
    losses = fine_tune(policy, known, sft_steps, SFT["sft_rows"], SFT["sft_lr"], seed)
    training = Experiment(make_config("laptop", **RL, seed=seed), policy)
    between = measure(policy, training.engine) | {"held_out": answer_loss(policy, unseen)}
    evals, steps = [{"step": 0, "accuracy": between["accuracy"]}], []
    while training.done < RL["steps"]:
        metrics, _ = training.train()
        steps.append({name: metrics[name] for name in ("reward", "groups_without_signal", "grad_norm", "entropy")})
        if training.done % every == 0:
            evals.append({"step": training.done, "accuracy": accuracy(training)})
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
    settings = RL | {"lr": RL["lr"] if rank == "full" else 10 * RL["lr"], "seed": seed}
    training = Experiment(make_config("laptop", **settings), policy)
    evals, spent = [{"seconds": 0.0, "step": 0, "accuracy": accuracy(training)}], 0.0
    while spent < seconds:
        begin = time.process_time()
        training.train()
        spent += time.process_time() - begin
        if spent >= min(every * len(evals), seconds):
            evals.append({"seconds": spent, "step": training.done, "accuracy": accuracy(training)})
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
