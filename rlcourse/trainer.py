"""RL training: what `rlcourse/loop.py` repeats, with its task, engine and learner."""

import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rlcourse.batch import Completions
from rlcourse.config import TrainConfig
from rlcourse.distributed import check_launch, share_of
from rlcourse.distributed.world import ALONE, World, start_world
from rlcourse.evaluation import answer_problems, answer_test, summarize, summarize_test
from rlcourse.learner import Learner
from rlcourse.loop import TrainingLoop, checkpoint_to_resume
from rlcourse.measure.memory import check_memory
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import RolloutEngine, make_engine
from rlcourse.runs import RunFolder, new_run, run_to_resume
from rlcourse.step import train_step
from rlcourse.tasks import in_format, task_of
from rlcourse.tasks.judged import with_judge
from rlcourse.tasks.prompts import PromptSampler, short_enough
from rlcourse.watch import after_step, before_training


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
        device, checkpoint = world.device(run.config), world.first(lambda: checkpoint_to_resume(run))
        return Trainer(run, device, checkpoint, world).run_all()


def world_of(config: TrainConfig, world: World) -> World:
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


class Trainer(TrainingLoop):
    """An RL run. Its steps are those of `rlcourse.step.train_step`."""

    def __init__(self, run: RunFolder, device: torch.device, checkpoint: Path | None = None, world: World = ALONE):
        config, task = run.config, task_of(run.config)
        self.start_loading(run, device, checkpoint, world)
        answers = run.path / ("judge.jsonl" if world.rank == 0 else f"judge.{world.rank}.jsonl")
        self.task, self.judged = world.task(task), world.task(with_judge(task, config, answers))
        self.metrics, self.headline = self.task.metrics, next(iter(self.task.metrics))
        start = None
        if config.needs_reference and (checkpoint is not None or config.shard) and not config.lora_rank:
            start = world.load(lambda place: load_policy(config.model, place), device)  # an adapter has its base below
        check_memory(share_of(config, world.size), self.policy.model.config, device, world.size)
        self.learner = Learner(self.policy, config, start and start.model, world)
        self.optimizer = self.learner.optimizer
        self.engine = world.engine(engine_of_run(self.policy, config), device)
        self.order = PromptSampler(short_enough(task.problems("train"), task, self.policy, config), config.seed)
        self.finish_loading(checkpoint)

    def run_all(self) -> dict[str, Any]:
        """See `train`."""
        self._say_if_two_sets_of_numbers()
        return super().run_all()

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

    def train_step(self) -> tuple[dict[str, Any], Completions]:
        """See `rlcourse.step.train_step`."""
        return train_step(self.learner, self.engine, self.judged, self.order, self.step)

    def warnings(self, completions: Completions) -> dict[str, str]:
        """See `rlcourse.watch.after_step`."""
        return after_step(self.steps, completions.answers, completions.rewards.tolist(), self.config)

    def shown(self, metrics: dict[str, Any]) -> dict[str, str]:
        """The reward, and what the task measures first."""
        return {name: in_format(metrics[name], ".2f") for name in ("reward", *islice(self.metrics, 2))}

    def validate(self) -> dict[str, Any]:
        """What greedy answers to validation problems say."""
        problems = self.task.problems("validation")[: self.config.eval_validation]
        answers = answer_problems(self.policy, self.engine, self.task, problems, self.config.max_new_tokens)
        return summarize(answers) | {"seconds": time.perf_counter() - self.clock}

    def test(self, when: str) -> dict[str, Any]:
        """What greedy answers to test problems, and sampled ones if the config asks for them, say."""
        with self.spent("evaluation"):
            greedy, sampled = answer_test(self.policy, self.engine, self.task, self.config, when)
        if when == "before":
            self.warn(before_training([answer for [answer] in greedy], sampled, self.config))
        return summarize_test(greedy, sampled)

    def _summary(self, after: dict[str, Any]) -> dict[str, Any]:
        first = self.task.problems("test")[0]
        return super()._summary(after) | {
            f"{self.headline}_before": self.before[self.headline],
            f"{self.headline}_after": after[self.headline],
            "eval_problems": after["problems"],
            "prompt": self.policy.tokenizer.decode(self.task.prompt(first, self.policy)),  # how the model is asked
        }

    def _state(self) -> dict[str, Any]:
        head = self.learner.value_head
        return super()._state() | {"value_head": head and head.state_dict()}

    def _set_state(self, state: dict[str, Any]) -> None:
        super()._set_state(state)
        if self.learner.value_head is not None:
            self.learner.value_head.load_state_dict(state["value_head"])
        if self.before is not None and self.headline not in self.before:
            raise ValueError("no evaluation")
