"""The training loop: rollout → reward → advantages → update, its phases timed, its state saved, its curve drawn."""

import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rlcourse.checkpoint import latest_checkpoint, load_state, random_state, save_checkpoint, set_random_state
from rlcourse.config import TrainConfig
from rlcourse.evaluation import answer_problems, evaluate_test, summarize
from rlcourse.experience import Experience, PromptOrder, add_advantages, collect
from rlcourse.measure.profiling import PhaseTimer, peak_memory_bytes
from rlcourse.policy import (
    ValueHead,
    checkpoint_activations,
    compile_layers,
    find_device,
    frozen_copy,
    load_policy,
)
from rlcourse.rollout import make_engine
from rlcourse.runs import RunFolder, open_run
from rlcourse.tasks import Problem, load_task
from rlcourse.update import Update


def train(config: TrainConfig, resume: bool = False) -> dict[str, Any]:
    """Train as `config` says and return what `summary.json` holds.

    Raises ValueError or FileNotFoundError in one sentence for what cannot work. Ctrl-C ends the run after the step that
    is under way, with a checkpoint, and raises KeyboardInterrupt.
    """
    device = find_device(config)
    run = open_run(config, resume)
    checkpoint = latest_checkpoint(run.path) if resume else None
    try:
        return Trainer(config, run, device, checkpoint).run_all()
    finally:
        run.remove_unless_begun()


