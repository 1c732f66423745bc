"""Starts the world that this process is in."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlcourse.dist import ALONE, OneProcess, launched


def check_launch(config: Any) -> None:
    """Raise ValueError for a config that shards the model where there is one process."""
    if config.shard and launched()[1] == 1:
        raise ValueError(
            "--shard splits the model between processes: start them with `torchrun --nproc-per-node N -m rlcourse "
            "train ...`, or add --no-shard."
        )


@contextmanager
def start_world() -> Iterator[OneProcess]:
    """The world that this process is in. One error is said once, by the rank that has it first."""
    if launched()[1] == 1:
        yield ALONE
        return
    import torch.distributed as dist

    from rlcourse.distributed.world import LOST, RankLost, World

    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size)
        dist.destroy_process_group()
    except BaseException as error:
        sys.stderr = sys.__stderr__ if _speaks(store) else open(os.devnull, "w")  # noqa: SIM115
        # Of gloo or NCCL, and not of the computation around it: within a pass over a sharded model
        if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise RankLost(LOST) from error
        raise


def world_of(config: Any, world: OneProcess) -> OneProcess:
    """The world, for ranks that have a shard of the model each where the config says so. Sends nothing."""
    check_launch(config)
    if not config.shard:
        return world
    from rlcourse.distributed.sharded import ShardedWorld

    return ShardedWorld(world.rank, world.size)


def _speaks(store: Any) -> bool:
    """Whether this rank is the first to end by an error."""
    try:
        return store.add("errors", 1) == 1
    except RuntimeError:  # the store was the first rank's, and has ended with it
        return True
