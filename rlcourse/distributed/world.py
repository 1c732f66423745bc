"""Several ranks that share each step of a run: what they exchange, and when.

Every rank has the whole model, unless it is sharded (`sharded.py`). Of a step the expensive parts are shared out, and
all else every rank does for itself, with the very code of one process, from the same numbers and the same random state:

  rollout, verdicts    prompts are split, a group never; then every rank gets all completions, which are small
  advantages, plan     by each rank, of the whole batch: means, deviations and token counts are those of one process
  forward, backward    the rows of a mini-batch are split; their losses are divided by what the whole mini-batch counts
  gradients            added up (all-reduce), so that every rank makes the same update

So only two sums are taken in another order than by one process: that of the gradients and those of the means that are
logged. Objects and counts travel by gloo, through the CPU, and gradients on a GPU by NCCL.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlcourse.batch import Rollout, concatenate
from rlcourse.dist import OneProcess
from rlcourse.rollout import RolloutEngine
from rlcourse.runs import RunFolder
from rlcourse.sampling import Sampling
from rlcourse.tasks import Attempt, Task

LOST = (
    "Another process of this run has ended, so all end. Checkpoints stay as they are: go on from the last one with "
    "--resume."
)


class RankLost(ConnectionError):
    """Another rank of this run has ended."""


class World(OneProcess):
    """One of several ranks. If a rank is no longer there, the others raise `RankLost`."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.gpus: Any = None  # the group for what is on a GPU
        self.device = torch.device("cpu")

    def all_gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        with lost_ranks():
            torch.distributed.all_gather_object(values, value)
        return values

    def all_reduce(self, values: Tensor) -> Tensor:
        with lost_ranks():
            torch.distributed.all_reduce(values, group=self.gpus if values.is_cuda else None)
        return values

    def slice(self, items: list) -> list:
        """This rank's part of a list: neighbours, so that the parts of all, by rank, are the list. Sends nothing."""
        return items[len(items) * self.rank // self.size : len(items) * (self.rank + 1) // self.size]

    def setup(self, device: torch.device, config: Any) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
            self.gpus = torch.distributed.new_group(backend="nccl")

    def open_run(self, open_run: Callable[[], Any]) -> Any:
        run = error = None
        if self.rank == 0:
            try:
                run = open_run()
            except Exception as caught:
                error = caught
        *opened, error = self.all_gather((run and run.path, run and run.config, run and run.checkpoint, error))[0]
        if error is not None:
            raise error
        return run or Follower(*opened)

    def shared(self, engine: Any, *tasks: Any) -> tuple[Any, ...]:
        return SharedEngine(engine, self), *(SharedTask(task, self) for task in tasks)

    def gather_state(self, policy: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # The same updates of the same weights: sums that differ are those of a rank that has come apart.
        sums = self.all_gather([p.detach().double().sum().item() for p in policy.model.parameters()])
        if any(of_rank != sums[0] for of_rank in sums):
            raise RuntimeError("The weights differ from rank to rank, so they were not saved: go on with --resume.")
        return policy, state

    def all_reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """See `OneProcess`. A parameter that has none on any rank keeps none: the optimizer leaves it alone."""
        has = self.all_reduce(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32))
        parameters = [p for p, ranks in zip(parameters, has.tolist(), strict=True) if ranks]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            self.all_reduce(p.grad)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Around what ranks do together: it fails when one of them has ended."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(LOST) from error


class SharedEngine:
    """An engine on every rank: each samples for its share of the prompts, and all get all completions. A rank's random
    numbers are its own, from a seed that every rank draws; torch's global random state stays the same on all. So
    another number of ranks samples other completions, of the same distribution."""

    def __init__(self, engine: RolloutEngine, world: World):
        self.engine, self.world, self.device = engine, world, world.device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        share, seed, own = self.world.slice(prompts), int(torch.randint(2**62, ())), None
        if share:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(seed + self.world.rank)
                own = moved(self.engine.generate(share, num_generations, max_new_tokens, sampling), "cpu")
        parts = [part for part in self.world.all_gather(own) if part is not None]
        return moved(concatenate(parts), self.device)


def moved(rollout: Rollout, device: torch.device | str) -> Rollout:
    return Rollout(**{name: tensor.to(device) for name, tensor in vars(rollout).items()})


class SharedTask:
    """A task on every rank: each judges its share of the attempts, and all get all verdicts."""

    def __init__(self, task: Task, world: World):
        self.task, self.world = task, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def judge(self, attempts: list[Attempt], training: bool) -> list[Any]:
        """See `Task`. Attempts at one problem, neighbours, are judged together."""
        groups = [list(group) for _, group in groupby(attempts, key=lambda attempt: id(attempt.problem))]
        own = [attempt for group in self.world.slice(groups) for attempt in group]
        parts = self.world.all_gather(self.task.judge(own, training) if own else [])
        return [verdict for part in parts for verdict in part]


class Follower(RunFolder):
    """The run's folder to all ranks but the first: nothing is written."""

    def __init__(self, path: Path, config: Any, checkpoint: Path | None):
        self.path, self.config, self.checkpoint = path, config, checkpoint
        self.began = time.perf_counter()

    def ignore(self, *arguments: Any) -> None:
        pass

    __enter__ = __exit__ = keep_config = log_step = log_eval = warn = rewrite = finish = ignore
    remove_unless_begun = ignore
