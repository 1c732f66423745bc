"""The training loop: steps, validation, checkpoints, and a curve at the end."""

import time
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
from rlcourse.config import TrainConfig
from rlcourse.distributed import check_launch, share_of
from rlcourse.distributed.world import ALONE, Alone, World, start_world
from rlcourse.evaluation import answer_problems, answer_test, summarize, summarize_test
from rlcourse.files import try_folder
from rlcourse.interrupts import StopAfterStep, saved_when_stopped
from rlcourse.learner import Learner
from rlcourse.measure.memory import check_memory
from rlcourse.measure.profiling import peak_memory_bytes
from rlcourse.measure.timing import PhaseTimer, now
from rlcourse.policy import Policy, checkpoint_activations, compile_layers, load_policy
from rlcourse.rollout import RolloutEngine, make_engine
from rlcourse.runs import RunFolder, new_run, run_to_resume
from rlcourse.step import train_step
from rlcourse.tasks import in_format, task_of
from rlcourse.tasks.judged import with_judge
from rlcourse.tasks.prompts import PromptSampler, short_enough
from rlcourse.watch import after_step, before_training, check_metrics


def train(config: TrainConfig, began: float | None = None) -> dict[str, Any]:
    """Train as `config` says and return the content of `summary.json`.

    began: `time.perf_counter()` when the clock of the run started; now, if not given.

    Raises ValueError or OSError, in one sentence, for a run that cannot work, and RuntimeError if weights or losses
    stop being finite. On Ctrl-C or SIGTERM the current step is finished, a checkpoint is saved and KeyboardInterrupt is
    raised.
    """
    with start_world() as world:
        world = world_of(config, world)
        device = world.device(config)
        run = world.run(lambda: new_run(config))
        run.began = began or run.began
        try:
            return Trainer(run, device, world=world).run_all()
        finally:
            run.remove_unless_begun()


def resume(**settings: Any) -> dict[str, Any]:
    """Continue a run from its last checkpoint, with the settings that it was started with; see `train`.

    settings: those that identify the run (`name`, or preset, algorithm and seed; `output`), and those to change from
    now on. Raises ValueError for one that cannot change.
    """
    with start_world() as world:
        run = world.run(lambda: run_to_resume(settings))
        world = world_of(run.config, world)
        device, checkpoint = world.device(run.config), world.first(lambda: latest_checkpoint(run.path))
        if run.config.steps < step_of(checkpoint):
            raise ValueError(
                f"{run.path} has done {step_of(checkpoint)} steps, more than --steps {run.config.steps}: ask for more."
            )
        return Trainer(run, device, checkpoint, world).run_all()


def world_of(config: TrainConfig, world: Alone | World) -> Alone | World:
    """The world, for ranks that have a part of the model each where the config says so. Sends nothing."""
    check_launch(config)
    if not config.shard:
        return world
    from rlcourse.distributed.sharded import ShardedWorld

    return ShardedWorld(world.store, world.rank, world.size)


def engine_of_run(policy: Policy, config: TrainConfig) -> RolloutEngine:
    """The config's engine, with room for prompts and answers of full length."""
    longest = config.max_prompt_tokens + config.max_new_tokens
    dtype = getattr(torch, config.dtype)
    return make_engine(policy, config.engine, dtype, config.compile, longest, config.cache_gb, config.sleep)


