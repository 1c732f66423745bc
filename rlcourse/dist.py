"""Several processes that train one model, started by `torchrun`: what training asks of its `world`.

`ALONE` is the world of one process. `rlcourse/distributed` has those of several: `world.py` splits each step (data
parallel), `sharded.py` the model, too (FSDP2). Nothing heavy is imported here.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class OneProcess:
    """The world of one process: it shares nothing. All ranks call a method of their world in the same order."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. They travel as pickles, so no tensors on a GPU."""
        return [value]

    def all_reduce(self, values: "Tensor") -> "Tensor":
        """The sum over ranks, in place. Where all but one have 0 it is exact."""
        return values

    def all_reduce_gradients(self, parameters: "list[nn.Parameter]") -> None:
        """Give every rank the sum of all gradients."""

    def split_rows(self, rows: "Tensor", cut: Callable[["Tensor"], list[int]]) -> "tuple[Tensor, ...]":
        """Every `size`-th of these rows, to balance work, in micro-batches of as many rows as `cut` says; maybe none.

        rows: indices in order of length or group.
        """
        rows = rows[self.rank :: self.size]
        return rows.split(cut(rows)) if len(rows) else ()

    def setup(self, device: "torch.device", config: Any) -> None:
        """Choose this rank's GPU, and connect the GPUs."""

    def open_run(self, open_run: Callable[[], Any]) -> Any:
        """The run's folder, opened by the first rank; for the others one in which nothing is written."""
        return open_run()

    def load(self, load: "Callable[[torch.device], Any]", device: "torch.device") -> Any:
        """The policy that `load` returns: whole, or this rank's shard of it."""
        return load(device)

    def shard(self, module: "nn.Module") -> "nn.Module":
        """The module, or this rank's shard of it."""
        return module

    def shared(self, engine: Any, *tasks: Any) -> tuple[Any, ...]:
        """The engine and tasks, which sample and judge this rank's share."""
        return engine, *tasks

    def gather_state(self, policy: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Policy and state of the run as the first rank saves them. Raises RuntimeError if ranks have come apart."""
        return policy, state

    def shard_state(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """What this rank loads of a saved state."""
        return state


ALONE = OneProcess()


def launched() -> tuple[int, int]:
    """This process's rank and how many there are, as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def hush_all_but_first() -> None:
    """From now on only the first rank prints: the others raise what it raises."""
    if launched()[0]:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)


def share_of(config: Any, size: int) -> Any:
    """The config with the prompts of the rank that has most of them."""
    return replace(config, num_prompts=-(-config.num_prompts // size))


def is_sharded(model: Any) -> bool:
    """Whether this rank has only its shard of the model."""
    return hasattr(model, "unshard")


def full_tensor(tensor: Any) -> Any:
    """A sharded tensor, gathered by all ranks together; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_tensor(tensor: Any) -> Any:
    """This rank's shard of a tensor; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
