"""Supervised fine-tuning, in the loop of `rlcourse/train.py`."""

import math
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from rlcourse.batch import rows_together
from rlcourse.checkpoint import at_checkpoint
from rlcourse.device import autocast, without_cudnn_attention
from rlcourse.distributed import launch
from rlcourse.evaluation import answer_problems, summarize
from rlcourse.learner import new_optimizer
from rlcourse.measure.timing import peak_memory_bytes
from rlcourse.metrics import run_summary
from rlcourse.rollout import make_engine
from rlcourse.runs import RunFolder, new_run, run_to_resume
from rlcourse.sft.config import SFTConfig
from rlcourse.sft.data import Example, load_data
from rlcourse.sft.packing import Row, check_packing, pack, plan_rows, summed_loss, tokens_of
from rlcourse.tasks import Answer, load_task
from rlcourse.tasks.prompts import PromptSampler, fingerprint
from rlcourse.train import TrainingLoop, update
from rlcourse.watch import WINDOW, Warnings, cut_off, unreadable

KNOWN = 0.01  # nats per token: less from the start on is nothing to learn
OVERFIT = 1.1  # times the lowest held-out loss so far


def fine_tune(config: SFTConfig) -> dict[str, Any]:
    """Train as `config` says and return the content of `summary.json`. Raises, and is stopped, as
    `rlcourse.train.train`."""
    with launch(lambda: new_run(config)) as (run, device, _):
        return FineTuning(run, device).run_all()


def resume(**settings: Any) -> dict[str, Any]:
    """Continue a run from its last checkpoint, with the settings and the data that it was started with; see
    `rlcourse.train.resume`."""
    with launch(lambda: at_checkpoint(run_to_resume(settings, SFTConfig))) as (run, device, _):
        return FineTuning(run, device).run_all()


class FineTuning(TrainingLoop):
    """A run of supervised fine-tuning. A step learns `batch_size` examples; its loss is the mean over all their answer
    tokens, however they are packed and cut into micro-batches."""

    name, curves = "sft", "FINE_TUNING"

    def __init__(self, run: RunFolder, device: torch.device):
        config = run.config
        self.setup(run, device)
        self.data = load_data(config, self.policy)
        self.data_digest = self.data.fingerprint
        run.warn(0, self.data.warnings)
        steps = config.steps or math.ceil(config.epochs * len(self.data.train) / config.batch_size)
        self.config = replace(config, steps=steps)
        if config.packing:
            check_packing(self.policy.model)
        self.engine, self.metrics = None, {}  # without a task
        if config.evaluated_task is not None and config.eval_problems:
            self.task = load_task(config.evaluated_task)
            self.metrics = self.task.metrics
            self.data_digest += fingerprint(self.task, self.policy)
            dtype = getattr(torch, config.dtype)
            self.engine = make_engine(self.policy, "fast", dtype, config.compile, sleeps=True)
        parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        self.optimizer = new_optimizer([{"params": parameters, "peak_lr": config.lr}], self.config)
        self.data_sampler = PromptSampler(self.data.train, config.seed)
        self.finish_setup()

    def train_step(self) -> tuple[dict[str, Any], None]:
        """One optimizer step on the next examples. Returns what was measured: `loss`, nats per token of an answer,
        before the update; `grad_norm`, `lr`, `epoch`; `tokens` and those that were `learned_tokens`; `timing`. Raises
        what `update` does."""
        config, start = self.config, time.perf_counter()
        examples = self.data_sampler.sample(config.batch_size)
        learned, loss = learned_tokens(examples), torch.zeros((), device=self.device)
        with without_cudnn_attention():  # widths differ from step to step
            for rows in self._micro_batches(examples):
                of_rows = self._summed_loss(rows) / learned
                of_rows.backward()
                loss += of_rows.detach()
        grad_norm = update(self.optimizer, config, self.step)
        seconds, tokens, lr = time.perf_counter() - start, tokens_of(examples), self.optimizer.param_groups[0]["lr"]
        epoch, memory = self.data_sampler.position / len(self.data.train), peak_memory_bytes(self.device)
        metrics = {"step": self.step + 1, "loss": loss.item(), "grad_norm": grad_norm, "lr": lr, "epoch": epoch}
        metrics["timing"] = {"step_s": seconds, "tokens_per_s": tokens / seconds, "peak_memory_bytes": memory}
        return metrics | {"tokens": tokens, "learned_tokens": learned}, None

    def _micro_batches(self, examples: list[Example]) -> list[list[Row]]:
        """The examples in rows, those of like length together, `micro_batch_tokens` at a time."""
        rows = sorted(plan_rows(examples, self.config.max_length if self.config.packing else 0), key=tokens_of)
        counts, rest = rows_together([*map(tokens_of, rows)], self.config.micro_batch_tokens), iter(rows)
        return [[*islice(rest, count)] for count in counts]

    def _summed_loss(self, rows: list[Row]) -> torch.Tensor:
        packed = pack(rows, self.policy.pad_id, self.device)
        with autocast(self.config.dtype, self.device):
            return summed_loss(self.policy.model, packed, self.config.logprob_chunk, self.config.compile)

    def warnings(self, completions: None) -> dict[str, str]:
        return after_step(self.steps, self.config)

    def shown(self, metrics: dict[str, Any]) -> dict[str, str]:
        return {"loss": f"{metrics['loss']:.3f}", "lr": f"{metrics['lr']:.1e}"}

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """`loss` on the examples held out, nats per token of an answer, if any; what `summarize` says of greedy answers
        to the task's problems, if there is one."""
        found, answers = {}, []
        if examples := self.data.held_out:
            with without_cudnn_attention():
                losses = [self._summed_loss(rows).double() for rows in self._micro_batches(examples)]
            found["loss"] = torch.stack(losses).sum().item() / learned_tokens(examples)
        if self.engine is not None:
            problems = self.task.problems("validation")[: self.config.eval_problems]
            answers = answer_problems(self.policy, self.engine, self.task, problems, self.config.max_new_tokens)
            found |= summarize(answers)
            self.engine.sleep()  # training wants the memory
        losses = [line["loss"] for line in [*self.run.lines("evals.jsonl"), found] if "loss" in line]
        self.run.warn(self.step, after_evaluation(losses, [answer for [answer] in answers], self.config))
        return found

    def test(self, when: str) -> dict[str, Any]:
        """The same as a validation at this step, which is logged with the others."""
        return {name: value for name, value in self.logged_validation().items() if name != "step"}

    def summary(self, after: dict[str, Any]) -> dict[str, Any]:
        data, learned = self.data, min(self.data_sampler.position, len(self.data.train))
        counts = {"examples": len(data.train), "learned": learned, "held_out": len(data.held_out)}
        return run_summary(self, after) | counts | {"too_long": data.too_long}


