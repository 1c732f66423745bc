"""The loop of supervised fine-tuning: steps, evaluations, checkpoints, and a curve at the end."""

import math
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rlcourse.checkpoint import (
    check_finite,
    damaged,
    latest_checkpoint,
    load_state,
    policy_of_run,
    random_state,
    save_checkpoint,
    set_random_state,
    step_of,
)
from rlcourse.device import autocast, find_device, without_cudnn_attention
from rlcourse.evaluation import answer_problems, summarize
from rlcourse.files import try_folder
from rlcourse.interrupts import StopAfterStep, saved_when_stopped
from rlcourse.learner import new_optimizer, update
from rlcourse.measure.profiling import peak_memory_bytes
from rlcourse.micro_batches import rows_together
from rlcourse.policy import checkpoint_activations, compile_layers
from rlcourse.rollout import make_engine
from rlcourse.runs import Kind, RunFolder, new_run, run_to_resume
from rlcourse.sft.config import FIND_A_RUN, MAY_DIFFER, SFTConfig, check_config, check_settings
from rlcourse.sft.data import Example, load_data
from rlcourse.sft.packing import Row, check_packing, pack, plan_rows, summed_loss, tokens_of
from rlcourse.tasks import Answer, load_task
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.watch import after_sft_evaluation, after_sft_step

SFT = Kind(SFTConfig, check_settings, check_config, FIND_A_RUN, MAY_DIFFER)


def fine_tune(config: SFTConfig) -> dict[str, Any]:
    """Train as `config` says and return the content of `summary.json`. Raises, and is stopped, as
    `rlcourse.trainer.train`."""
    device = find_device(config)
    run = new_run(config)
    try:
        return FineTuning(run, device).run_all()
    finally:
        run.remove_unless_begun()


def resume(**settings: Any) -> dict[str, Any]:
    """Continue a run from its last checkpoint, with the settings and the data that it was started with; see
    `rlcourse.trainer.resume`."""
    run = run_to_resume(settings, SFT)
    device, checkpoint = find_device(run.config), latest_checkpoint(run.path)
    training = FineTuning(run, device, checkpoint)
    run.keep_config()
    return training.run_all()


