"""The RL trainer on one page: the loop of a run, the training step and the optimizer's update.

    rollout -> reward -> advantages -> loss -> optimizer

`rlcourse/sft/trainer.py` does supervised fine-tuning in the same loop.
"""

import math
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from rlcourse.batch import plan_minibatches
from rlcourse.checkpoint import at_checkpoint, policy_of_run, restore, save, saving_in_background
from rlcourse.collect import Completions, RewardFunction, answer_rewards, collect
from rlcourse.config import TrainConfig
from rlcourse.device import without_cudnn_attention
from rlcourse.dist import ALONE, OneProcess, full_tensor, share_of
from rlcourse.distributed import launch
from rlcourse.evaluation import answer_problems, answer_test, summarize, summarize_test
from rlcourse.files import try_folder
from rlcourse.interrupts import StopAfterStep, progress_bar, say
from rlcourse.learner import Learner, compute_old_logprobs, lr_factor, make_batch
from rlcourse.losses import aggregate, kl_estimate, sampler_correction, token_loss, value_loss
from rlcourse.measure.timing import PhaseTimer, now
from rlcourse.metrics import Means, run_summary, step_metrics, step_timing
from rlcourse.policy import compile_layers, digest, load_policy
from rlcourse.rollout import RolloutEngine, make_engine
from rlcourse.runs import RunFolder, new_run, run_to_resume
from rlcourse.tasks import Task, in_format, overlaps, task_of
from rlcourse.tasks.prompts import PromptSampler, fingerprint, short_enough
from rlcourse.watch import after_step, before_training, check_metrics, left_out, warn_of_mismatch

SAMPLER_CAP = 2.0  # the largest weight that makes up for a sampler's log-probs
VALUE_CLIP, VALUE_COEF = 0.2, 0.5  # of PPO
MAX_GRAD_NORM = 1.0  # gradients of a larger norm are scaled down to it


def train(config: TrainConfig, began: float | None = None) -> dict[str, Any]:
    """Train as `config` says and return the content of `summary.json`. began: `time.perf_counter()` when the clock of
    the run started; now, if not given.

    Raises ValueError or OSError, in one sentence, for a run that cannot work, and RuntimeError if weights or losses
    stop being finite. On Ctrl-C, SIGTERM or SIGHUP the current step is finished, a checkpoint is saved and
    KeyboardInterrupt is raised.
    """
    with launch(lambda: new_run(config)) as (run, device, world):
        run.began = began or run.began
        return Trainer(run, device, world).run_all()


def resume(**settings: Any) -> dict[str, Any]:
    """Continue a run from its last checkpoint; see `train`. settings: those that identify the run (`name`, or preset,
    algorithm and seed; `output`), and those to change. Raises ValueError for one that cannot change."""
    with launch(lambda: at_checkpoint(run_to_resume(settings))) as (run, device, world):
        return Trainer(run, device, world).run_all()