def learned_tokens(examples: list[Example]) -> int:
    return sum(int(example.learned.sum()) for example in examples)


def after_step(steps: list[dict[str, Any]], config: Any) -> Warnings:
    """What the steps of supervised fine-tuning say so far. steps: the metrics of each."""
    if len(steps) < WINDOW:
        return {}
    last = steps[-WINDOW:]
    loss = sum(step["loss"] for step in last) / WINDOW
    if all(step["grad_norm"] == 0 or step["lr"] == 0 for step in last):
        still = f"The weights did not change in the last {WINDOW} steps"
        return {"no_update": f"{still}: check --lr ({config.lr:g}), --warmup-steps and --schedule."}
    if len(steps) == WINDOW and loss < KNOWN:
        return {
            "known": f"The loss is {loss:.4f} nats per token from the first steps on: the model knows these answers "
            "already, so check --data and --model."
        }
    first = sum(step["loss"] for step in steps[:WINDOW]) / WINDOW
    if len(steps) > WINDOW and loss > 1.5 * first:
        return {
            "diverging": f"The loss rose from {first:.2f} to {loss:.2f} nats per token, so training makes the model "
            f"worse: start again with a lower --lr than {config.lr:g}."
        }
    return {}


def after_evaluation(losses: list[float], answers: list[Answer], config: Any) -> Warnings:
    """What an evaluation says: losses, the held-out loss of each evaluation so far; answers to the task's problems, if
    it has any."""
    found = unreadable(answers) | cut_off(answers, config) if answers else {}
    if losses and losses[-1] > OVERFIT * min(losses):
        found["overfit"] = (
            f"The held-out loss has risen from {min(losses):.3f} to {losses[-1]:.3f}: the model memorizes its "
            "examples. Use fewer --epochs, more data or a lower --lr."
        )
    return found