class Trainer:
    """The state of a run, and the loop over its steps."""

    def __init__(
        self, run: RunFolder, device: torch.device, checkpoint: Path | None = None, world: Alone | World = ALONE
    ):
        config = run.config
        self.config, self.run, self.device, self.world = config, run, device, world
        torch.manual_seed(config.seed)
        task = task_of(config)
        answers = run.path / ("judge.jsonl" if world.rank == 0 else f"judge.{world.rank}.jsonl")
        self.task, self.judged = world.task(task), world.task(with_judge(task, config, answers))
        self.headline = next(iter(self.task.metrics))
        self.policy = world.load(lambda place: policy_of_run(config, place, checkpoint), device)
        start = None
        if config.needs_reference and (checkpoint is not None or config.shard) and not config.lora_rank:
            start = world.load(lambda place: load_policy(config.model, place), device)  # an adapter has its base below
        check_memory(share_of(config, world.size), self.policy.model.config, device, world.size)
        # Weights and two moments: without room for one checkpoint a run would end with nothing.
        checkpoint_bytes = 12 * sum(p.numel() for p in self.policy.model.parameters() if p.requires_grad)
        world.first(lambda: try_folder(run.path, "choose another --output", checkpoint_bytes))
        self.learner = Learner(self.policy, config, start and start.model, world)
        if config.gradient_checkpointing:
            checkpoint_activations(self.policy.model)
        if config.compile:
            compile_layers(self.policy.model)
        self.engine = world.engine(engine_of_run(self.policy, config), device)
        problems = short_enough(self.task.problems("train"), self.task, self.policy, config)
        self.prompts = PromptSampler(problems, config.seed)
        self.step, self.seconds, self.before = 0, 0.0, None
        self.spent = PhaseTimer(device)  # where the run's seconds go
        if checkpoint is not None:
            self._load(checkpoint)
        self.steps = self.world.first(lambda: self.run.lines("metrics.jsonl"))  # those done before a resume
        self.clock = run.began - self.seconds
        self.spent.seconds["starting"] += now(device) - run.began

    def run_all(self) -> dict[str, Any]:
        """Evaluation, training, evaluation. See `train`."""
        self.run.keep_config()
        self._say_if_two_sets_of_numbers()
        again, agree, follows = self.run.resume_command, self.world.agree, self.world.rank > 0
        with saved_when_stopped(lambda: self.step, self._save, again, agree, follows) as stop:
            if self.before is None:
                self.before = self._test("before")
            self._loop(stop)
            after = self._test("after")
        self._save()
        summary = self._summary(after)
        self.run.finish(summary)
        return summary

    def _say_if_two_sets_of_numbers(self) -> None:
        """In 16 bits, engine and trainer round differently but where both are exact. vLLM rounds differently in any
        case."""
        plain = self.config.dtype == "float32" and not self.config.engine.startswith("vllm")
        if plain or (self.engine.exact and self.learner.exact):
            return
        tqdm.write(
            f"Engine and trainer round differently on {self.device}: `mismatch_mean` in "
            "metrics.jsonl says by how much, and --sampler-correction token makes up for it."
        )

    def _loop(self, stop: "StopAfterStep") -> None:
        config = self.config
        bar = tqdm(total=config.steps, initial=self.step, desc="train", unit="step", dynamic_ncols=True)
        with bar:
            self._validate(bar)  # at the start, and where a run was stopped before it came to that
            while self.step < config.steps:
                with stop.delayed(), self.spent("steps"):
                    metrics, completions = train_step(self.learner, self.engine, self.judged, self.prompts, self.step)
                    check_metrics(metrics)
                    self.step += 1
                    self.run.log_step(metrics, completions)
                    self.steps.append(metrics)
                    self._warn(after_step(self.steps, completions.answers, completions.rewards.tolist(), config))
                bar.update()
                shown = {name: in_format(metrics[name], ".2f") for name in ("reward", *islice(self.task.metrics, 2))}
                bar.set_postfix(shown | {"tokens_per_s": f"{metrics['timing']['tokens_per_s']:.0f}"})
                self._validate(bar)
                if config.save_every and self.step % config.save_every == 0 and self.step < config.steps:
                    self.world.check_alike(self.policy.model.parameters())
                    self._save()

    def _validate(self, bar: tqdm) -> None:
        """Log what greedy answers to validation problems say to evals.jsonl: every `eval_every` steps, once each."""
        every = self.config.eval_every
        if not every or self.step % every or self.world.first(lambda: self.run.has_eval(self.step)):
            return
        problems = self.task.problems("validation")[: self.config.eval_validation]
        with self.spent("evaluation"):
            answers = answer_problems(self.policy, self.engine, self.task, problems, self.config.max_new_tokens)
        summary = summarize(answers)
        self.run.log_eval({"step": self.step} | summary | {"seconds": time.perf_counter() - self.clock})
        shown = in_format(summary[self.headline], self.task.metrics[self.headline])
        bar.set_description(f"train (validation {shown})")

    def _test(self, when: str) -> dict[str, Any]:
        with self.spent("evaluation"):
            greedy, sampled = answer_test(self.policy, self.engine, self.task, self.config, when)
        if when == "before":
            self._warn(before_training([answer for [answer] in greedy], sampled, self.config))
        return summarize_test(greedy, sampled)

    def _warn(self, warnings: dict[str, str]) -> None:
        for kind, text in warnings.items():
            self.run.warn(self.step, kind, text)

    def _summary(self, after: dict[str, Any]) -> dict[str, Any]:
        before, first = self.before, self.task.problems("test")[0]
        return {
            f"{self.headline}_before": before[self.headline],
            f"{self.headline}_after": after[self.headline],
            "eval_problems": after["problems"],
            "wall_seconds": time.perf_counter() - self.clock,
            "seconds": dict(self.spent.seconds),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "seed": self.config.seed,
            "steps": self.step,
            "steps_that_changed_weights": sum(line["grad_norm"] > 0 and line["lr"] > 0 for line in self.steps),
            "warnings": self.run.warned(),
            "folder": str(self.run.path),
            "metrics": self.task.metrics,
            "prompt": self.policy.tokenizer.decode(self.task.prompt(first, self.policy)),  # how the model is asked
            "before": before,
            "after": after,
        }

    def _save(self) -> None:
        """Save all that `resume` needs: model, optimizer, value head, random states, data order, results so far."""
        self.seconds = time.perf_counter() - self.clock
        state = {
            "step": self.step,
            "optimizer": self.learner.optimizer.state_dict(),
            "value_head": self.learner.value_head and self.learner.value_head.state_dict(),
            "random": random_state(self.device),
            "prompts_sampled": self.prompts.position,
            "seconds": self.seconds,
            "spent": dict(self.spent.seconds),
            "before": self.before,
        }
        with self.spent("saving"):
            policy, state = self.world.whole(self.policy, state)
            if self.world.rank == 0:  # the others have the same
                save_checkpoint(self.run.path, self.step, policy, state)

    def _load(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        try:
            state = self.world.part(state, self.learner)
            self.step, self.seconds, self.before = state["step"], state["seconds"], state["before"]
            self.learner.optimizer.load_state_dict(state["optimizer"])
            if self.learner.value_head is not None:
                self.learner.value_head.load_state_dict(state["value_head"])
            self.prompts.position = state["prompts_sampled"]
            self.spent.seconds |= state["spent"]
            set_random_state(state["random"], self.device)
            self._check_loaded(step_of(checkpoint))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
            raise damaged(checkpoint, "trainer.pt does not fit the model and the run") from None
        self.run.forget_after(self.step)

    def _check_loaded(self, step: int) -> None:
        """Raise ValueError unless the loaded state is one that this config can have after `step` steps."""
        numbers = (self.step, int), (self.prompts.position, int), (self.seconds, float)
        if self.step != step or not all(type(number) is kind and number >= 0 for number, kind in numbers):
            raise ValueError("another step, or no numbers")
        for parameter, moments in self.learner.optimizer.state.items():
            if any(moments[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
                raise ValueError("moments of another model")
        check_finite(self.policy, {"optimizer": self.learner.optimizer.state_dict()})
        if self.before is not None and self.headline not in self.before:
            raise ValueError("no evaluation")