class TrainingLoop:
    """A run and the loop over its steps: evaluations, warnings, checkpoints, Ctrl-C.

    A subclass sets `optimizer`, `data_sampler` and `metrics` between `setup` and `finish_setup`, and has
    `train_step()`: the step's metrics, and in RL its completions; `warnings(completions)`; `shown(metrics)` by the bar;
    `validate()`: what goes to evals.jsonl every `eval_every` steps; `test(when)`: what the summary keeps as "before"
    and "after"; `summary(after)`.
    """

    name, curves = "train", "RL"  # of the progress bar; of what the picture shows
    optimizer: torch.optim.Optimizer
    data_sampler: PromptSampler  # what each step trains on
    metrics: dict[str, str]  # what an evaluation measures, and its format; the bar shows the first
    value_head: torch.nn.Module | None = None
    data_digest: str
    reference_digest: str | None = None  # of the weights, where a reference is loaded again to go on

    def setup(self, run: RunFolder, device: torch.device, world: OneProcess = ALONE) -> None:
        """Load the policy, from the run's checkpoint if it has one, and see that another can be written."""
        self.config, self.run, self.device, self.world = run.config, run, device, world
        torch.manual_seed(run.config.seed)
        self.policy = world.load(lambda place: policy_of_run(run.config, place, run.checkpoint), device)
        learned = sum(p.numel() for p in self.policy.model.parameters() if p.requires_grad)
        try_folder(run.path, "choose another --output", 12 * learned)  # weights and two moments
        self.step, self.steps, self.seconds, self.test_before = 0, [], 0.0, None
        self.spent = PhaseTimer(device)  # where the run's seconds go

    def finish_setup(self) -> None:
        """Prepare the layers as the config says, and restore the run's checkpoint, if it has one."""
        if self.config.gradient_checkpointing:
            from rlcourse.trial import checkpoint_activations

            checkpoint_activations(self.policy.model)
        if self.config.compile:
            compile_layers(self.policy.model)
        if self.run.checkpoint is not None:
            restore(self)
            self.steps = self.run.go_on_from(self.step)
        self.clock = self.run.began - self.seconds
        self.spent.seconds["starting"] += now(self.device) - self.run.began

    def run_all(self) -> dict[str, Any]:
        """Evaluation, training, evaluation. Returns the content of `summary.json`."""
        config = self.config
        with self.run, StopAfterStep(self, save) as stop:
            self.run.keep_config()
            if self.test_before is None:
                self.test_before = self.test("before")
            with progress_bar(self.name, config.steps, initial=self.step) as bar:
                self.validate_if_due(bar)  # at the start, and where a run was stopped before it came to that
                while self.step < config.steps:
                    with stop.delayed(), self.spent("steps"):
                        metrics, completions = self.train_step()
                        check_metrics(metrics)
                        self.step += 1
                        self.run.log_step(metrics, completions)
                        self.steps.append(metrics)
                        self.run.warn(self.step, self.warnings(completions))
                    bar.update()
                    bar.set_postfix(self.shown(metrics) | {"tokens_per_s": f"{metrics['timing']['tokens_per_s']:.0f}"})
                    self.validate_if_due(bar)
                    if config.save_every and self.step % config.save_every == 0 and self.step < config.steps:
                        save(self)
            with saving_in_background(self):
                after = self.test("after")
            summary = self.summary(after)
            self.run.finish(summary, self.curves)
            return summary

    def validate_if_due(self, bar: tqdm) -> None:
        if self.config.eval_every and self.step % self.config.eval_every == 0:
            found, (headline, form) = self.logged_validation(), next(iter(self.metrics.items()), ("loss", ".3f"))
            if headline in found:
                value = in_format(found[headline], form)
                bar.set_description(f"{self.name} (validation {value})")
                if bar.disable:
                    say(f"Step {self.step} of {self.config.steps}: validation {headline} {value}.")

    def logged_validation(self) -> dict[str, Any]:
        """The validation at this step, logged in evals.jsonl, or read from there if it has been."""
        logged = [line for line in self.run.lines("evals.jsonl") if line["step"] == self.step]
        if logged:
            return logged[0]
        with self.spent("evaluation"):
            found = {"step": self.step} | self.validate()
        self.run.log_eval(found)
        return found


class Trainer(TrainingLoop):
    """An RL run."""

    def __init__(self, run: RunFolder, device: torch.device, world: OneProcess = ALONE):
        config, task, initial = run.config, task_of(run.config), None
        self.setup(run, device, world)
        training_task = task
        if config.judge is not None:
            from rlcourse.tasks.llm_judge import JudgedTask  # a laptop has none

            answers = run.path / ("judge.jsonl" if world.rank == 0 else f"judge.{world.rank}.jsonl")
            training_task = JudgedTask(task, config.judge, answers)
        dtype, longest = getattr(torch, config.dtype), config.max_prompt_tokens + config.max_new_tokens
        self.metrics, self.headline = task.metrics, next(iter(task.metrics))
        # The policy is no longer what it began as. An adapter needs no second model: it has its base below.
        if config.needs_reference and (run.checkpoint is not None or config.shard) and not config.lora_rank:
            initial = world.load(lambda place: load_policy(config.model, place), device)
        self.learner = Learner(self.policy, config, initial and initial.model, world)
        self.optimizer, self.value_head = self.learner.optimizer, self.learner.value_head
        if not config.model.startswith("embedded") or device.type == "cuda":  # the smallest needs no check on a laptop
            from rlcourse.memory import check_memory

            check_memory(share_of(config, world.size), self.policy.model.config, device, world.size)
        engine = make_engine(self.policy, config.engine, dtype, config.compile, longest, config.cache_gb, config.sleep)
        self.engine, self.task, self.training_task = world.shared(engine, task, training_task)
        kept = short_enough(task.problems("train"), task, self.policy, config)
        why = f"training problems, whose prompts have more than {config.max_prompt_tokens} tokens"
        few = left_out(len(kept), len(task.problems("train")), why, "raise --max-prompt-tokens")
        run.warn(0, overlaps(task) | few)
        self.data_sampler, self.data_digest = PromptSampler(kept, config.seed), fingerprint(task, self.policy)
        if config.needs_reference and not config.lora_rank:
            self.reference_digest = digest((initial or self.policy).model)
        warn_of_mismatch(config, engine.exact and self.learner.exact, device)
        self.finish_setup()

    def train_step(self) -> tuple[dict[str, Any], Completions]:
        return train_step(self.learner, self.engine, self.training_task, self.data_sampler, self.step)

    def warnings(self, completions: Completions) -> dict[str, str]:
        return after_step(self.steps, completions.answers, completions.rewards.tolist(), self.config)

    def shown(self, metrics: dict[str, Any]) -> dict[str, str]:
        return {name: in_format(metrics[name], ".2f") for name in ("reward", *islice(self.metrics, 2))}

    def validate(self) -> dict[str, Any]:
        problems, limit = self.task.problems("validation")[: self.config.eval_validation], self.config.max_new_tokens
        found = summarize(answer_problems(self.policy, self.engine, self.task, problems, limit))
        return found | {"seconds": time.perf_counter() - self.clock}

    def test(self, when: str) -> dict[str, Any]:
        with self.spent("evaluation"):
            greedy, sampled = answer_test(self.policy, self.engine, self.task, self.config, when)
        if when == "before":
            self.run.warn(self.step, before_training([answer for [answer] in greedy], sampled, self.config))
        return summarize_test(greedy, sampled)

    def summary(self, after: dict[str, Any]) -> dict[str, Any]:
        first = self.task.problems("test")[0]
        return run_summary(self, after) | {
            f"{self.headline}_before": self.test_before[self.headline],
            f"{self.headline}_after": after[self.headline],
            "eval_problems": after["problems"],
            "prompt": self.policy.tokenizer.decode(self.task.prompt(first, self.policy)),  # how the model is asked
        }