class Trainer:
    """Everything a run holds, and its steps in order."""

    def __init__(self, config: TrainConfig, run: RunFolder, device: torch.device, checkpoint: Path | None):
        self.config, self.run, self.device = config, run, device
        torch.manual_seed(config.seed)
        self.task = load_task(config.task, config.data_dir)
        start = load_policy(config.model, device) if checkpoint is None or config.needs_reference else None
        self.reference = frozen_copy(start.model) if config.needs_reference else None
        self.policy = start if checkpoint is None else load_policy(str(checkpoint), device)
        if config.gradient_checkpointing:
            checkpoint_activations(self.policy.model)
        if config.compile:
            compile_layers(self.policy.model)
        hidden_size = self.policy.model.config.hidden_size
        self.value_head = ValueHead(hidden_size).to(device) if config.advantage == "gae" else None
        longest = config.max_prompt_tokens + config.max_new_tokens
        self.engine = make_engine(self.policy, config.engine, getattr(torch, config.dtype), config.compile, longest)
        self.update = Update(self.policy, self.value_head, config)
        self.order = PromptOrder(self._short_enough(self.task.problems("train")), config.seed)
        self.step, self.seconds, self.before = 0, 0.0, None
        if checkpoint is not None:
            self._load(checkpoint)
        self.clock = time.perf_counter() - self.seconds
        self.timer = PhaseTimer(device)

    def _short_enough(self, problems: list[Problem]) -> list[Problem]:
        """Problems whose prompt fits `max_prompt_tokens`."""
        limit = self.config.max_prompt_tokens
        kept = [p for p in problems if len(self.policy.prompt(p.question, self.task.instruction)) <= limit]
        if len(kept) < self.config.num_prompts:
            raise ValueError(
                f"Only {len(kept)} of {len(problems)} training problems have at most {limit} prompt tokens: "
                "raise max_prompt_tokens."
            )
        return kept

    def run_all(self) -> dict[str, Any]:
        """Evaluation, training, evaluation. See `train`."""
        try:
            with StopAfterStep() as stop:
                if self.before is None:
                    self.before = self._test("before")
                self._loop(stop)
                after = self._test("after")
        except KeyboardInterrupt:
            if stop.inside:  # half a step is no state to go on from
                said = f"Stopped within step {self.step + 1}. Go on from the last checkpoint, if there is one, with:"
            else:
                self._save()
                said = f"Stopped at step {self.step}. Go on with:"
            tqdm.write(f"{said} {self.run.resume_command()}")
            raise
        self._save()
        summary = self._summary(after)
        self.run.finish(summary)
        return summary

    def _loop(self, stop: "StopAfterStep") -> None:
        config = self.config
        bar = tqdm(total=config.steps, initial=self.step, desc="train", unit="step", dynamic_ncols=True)
        with bar:
            self._validate(bar)  # at the start, and where a run was stopped before it came to that
            while self.step < config.steps:
                with stop.delayed():
                    metrics, experience = self._train_step()
                    self.step += 1
                    self.run.log_step(metrics, experience)
                bar.update()
                bar.set_postfix(
                    reward=f"{metrics['reward']:.2f}",
                    accuracy=f"{metrics['accuracy']:.2f}",
                    tokens_per_s=f"{metrics['timing']['tokens_per_s']:.0f}",
                )
                self._validate(bar)
                if config.save_every and self.step % config.save_every == 0 and self.step < config.steps:
                    self._save()

    def _train_step(self) -> tuple[dict[str, Any], Experience]:
        """One step: rollout, reward, advantages, update; and what was measured."""
        timer = self.timer
        timer.take()
        with timer("step"):
            experience = collect(self.policy, self.engine, self.task, self.order, self.config, timer)
            if self.config.sleep:
                self.engine.sleep()
            with timer("advantages"):
                add_advantages(experience, self.policy, self.reference, self.value_head, self.config)
            with timer("update"):
                updated = self.update(experience, self.step)
        timing = timer.take()
        timing["tokens_per_s"] = int(experience.rollout.lengths.sum()) / timing["rollout_s"]
        timing["peak_memory_bytes"] = peak_memory_bytes(self.device)
        measured = {"step": self.step + 1} | rollout_metrics(experience) | updated
        return measured | {"timing": timing}, experience

    def _validate(self, bar: tqdm) -> None:
        """Greedy accuracy on the validation problems, into evals.jsonl: every `eval_every` steps, once."""
        every = self.config.eval_every
        if not every or self.step % every or self.run.has_eval(self.step):
            return
        problems = self.task.problems("validation")[: self.config.eval_validation]
        answers = answer_problems(self.policy, self.engine, self.task, problems, self.config.max_new_tokens)
        summary = summarize(answers)
        self.run.log_eval({"step": self.step} | summary)
        bar.set_description(f"train (validation {summary['accuracy']:.1%})")

    def _test(self, when: str) -> dict[str, Any]:
        return evaluate_test(self.policy, self.engine, self.task, self.config, when)

    def _summary(self, after: dict[str, Any]) -> dict[str, Any]:
        before = self.before
        return {
            "accuracy_before": before["accuracy"],
            "accuracy_after": after["accuracy"],
            "eval_problems": after["problems"],
            "wall_seconds": time.perf_counter() - self.clock,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "seed": self.config.seed,
            "steps": self.step,
            "folder": str(self.run.path),
            "before": before,
            "after": after,
        }

    def _save(self) -> None:
        """A complete checkpoint: model, optimizer, value head, random states, data order, results so far."""
        self.seconds = time.perf_counter() - self.clock
        state = {
            "step": self.step,
            "optimizer": self.update.optimizer.state_dict(),
            "value_head": None if self.value_head is None else self.value_head.state_dict(),
            "random": random_state(self.device),
            "prompts_drawn": self.order.position,
            "seconds": self.seconds,
            "before": self.before,
        }
        save_checkpoint(self.run.path, self.step, self.policy, state)

    def _load(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        self.step, self.seconds, self.before = state["step"], state["seconds"], state["before"]
        self.update.optimizer.load_state_dict(state["optimizer"])
        if self.value_head is not None:
            self.value_head.load_state_dict(state["value_head"])
        self.order.position = state["prompts_drawn"]
        set_random_state(state["random"], self.device)
        self.run.forget_after(self.step)


def rollout_metrics(experience: Experience) -> dict[str, float | None]:
    """What the rollout of a step says: rewards, accuracy by both readings, lengths of right and wrong answers."""
    finished = experience.rollout.finished.tolist()
    lengths = experience.rollout.lengths.tolist()
    right = [done and v.strict for done, v in zip(finished, experience.verdicts, strict=True)]

    def mean(values: list) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "reward": experience.rewards.mean().item(),
        "accuracy": mean(right),
        "accuracy_lenient": mean([d and v.lenient for d, v in zip(finished, experience.verdicts, strict=True)]),
        "formatted": mean([d and v.formatted for d, v in zip(finished, experience.verdicts, strict=True)]),
        "truncated": 1.0 - mean(finished),
        "length": mean(lengths),
        "length_right": mean([n for n, ok in zip(lengths, right, strict=True) if ok]),
        "length_wrong": mean([n for n, ok in zip(lengths, right, strict=True) if not ok]),
        "groups_without_signal": 1.0 - experience.groups_with_signal,
    }


class StopAfterStep:
    """Holds Ctrl-C back while a step is under way, so that what is saved is never half a step."""

    def __enter__(self) -> "StopAfterStep":
        self.inside, self.asked = False, False
        try:
            self.previous = signal.signal(signal.SIGINT, self._asked)
        except ValueError:  # not the main thread: a notebook's worker; Ctrl-C goes elsewhere
            self.previous = None
        return self

    def __exit__(self, *_) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)

    def _asked(self, *_) -> None:
        if not self.inside or self.asked:
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

    @contextmanager
    def delayed(self):
        """While inside, Ctrl-C waits for the end; a second one does not."""
        self.inside = True
        yield
        self.inside = False  # an interrupted step leaves it True
        if self.asked:
            raise KeyboardInterrupt
