"""The loop of any training: steps, evaluations, warnings, checkpoints, Ctrl-C, and a summary and a curve at the end.

`rlcourse/trainer.py` fills in what is RL, `rlcourse/sft/trainer.py` what is supervised fine-tuning.
"""

import time
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
from rlcourse.distributed.world import ALONE, World
from rlcourse.files import try_folder
from rlcourse.interrupts import StopAfterStep, saved_when_stopped
from rlcourse.measure.profiling import peak_memory_bytes
from rlcourse.measure.timing import PhaseTimer, now
from rlcourse.policy import compile_layers
from rlcourse.runs import RunFolder
from rlcourse.tasks import in_format
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.trial import checkpoint_activations
from rlcourse.watch import check_metrics


def checkpoint_to_resume(run: RunFolder) -> Path:
    """The run's last checkpoint. Raises ValueError if the run has done more steps than it is now asked for."""
    checkpoint, steps = latest_checkpoint(run.path), run.config.steps
    if steps is not None and steps < step_of(checkpoint):
        raise ValueError(f"{run.path} has done {step_of(checkpoint)} steps, more than --steps {steps}: ask for more.")
    return checkpoint


class TrainingLoop:
    """The state of a run, and the loop over its steps.

    A subclass makes `optimizer`, `order` and `metrics` between `start_loading` and `finish_loading`, and has

    - `train_step()`: its metrics, and in RL the completions
    - `warnings(completions)`, `shown(metrics)`: what to warn of, and what the bar shows, after a step
    - `validate()`: what goes to evals.jsonl every `eval_every` steps
    - `test(when)`: what the summary has under "before" and "after"
    """

    name, plot = "train", "plot_run"  # of the progress bar; of the function that draws the curve
    optimizer: torch.optim.Optimizer
    order: PromptSampler  # what the steps train on, in order
    metrics: dict[str, str]  # what an evaluation measures, and its format; the bar shows the first

    def start_loading(
        self, run: RunFolder, device: torch.device, checkpoint: Path | None, world: World = ALONE
    ) -> None:
        """Load the policy, of the checkpoint if there is one, and see that a checkpoint can be written."""
        self.config, self.run, self.device, self.world = run.config, run, device, world
        torch.manual_seed(run.config.seed)
        self.policy = world.load(lambda place: policy_of_run(run.config, place, checkpoint), device)
        # Weights and two moments: without room for one checkpoint a run would end with nothing.
        checkpoint_bytes = 12 * sum(p.numel() for p in self.policy.model.parameters() if p.requires_grad)
        world.first(lambda: try_folder(run.path, "choose another --output", checkpoint_bytes))
        self.step, self.seconds, self.before = 0, 0.0, None
        self.spent = PhaseTimer(device)  # where the run's seconds go

    def finish_loading(self, checkpoint: Path | None) -> None:
        """Prepare the layers as the config says, and go on from the checkpoint, if there is one."""
        if self.config.gradient_checkpointing:
            checkpoint_activations(self.policy.model)
        if self.config.compile:
            compile_layers(self.policy.model)
        if checkpoint is not None:
            self._load(checkpoint)
            self.run.forget_after(self.step)
        self.steps = self.world.first(lambda: self.run.lines("metrics.jsonl"))  # those done before a resume
        self.clock = self.run.began - self.seconds
        self.spent.seconds["starting"] += now(self.device) - self.run.began

    def run_all(self) -> dict[str, Any]:
        """Evaluation, training, evaluation. Returns the content of `summary.json`."""
        self.run.keep_config()
        again, agree, follows = self.run.resume_command, self.world.agree, self.world.rank > 0
        with saved_when_stopped(lambda: self.step, self._save, again, agree, follows) as stop:
            if self.before is None:
                self.before = self.test("before")
            self._loop(stop)
            after = self.test("after")
        self._save()
        summary = self._summary(after)
        self.run.finish(summary, self.plot)
        return summary

    def _loop(self, stop: StopAfterStep) -> None:
        config = self.config
        bar = tqdm(total=config.steps, initial=self.step, desc=self.name, unit="step", dynamic_ncols=True)
        with bar:
            self._validate(bar)  # at the start, and where a run was stopped before it came to that
            while self.step < config.steps:
                with stop.delayed(), self.spent("steps"):
                    metrics, completions = self.train_step()
                    check_metrics(metrics)
                    self.step += 1
                    self.run.log_step(metrics, completions)
                    self.steps.append(metrics)
                    self.warn(self.warnings(completions))
                bar.update()
                bar.set_postfix(self.shown(metrics) | {"tokens_per_s": f"{metrics['timing']['tokens_per_s']:.0f}"})
                self._validate(bar)
                if config.save_every and self.step % config.save_every == 0 and self.step < config.steps:
                    self.world.check_alike(self.policy.model.parameters())
                    self._save()

    def _validate(self, bar: tqdm) -> None:
        if not self.config.eval_every or self.step % self.config.eval_every:
            return
        found, (headline, form) = self.validated(), next(iter(self.metrics.items()), ("loss", ".3f"))
        if headline in found:
            bar.set_description(f"{self.name} (validation {in_format(found[headline], form)})")

    def validated(self) -> dict[str, Any]:
        """The validation after the steps that are done, logged in evals.jsonl: read from there if it has been."""
        lines = self.world.first(lambda: self.run.lines("evals.jsonl"))
        logged = [line for line in lines if line["step"] == self.step]
        if logged:
            return logged[0]
        with self.spent("evaluation"):
            found = {"step": self.step} | self.validate()
        self.run.log_eval(found)
        return found

    def warn(self, warnings: dict[str, str]) -> None:
        for kind, text in warnings.items():
            self.run.warn(self.step, kind, text)

    def _summary(self, after: dict[str, Any]) -> dict[str, Any]:
        return {
            "wall_seconds": time.perf_counter() - self.clock,
            "seconds": dict(self.spent.seconds),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "seed": self.config.seed,
            "steps": self.step,
            "steps_that_changed_weights": sum(line["grad_norm"] > 0 and line["lr"] > 0 for line in self.steps),
            "warnings": self.run.warned(),
            "folder": str(self.run.path),
            "metrics": self.metrics,
            "before": self.before,
            "after": after,
        }

    def _save(self) -> None:
        self.seconds = time.perf_counter() - self.clock
        with self.spent("saving"):
            policy, state = self.world.whole(self.policy, self._state())
            if self.world.rank == 0:  # the others have the same
                save_checkpoint(self.run.path, self.step, policy, state)

    def _state(self) -> dict[str, Any]:
        """All that `resume` needs beside the model: optimizer, random states, data order, results so far."""
        return {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(self.device),
            "sampled": self.order.position,
            "seconds": self.seconds,
            "spent": dict(self.spent.seconds),
            "before": self.before,
        }

    def _load(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        try:
            self._set_state(self.world.part(state, self.optimizer))
            self._check_loaded(step_of(checkpoint))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
            raise damaged(checkpoint, "trainer.pt does not fit the model and the run") from None

    def _set_state(self, state: dict[str, Any]) -> None:
        """Take `_state` back."""
        self.step, self.seconds, self.before = state["step"], state["seconds"], state["before"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.position = state["sampled"]
        self.spent.seconds |= state["spent"]
        set_random_state(state["random"], self.device)

    def _check_loaded(self, step: int) -> None:
        """Raise ValueError unless the loaded state is one that this config can have after `step` steps."""
        numbers = (self.step, int), (self.order.position, int), (self.seconds, float)
        if self.step != step or not all(type(number) is kind and number >= 0 for number, kind in numbers):
            raise ValueError("another step, or no numbers")
        for parameter, moments in self.optimizer.state.items():
            if any(moments[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
                raise ValueError("moments of another model")
        check_finite(self.policy, {"optimizer": self.optimizer.state_dict()})
