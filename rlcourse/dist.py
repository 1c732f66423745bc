"""Several processes that train one model: `torchrun --nproc-per-node N -m rlcourse train ...`, on torch.distributed.

Training asks a `world` for what processes share. Here is that of one process, `ALONE`. In `rlcourse/distributed`,
`world.py` has that of several ranks which split each step (data parallel), `sharded.py` that of ranks which split the
model, too (FSDP2), and `launch.py` starts the one that this process is in. Nothing heavy is imported here.
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

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. They travel as pickles: no tensors on a GPU."""
        return [value]

    def total(self, values: "Tensor") -> "Tensor":
        """The sum over ranks, in place. Where all but one have 0 it is exact."""
        return values

    def first(self, function: Callable[[], Any]) -> Any:
        """What the function returns, or raises, on the first rank, which alone calls it. It must have a pickle."""
        return function()

    def split_rows(self, rows: "Tensor", cut: Callable[["Tensor"], list[int]]) -> "tuple[Tensor, ...]":
        """This rank's rows, maybe none, in micro-batches.

        rows: indices in order of length or group: each rank takes every `size`-th, to balance work. cut: how many of
        these rows each micro-batch has.
        """
        rows = rows[self.rank :: self.size]
        return rows.split(cut(rows)) if len(rows) else ()

    def add_gradients(self, parameters: "list[nn.Parameter]") -> None:
        """Give every rank the sum of all gradients."""

    def device(self, device: "torch.device", config: Any) -> "torch.device":
        """This rank's device: one GPU each. Raises ValueError if a rank would have no GPU, or no prompt."""
        return device

    def run(self, open_run: Callable[[], Any]) -> Any:
        """The run's folder, opened by the first rank; for the others one in which nothing is written."""
        return open_run()

    def load(self, load: "Callable[[torch.device], Any]", device: "torch.device") -> Any:
        """The policy that `load` returns: whole, or this rank's shard of it."""
        return load(device)

    def shard(self, module: "nn.Module") -> "nn.Module":
        """The module, or this rank's shard of it."""
        return module

    def engine(self, engine: Any, device: "torch.device") -> Any:
        """The engine, each rank sampling for its share of the prompts."""
        return engine

    def task(self, task: Any) -> Any:
        """The task, each rank judging its share of the attempts."""
        return task

    def whole(self, policy: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Policy and state of the run as the first rank saves them. Raises RuntimeError if ranks have come apart."""
        return policy, state

    def part(self, state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """What this rank loads of a saved state."""
        return state


ALONE = OneProcess()


def launched() -> tuple[int, int]:
    """This process's rank and how many there are, as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def hush_all_but_first() -> None:
    """From now on only the first rank prints. The others raise what it raises, and would say it as often."""
    if launched()[0]:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)


def share_of(config: Any, size: int) -> Any:
    """The config with the prompts of one of `size` ranks, of the one that has most: what its device has to hold."""
    return replace(config, num_prompts=-(-config.num_prompts // size))


def is_sharded(model: Any) -> bool:
    """Whether this rank has a part of the model alone: FSDP2's modules can be put together."""
    return hasattr(model, "unshard")


def whole(tensor: Any) -> Any:
    """The whole of a tensor that is sharded, gathered by all ranks together; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own(tensor: Any) -> Any:
    """Of a tensor that is sharded what this rank has; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def command() -> list[str]:
    """How this process was started, up to rlcourse's own arguments."""
    if launched()[1] == 1:
        return ["rlcourse"]
    return ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", str(launched()[1])), "-m", "rlcourse"]
