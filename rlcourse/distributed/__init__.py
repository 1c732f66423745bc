"""Several processes that train one model: `torchrun --nproc-per-node N -m rlcourse train ...`, on torch.distributed.

`world.py` holds all that ranks exchange that share each step, `shared.py` what the trainer uses in place of its own
engine, task and run folder, `sharded.py` ranks that have a part of the model each. One process exchanges nothing. Here
is what the environment says of a launch, and how a sharded model is known; nothing heavy is imported.
"""

import os
import sys
from dataclasses import replace
from typing import Any


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


def check_launch(config: Any) -> None:
    """Raise ValueError for a config that shards the model where there is one process."""
    if config.shard and launched()[1] == 1:
        raise ValueError(
            "--shard splits the model between processes: start them with `torchrun --nproc-per-node N -m rlcourse "
            "train ...`, or add --no-shard."
        )


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
