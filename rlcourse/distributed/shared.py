"""What the trainer of a rank has in place of its engine, its task and its run's folder.

`world` is a `World`, whose module imports this one.
"""

import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from rlcourse.batch import Rollout, concatenate
from rlcourse.rollout import RolloutEngine
from rlcourse.sampling import Sampling
from rlcourse.tasks import Attempt, Task


class SharedEngine:
    """An engine on every rank: each samples for its share of the prompts, and all get all completions.

    A rank's random numbers are its own, from a seed that every rank draws; torch's global random state, the same on all
    ranks, stays so. So another number of ranks samples other completions, of the same distribution.
    """

    def __init__(self, engine: RolloutEngine, world: Any, device: torch.device):
        self.engine, self.world, self.device = engine, world, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """See `RolloutEngine`."""
        share, seed, own = self.world.share(prompts), int(torch.randint(2**62, ())), None
        if share:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(seed + self.world.rank)
                own = moved(self.engine.generate(share, num_generations, max_new_tokens, sampling), "cpu")
        parts = [part for part in self.world.gather(own) if part is not None]
        return moved(concatenate(parts), self.device)


def moved(rollout: Rollout, device: torch.device | str) -> Rollout:
    """The rollout on a device."""
    return Rollout(**{name: tensor.to(device) for name, tensor in rollout.tensors.items()})


class SharedTask:
    """A task on every rank: each judges its share of the attempts, and all get all verdicts."""

    def __init__(self, task: Task, world: Any):
        self.task, self.world = task, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def judge(self, attempts: list[Attempt], training: bool) -> list[Any]:
        """See `Task`. Attempts at one problem, neighbours, are judged together."""
        groups = [list(group) for _, group in groupby(attempts, key=lambda attempt: id(attempt.problem))]
        own = [attempt for group in self.world.share(groups) for attempt in group]
        parts = self.world.gather(self.task.judge(own, training) if own else [])
        return [verdict for part in parts for verdict in part]


class Follower:
    """The run's folder to all ranks but the first: nothing is written."""

    def __init__(self, path: Path, config: Any):
        self.path, self.config, self.began = path, config, time.perf_counter()

    def ignore(self, *arguments: Any) -> None:
        pass

    keep_config = log_step = log_eval = warn = forget_after = finish = remove_unless_begun = ignore

    def warned(self) -> dict[str, str]:
        return {}  # the first rank has them

    def resume_command(self) -> str:
        return ""  # the first rank says it
