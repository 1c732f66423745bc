"""How a run starts, in one process or several. `world.py` has ranks that share a run, `sharded.py` a model as well."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlcourse.device import find_device
from rlcourse.dist import ALONE, OneProcess, launched


def check_launch(config: Any, trains: bool = True) -> None:
    """Raise ValueError for a config that these processes cannot run: each needs a GPU and, if it trains, a prompt."""
    size, here = launched()[1], int(os.environ.get("LOCAL_WORLD_SIZE", launched()[1]))
    if size == 1:
        if config.shard:
            start = "`torchrun --nproc-per-node N -m rlcourse train ...`"
            raise ValueError(f"--shard splits the model between processes: start them with {start}, or add --no-shard.")
        return
    if config.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < here:
        found = torch.cuda.device_count()
        raise ValueError(f"{here} processes need a GPU each, and there are {found}: lower --nproc-per-node.")
    if trains and config.num_prompts < size:
        few = f"num_prompts {config.num_prompts} are fewer than {size} processes"
        raise ValueError(f"Prompts are split by rank, and {few}: raise it.")


@contextmanager
def launch(open_run: Callable[[], Any]) -> Iterator[tuple[Any, torch.device, OneProcess]]:
    """Start a run: its folder, which `open_run` gives the first rank, this process's device and its world. A folder
    without a step is removed in the end. Raises what `open_run` does, and ValueError for a config that cannot run
    here."""
    with start_world() as world:
        run = world.open_run(open_run)
        try:
            check_launch(run.config)
            device = find_device(run.config)
            if run.config.shard:
                from rlcourse.distributed.sharded import ShardedWorld

                world = ShardedWorld(world.rank, world.size)
            world.setup(device, run.config)
            yield run, device, world
        finally:
            run.remove_unless_begun()


@contextmanager
def start_world() -> Iterator[OneProcess]:
    """The world that this process is in. An error is printed once, by the rank that has it first."""
    if launched()[1] == 1:
        yield ALONE
        return
    from rlcourse.distributed.world import LOST, RankLost, World

    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size)
        dist.destroy_process_group()
    except BaseException as error:
        try:
            first = store.add("errors", 1) == 1
        except RuntimeError:  # the store was the first rank's, and has ended with it
            first = True
        sys.stderr = sys.__stderr__ if first else open(os.devnull, "w")  # noqa: SIM115
        # Of gloo or NCCL, and not of the computation around it: within a pass over a sharded model
        if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise RankLost(LOST) from error
        raise
