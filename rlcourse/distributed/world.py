"""What the ranks of a run exchange, and when. One process is a world of one, which sends nothing: `ALONE`.

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
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlcourse.device import find_device
from rlcourse.distributed import launched

LOST = (
    "Another process of this run has ended, so all end. Checkpoints stay as they are: go on from the last one with "
    "--resume."
)
BUCKET = 2**24  # numbers that are added up at once: 64 MiB in float32


class RankLost(ConnectionError):
    """Another rank of this run has ended."""


class World:
    """One of several ranks, or one process. Every method is called by all ranks, in the same order, unless it says
    otherwise. If a rank is no longer there, the others raise `RankLost`."""

    def __init__(self, store: Any = None, rank: int = 0, size: int = 1):
        self.store, self.rank, self.size = store, rank, size
        self.gpus: Any = None  # the group for what is on a GPU

    # What everything else is made of

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. They travel as pickles: no tensors on a GPU."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        with lost_ranks():
            torch.distributed.all_gather_object(values, value)
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place. Where all but one have 0 it is exact."""
        if self.size > 1:
            with lost_ranks():
                torch.distributed.all_reduce(values, group=self.gpus if values.is_cuda else None)
        return values

    def share(self, items: list) -> list:
        """This rank's part of a list: neighbours, so that the parts of all, by rank, are the list. Sends nothing."""
        return items[len(items) * self.rank // self.size : len(items) * (self.rank + 1) // self.size]

    def first(self, function: Callable[[], Any]) -> Any:
        """What the function returns, or raises, on the first rank, which alone calls it. It must have a pickle."""
        if self.size == 1:
            return function()
        outcome = None
        if self.rank == 0:
            try:
                outcome = function(), None
            except Exception as error:
                outcome = None, error
        value, error = self.gather(outcome)[0]
        if error is not None:
            raise error
        return value

    def agree(self, stop: Any) -> Any:
        """Whether to stop: the reason of the first rank that has one."""
        return next(filter(None, self.gather(stop)), None)

    # What a run begins and ends with

    def device(self, config: Any) -> torch.device:
        """This rank's device: one GPU each. Raises ValueError if a rank would have no GPU, or no prompt."""
        device, here = find_device(config), int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if self.size == 1:
            return device
        if device.type == "cuda" and torch.cuda.device_count() < here:
            raise ValueError(
                f"{here} processes need a GPU each, and there are {torch.cuda.device_count()}: lower --nproc-per-node."
            )
        if config.num_prompts < self.size:
            raise ValueError(
                f"Prompts are split by rank, and num_prompts {config.num_prompts} are fewer than {self.size} "
                "processes: raise it."
            )
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
            self.gpus = torch.distributed.new_group(backend="nccl")
        return device

    def run(self, open_run: Callable[[], Any]) -> Any:
        """The run's folder, opened by the first rank; for the others one in which nothing is written."""
        if self.size == 1:
            return open_run()
        from rlcourse.distributed.shared import Follower

        opened = []

        def open_it() -> tuple:
            opened.append(open_run())
            return opened[0].path, opened[0].config

        place = self.first(open_it)
        return opened[0] if opened else Follower(*place)

    def load(self, load: Callable[[torch.device], Any], device: torch.device) -> Any:
        """The policy that `load` returns: whole, or this rank's part of it."""
        return load(device)

    def shard(self, module: nn.Module) -> nn.Module:
        """The module, or this rank's part of it."""
        return module

    def engine(self, engine: Any, device: torch.device) -> Any:
        """The engine, each rank sampling for its share of the prompts."""
        from rlcourse.distributed.shared import SharedEngine

        return SharedEngine(engine, self, device) if self.size > 1 else engine

    def task(self, task: Any) -> Any:
        """The task, each rank judging its share of the attempts."""
        from rlcourse.distributed.shared import SharedTask

        return SharedTask(task, self) if self.size > 1 else task

    def whole(self, policy: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Policy and state of the run as the first rank saves them."""
        return policy, state

    def part(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """What this rank loads of a saved state."""
        return state

    def check_alike(self, parameters: Iterator[nn.Parameter]) -> None:
        """Raise RuntimeError if the ranks' weights differ, which the same updates of the same weights never do."""
        if self.size == 1:
            return
        sums = self.gather([p.detach().double().sum().item() for p in parameters])
        if any(of_rank != sums[0] for of_rank in sums):
            raise RuntimeError("The weights differ from rank to rank, so they were not saved: go on with --resume.")

    # A step

    def split_rows(self, rows: Tensor, cut: Callable[[Tensor], list[int]]) -> tuple[Tensor, ...]:
        """This rank's rows, maybe none, in micro-batches. Sends nothing.

        rows: indices in order of length or group: each rank takes every `size`-th, to balance work. cut: how many of
        these rows each micro-batch has.
        """
        rows = rows[self.rank :: self.size]
        return rows.split(cut(rows)) if len(rows) else ()

    def add_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Give every rank the sum of all gradients. A parameter that has none on any rank keeps none, as for one
        process: the optimizer leaves it alone."""
        if self.size == 1:
            return
        has = self.total(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32))
        parameters = [p for p, ranks in zip(parameters, has.tolist(), strict=True) if ranks]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets([p.grad for p in parameters]):
            flat = self.total(torch.cat([gradient.flatten() for gradient in bucket]))
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))


ALONE = World()


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, as many at a time as have `BUCKET` numbers together, one at least."""
    bucket, numbers = [], 0
    for tensor in tensors:
        if bucket and numbers + tensor.numel() > BUCKET:
            yield bucket
            bucket, numbers = [], 0
        bucket.append(tensor)
        numbers += tensor.numel()
    if bucket:
        yield bucket


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Around what ranks do together: it fails when one of them has ended."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(LOST) from error


@contextmanager
def start_world() -> Iterator[World]:
    """The world that this process is in. One error is said once, by the rank that has it first."""
    rank, size = launched()
    if size == 1:
        yield ALONE
        return
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield World(store, rank, size)
        dist.destroy_process_group()
    except BaseException as error:
        sys.stderr = sys.__stderr__ if _speaks(store) else open(os.devnull, "w")  # noqa: SIM115
        if isinstance(error, RuntimeError) and _of_the_wire(error):  # within a pass over a sharded model
            raise RankLost(LOST) from error
        raise


def _of_the_wire(error: RuntimeError) -> bool:
    """Whether it is gloo's or NCCL's, and not that of the computation around it."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def _speaks(store: Any) -> bool:
    """Whether this rank is the first to end by an error."""
    try:
        return store.add("errors", 1) == 1
    except RuntimeError:  # the store was the first rank's, and has ended with it
        return True