class FineTuning:
    """The state of a run, and the loop over its steps.

    A step learns `batch_size` examples. How they are packed and cut into micro-batches changes nothing but rounding:
    the loss is the mean over all answer tokens of the step.
    """

    def __init__(self, run: RunFolder, device: torch.device, checkpoint: Path | None = None):
        config = run.config
        self.run, self.device = run, device
        torch.manual_seed(config.seed)
        self.policy = policy_of_run(config, device, checkpoint)
        parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        try_folder(run.path, "choose another --output", 12 * sum(p.numel() for p in parameters))  # weights, moments
        self.data = load_data(config, self.policy)
        if self.data.too_long:
            tqdm.write(f"{self.data.too_long} examples of more than {config.max_length} tokens were left out.")
        steps = config.steps or math.ceil(config.epochs * len(self.data.train) / config.batch_size)
        self.config = replace(config, steps=steps)
        if config.packing:
            check_packing(self.policy.model)
        self._prepare_task()
        self.optimizer = new_optimizer([{"params": parameters, "peak_lr": config.lr}], self.config)
        if config.gradient_checkpointing:
            checkpoint_activations(self.policy.model)
        if config.compile:
            compile_layers(self.policy.model)
        self.order = PromptSampler(self.data.train, config.seed)
        self.step, self.seconds, self.before = 0, 0.0, None
        if checkpoint is not None:
            self._load(checkpoint)
        self.steps = run.lines("metrics.jsonl")  # those done before a resume
        self.clock = time.perf_counter() - self.seconds

    def _prepare_task(self) -> None:
        """Task, problems and engine of the answers that are tried; None for the engine, and no metrics, without any."""
        config, self.engine, self.metrics = self.config, None, {}
        if config.evaluated_task is None or not config.eval_problems:
            return
        self.task = load_task(config.evaluated_task)
        self.metrics = self.task.metrics
        self.problems = self.task.problems("validation")[: config.eval_problems]
        dtype = getattr(torch, config.dtype)
        self.engine = make_engine(self.policy, config.engine, dtype, config.compile, sleeps=True)

    def run_all(self) -> dict[str, Any]:
        """Evaluation, training, evaluation. See `fine_tune`."""
        with saved_when_stopped(lambda: self.step, self._save, self.run.resume_command) as stop:
            if self.before is None:
                self.before = self._evaluate_once()
            self._loop(stop)
            after = self._evaluate_once()
        self._save()
        summary = self._summary(after)
        self.run.finish(summary, "plot_fine_tuning")
        return summary

    def _loop(self, stop: StopAfterStep) -> None:
        config = self.config
        with tqdm(total=config.steps, initial=self.step, desc="sft", unit="step", dynamic_ncols=True) as bar:
            while self.step < config.steps:
                if config.eval_every and self.step % config.eval_every == 0:
                    self._evaluate_once()  # here, so that a run that was stopped before it came to that does
                with stop.delayed():
                    metrics = self.train_step()
                    self.step += 1
                    self.run.log_metrics(metrics)
                    self.steps.append(metrics)
                    self._warn(after_sft_step(self.steps, config))
                bar.update()
                bar.set_postfix(
                    loss=f"{metrics['loss']:.3f}",
                    lr=f"{metrics['lr']:.1e}",
                    tokens_per_s=f"{metrics['timing']['tokens_per_s']:.0f}",
                )
                if config.save_every and self.step % config.save_every == 0 and self.step < config.steps:
                    self._save()

    def _warn(self, warnings: dict[str, str]) -> None:
        for kind, text in warnings.items():
            self.run.warn(self.step, kind, text)

    def train_step(self) -> dict[str, Any]:
        """One optimizer step on the next examples. Returns what was measured: `loss`, nats a token of an answer, before
        the update; `grad_norm`, `lr`, `epoch`; `tokens` and those that were `learned_tokens`; `timing`.

        Raises RuntimeError, and leaves the weights alone, if the loss or its gradient is not finite.
        """
        config, start = self.config, time.perf_counter()
        examples = self.order.sample(config.batch_size)
        learned = sum(int(example.learned.sum()) for example in examples)
        loss = torch.zeros((), device=self.device)
        with without_cudnn_attention():  # widths differ from step to step
            for rows in self._micro_batches(examples):
                of_rows = self._summed_loss(rows) / learned
                of_rows.backward()
                loss += of_rows.detach()
        if not math.isfinite(loss := loss.item()):
            self.optimizer.zero_grad(set_to_none=True)
            raise RuntimeError(
                f"The loss of step {self.step + 1} is not finite. Checkpoints stay as they are: start a new run with a "
                "lower --lr."
            )
        grad_norm = update(self.optimizer, config, self.step)
        seconds, tokens = time.perf_counter() - start, sum(len(example.ids) for example in examples)
        return {
            "step": self.step + 1,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "epoch": self.order.position / len(self.data.train),
            "tokens": tokens,
            "learned_tokens": learned,
            "timing": {
                "step_s": seconds,
                "tokens_per_s": tokens / seconds,
                "peak_memory_bytes": peak_memory_bytes(self.device),
            },
        }

    def _micro_batches(self, examples: list[Example]) -> list[list[Row]]:
        """The examples in rows, those of like length together, `micro_batch_tokens` at a time."""
        rows = sorted(plan_rows(examples, self.config.max_length if self.config.packing else 0), key=tokens_of)
        counts, rest = rows_together([*map(tokens_of, rows)], self.config.micro_batch_tokens), iter(rows)
        return [[*islice(rest, count)] for count in counts]

    def _summed_loss(self, rows: list[Row]) -> torch.Tensor:
        packed = pack(rows, self.policy.pad_id, self.device)
        with autocast(self.config.dtype, self.device):
            return summed_loss(self.policy.model, packed, self.config.logprob_chunk, self.config.compile)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """`loss` on the examples held out, nats a token of an answer, if there are any; what
        `rlcourse.evaluation.summarize` says of greedy answers to the task's problems, if there is one."""
        found: dict[str, Any] = {}
        answers: list[list[Answer]] = []
        examples = self.data.held_out
        if examples:
            with without_cudnn_attention():
                losses = [self._summed_loss(rows).double() for rows in self._micro_batches(examples)]
            found["loss"] = torch.stack(losses).sum().item() / sum(int(example.learned.sum()) for example in examples)
        if self.engine is not None:
            limit = self.config.max_new_tokens
            answers = answer_problems(self.policy, self.engine, self.task, self.problems, limit)
            found |= summarize(answers)
            self.engine.sleep()  # training wants the memory
        losses = [line["loss"] for line in self.run.lines("evals.jsonl") if "loss" in line]
        losses += [found["loss"]] if examples else []
        self._warn(after_sft_evaluation(losses, [answer for [answer] in answers], self.config))
        return found

    def _evaluate_once(self) -> dict[str, Any]:
        """The evaluation after the steps that are done, logged in evals.jsonl: read from there if it has been."""
        logged = [line for line in self.run.lines("evals.jsonl") if line["step"] == self.step]
        if logged:
            return {name: value for name, value in logged[0].items() if name != "step"}
        found = self.evaluate()
        self.run.log_eval({"step": self.step} | found)
        return found

    def _summary(self, after: dict[str, Any]) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": after,
            "examples": len(self.data.train),
            "held_out": len(self.data.held_out),
            "too_long": self.data.too_long,
            "steps": self.step,
            "steps_that_changed_weights": sum(line["grad_norm"] > 0 and line["lr"] > 0 for line in self.steps),
            "warnings": self.run.warned(),
            "wall_seconds": time.perf_counter() - self.clock,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "seed": self.config.seed,
            "folder": str(self.run.path),
            "metrics": self.metrics,
        }

    def _save(self) -> None:
        """Save all that `resume` needs: model or adapter, optimizer, random state, data order, results so far."""
        self.seconds = time.perf_counter() - self.clock
        state = {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(self.device),
            "examples_learned": self.order.position,
            "data": self.data.fingerprint,
            "seconds": self.seconds,
            "before": self.before,
        }
        save_checkpoint(self.run.path, self.step, self.policy, state)

    def _load(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        try:
            data, self.step = state["data"], state["step"]
            self.seconds, self.before = float(state["seconds"]), state["before"]
            self.optimizer.load_state_dict(state["optimizer"])
            self.order.position = state["examples_learned"]
            set_random_state(state["random"], self.device)
            if self.step != step_of(checkpoint) or self.order.position != self.step * self.config.batch_size:
                raise ValueError("another step")
            for parameter, moments in self.optimizer.state.items():
                if any(moments[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
                    raise ValueError("moments of another model")
            check_finite(self.policy, {"optimizer": self.optimizer.state_dict()})
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
            raise damaged(checkpoint, "trainer.pt does not fit the model and the run") from None
        if data != self.data.fingerprint:
            raise ValueError(f"{self.config.data} is not the data that {self.run.path} began with: start a new run.")
        if self.config.steps < self.step:
            raise ValueError(f"{self.run.path} has done {self.step} steps, more than --steps: ask for more.")
        self.run.forget_after(self.step)
