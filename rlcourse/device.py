"""Which device computes, and in what precision."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def wanted_device(config: Any) -> str:
    """'cpu' or 'cuda'. 'auto' is the GPU if torch has one, or if the config asks for bfloat16, which needs one."""
    if config.device != "auto":
        return config.device
    return "cuda" if config.dtype == "bfloat16" or torch.cuda.is_available() else "cpu"


def can_run(config: Any) -> bool:
    """Whether this machine has the kind of device that the config asks for."""
    return wanted_device(config) == "cpu" or torch.cuda.is_available()


def find_device(config: Any) -> torch.device:
    """The device to train on. Raises ValueError if the config needs a GPU and there is none."""
    device = torch.device(wanted_device(config))
    if not can_run(config):
        reason = "device cuda" if config.device == "cuda" else "dtype bfloat16"
        raise ValueError(f"No CUDA GPU was found, which {reason} needs: `rlcourse doctor` says what runs here.")
    return device


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Within, attention is never cuDNN's, which makes a new plan for every shape: 1.7 ms of the host's time."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager:
    """bfloat16 by autocast, or plain float32. Autocast's cache is off, so that the gradients of the head's chunks add
    up in float32."""
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if dtype == "bfloat16" else nullcontext()
