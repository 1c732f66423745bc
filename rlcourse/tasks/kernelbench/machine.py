"""The machine that judges share: one of them at a time checks and times, and no kernel is faster than memory."""

import fcntl
import functools
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlcourse.measure.timing import seconds


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Nobody else on this machine checks or times meanwhile, and torch's random numbers go on as if nothing had been.

    Judges in other processes and threads wait here; what compiles does not.
    """
    path = Path(tempfile.gettempdir(), f"rlcourse-kernelbench-{os.getuid()}.lock")
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with torch.random.fork_rng(devices):
            yield


def new_seed() -> int:
    return random.SystemRandom().randrange(2**31)


@functools.cache
def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy moves here, a quarter added: no kernel is faster than memory."""
    size = 1 << 30 if device.type == "cuda" else 1 << 26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 1.25 * 2 * size / min(seconds(lambda: target.copy_(source), device) for _ in range(5))