def train_step(
    learner: Learner,
    engine: RolloutEngine,
    task: Task,
    prompts: PromptSampler,
    step: int,
    reward_function: RewardFunction = answer_rewards,
) -> tuple[dict[str, Any], Completions]:
    """Training step number `step` (from 0), with the settings of `learner.config`. Returns what was measured
    (`rlcourse/metrics.py`), and the completions that it trained on."""
    config = learner.config
    timer, means, grad_norms = PhaseTimer(learner.policy.device), Means(), []
    with without_cudnn_attention(), timer("step"):
        completions, sampled = collect(learner.policy, engine, task, prompts, config, reward_function, timer)
        if config.sleep:
            engine.sleep()
        batch = make_batch(learner, completions, timer)
        with timer("update"):
            minibatches = plan_minibatches(batch, config, learner.exact, learner.world)
            batch = replace(batch, old_logprobs=compute_old_logprobs(learner, engine, batch, minibatches))
            for minibatch in minibatches:
                for rows in minibatch.micro_batches:
                    micro_batch = batch[rows]
                    rollout, mask, counts = micro_batch.rollout, micro_batch.loss_mask, minibatch.counts
                    logprobs, values = learner.logprobs_and_values(rollout)
                    old_logprobs = logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs
                    losses, clipped = token_loss(
                        logprobs, old_logprobs, micro_batch.advantages, mask, surrogate=config.surrogate,
                        ratio=config.ratio, clip_low=config.clip_low, clip_high=config.clip_high,
                    )  # fmt: skip
                    sampler_logprobs = rollout.logprobs
                    sampler_weights = sampler_correction(
                        old_logprobs, sampler_logprobs, mask, config.sampler_correction, SAMPLER_CAP
                    )
                    loss = aggregate(sampler_weights * losses, mask, config.aggregation, **counts)
                    if config.kl_coef:
                        kl = kl_estimate(logprobs, micro_batch.ref_logprobs, mask)
                        loss = loss + config.kl_coef * aggregate(kl, mask, config.aggregation, **counts)
                    if values is not None:
                        value_losses = value_loss(values, micro_batch.values, micro_batch.returns, mask, VALUE_CLIP)
                        loss = loss + VALUE_COEF * aggregate(value_losses, mask, "token_mean", **counts)
                        means.add("value_loss", value_losses, mask)
                    loss.backward()
                    means.add("policy_loss", losses, mask)
                    means.add("clip_fraction", clipped, mask)
                    means.add("mismatch", (old_logprobs - sampler_logprobs).abs(), rollout.completion_mask)
                    means.add("sampler_ratio", (old_logprobs - sampler_logprobs).exp(), rollout.completion_mask)
                learner.world.all_reduce_gradients(learner.parameters)
                grad_norms.append(update(learner.optimizer, config, step))
    metrics = {"step": step + 1} | step_metrics(batch, sampled, config, means.together(learner.world))
    grad_norm, lr = sum(grad_norms) / len(grad_norms), learner.optimizer.param_groups[0]["lr"]
    return metrics | {"grad_norm": grad_norm, "lr": lr, "timing": step_timing(timer, sampled)}, completions


def update(optimizer: torch.optim.Optimizer, config: Any, step: int) -> float:
    """Clip the accumulated gradients, set the learning rate of training step `step` (from 0), and step the optimizer.
    Returns the gradient's norm before it was clipped. config: with steps, warmup_steps and schedule. Raises
    RuntimeError and leaves the weights alone if the gradient is not finite."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)).item()
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)  # or a caller who goes on would add to them
        raise RuntimeError("The gradient is not finite, so the weights were left alone: try a lower --lr.")
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * lr_factor(step, config)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm
