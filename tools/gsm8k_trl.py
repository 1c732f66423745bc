"""The runs of `tools/gsm8k.py` by TRL's GRPOTrainer: the same model, prompts, reward, optimizer and number of steps.

On a GPU TRL samples with vLLM in its process, and computes in bfloat16 with float32 weights, as ours. Evaluations are
ours, on the weights that TRL has by then, and its clock stands still meanwhile.
"""

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch

from rlcourse.config import TrainConfig
from rlcourse.device import find_device
from rlcourse.evaluation import answer_problems, answer_test, summarize, summarize_test
from rlcourse.files import append_json, write_json
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import make_engine
from rlcourse.tasks import Attempt, prompts_of, task_of
from rlcourse.tasks.prompts import short_enough
from rlcourse.train import MAX_GRAD_NORM

MICRO_BATCH = 32  # rows: 256 of GSM8K run out of 80 GB


class Judge:
    """TRL's view of the config's task: rewards, and what was earned in each step."""

    __name__ = "verdict"

    def __init__(self, config: TrainConfig, policy: Policy, task: Any, problems: list[Any]):
        self.config, self.task, self.problems, self.eos = config, task, problems, set(policy.eos_ids)
        self.answers: list[tuple[float, bool, int]] = []  # of this step: reward, right, tokens

    def __call__(self, completions: list[str], completion_ids: list[list[int]], number: list[int], **_: Any):
        attempts = [
            Attempt(self.problems[n], text, len(ids), bool(ids) and ids[-1] in self.eos)
            for text, ids, n in zip(completions, completion_ids, number, strict=True)
        ]
        verdicts = self.task.judge(attempts, training=True)
        rewards = [verdict.reward for verdict in verdicts]
        self.answers += [(r, v.right, a.tokens) for r, v, a in zip(rewards, verdicts, attempts, strict=True)]
        return rewards

    def take(self, step: int) -> dict[str, Any]:
        """What `metrics.jsonl` holds of a step."""
        taken, self.answers = self.answers, []

        def mean(values: list[float]) -> float | None:
            return sum(values) / len(values) if values else None

        return {
            "step": step,
            "reward": mean([reward for reward, _, _ in taken]),
            "accuracy": mean([right for _, right, _ in taken]),
            "length_right": mean([tokens for _, right, tokens in taken if right]),
            "length_wrong": mean([tokens for _, right, tokens in taken if not right]),
            "mismatch_max": None,
        }


def train(config: TrainConfig, folder: Path, began: float) -> None:
    """Train, and write what `tools/gsm8k.py` records. began: `time.perf_counter()` when the clock started."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    device = find_device(config)
    task, policy = task_of(config), load_policy(config.model, device)
    problems = short_enough(task.problems("train"), task, policy, config)
    prompts = [policy.tokenizer.decode(prompt) for prompt in prompts_of(task, problems, policy)]
    table = {"prompt": prompts, "number": list(range(len(prompts)))}
    judge = Judge(config, policy, task, problems)
    trainer = GRPOTrainer(
        model=load_policy(config.model).model,
        reward_funcs=judge,
        args=arguments(config, folder, device.type == "cuda"),
        train_dataset=Dataset(InMemoryTable.from_pydict(table), fingerprint="prompts"),
        processing_class=policy.tokenizer,
    )
    clock = Clock(began)

    def evaluated(measure: Any) -> Any:
        """What `measure` says of the weights that TRL has now, by our engine; the clock stands still."""
        with clock.standing(), torch.no_grad():
            for own, theirs in zip(policy.model.parameters(), trainer.model.parameters(), strict=True):
                own.copy_(theirs)
            engine = make_engine(policy, "fast", getattr(torch, config.dtype))
            found = measure(engine)
            engine.sleep()
            return found

    def validate(step: int) -> None:
        few = task.problems("validation")[: config.eval_validation]
        found = evaluated(lambda engine: answer_problems(policy, engine, task, few, config.max_new_tokens))
        append_json(folder / "evals.jsonl", {"step": step} | summarize(found) | {"seconds": clock.seconds()})

    def test(when: str) -> dict[str, Any]:
        return summarize_test(*evaluated(lambda engine: answer_test(policy, engine, task, config, when)))

    class Log(TrainerCallback):
        def on_step_end(self, _, state, *__, **___):
            append_json(folder / "metrics.jsonl", judge.take(state.global_step) | {"seconds": clock.seconds()})
            if state.global_step % config.eval_every == 0:
                validate(state.global_step)

    trainer.add_callback(Log())
    before = test("before")
    validate(0)
    trainer.train()
    seconds, after = clock.seconds(), test("after")
    summary = {"steps": config.steps, "before": before, "after": after, "wall_seconds": seconds, "seed": config.seed}
    summary |= {f"accuracy_{when}": found["accuracy"] for when, found in (("before", before), ("after", after))}
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    summary |= {"eval_problems": after["problems"], "peak_memory_bytes": memory, "seconds": {}, "warnings": {}}
    write_json(folder / "summary.json", summary)


def arguments(config: TrainConfig, folder: Path, on_gpu: bool) -> Any:
    """TRL's settings that mean what the config's do."""
    from trl import GRPOConfig

    rows = math.gcd(config.rows, MICRO_BATCH)
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=config.rows // rows,
        num_generations=config.num_generations,
        max_completion_length=config.max_new_tokens,
        max_steps=config.steps,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        temperature=config.temperature,
        top_k=0,
        learning_rate=config.lr,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup_steps,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        use_vllm=on_gpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
    )


class Clock:
    """Seconds since the start without those within `standing`."""

    def __init__(self, began: float):
        self.began = began

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def standing(self):
        start = time.perf_counter()
        yield
        self.began += time.perf_counter() - start
