"""The device that computes, and with which arithmetic."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from rlcourse.config import TrainConfig


def wanted_device(config: TrainConfig) -> str:
    """'cpu' or 'cuda': 'auto' is a GPU where torch has one, and for bfloat16, which asks for one."""
    if config.device != "auto":
        return config.device
    return "cuda" if config.dtype == "bfloat16" or torch.cuda.is_available() else "cpu"


def find_device(config: TrainConfig) -> torch.device:
    """The device to train on. Raises ValueError where the config needs a GPU and there is none."""
    device = torch.device(wanted_device(config))
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "device 'cuda'" if config.device == "cuda" else f"bfloat16 (preset {config.preset!r})"
        raise ValueError(f"No CUDA GPU was found, which {reason} needs: `rlcourse doctor` says what runs here.")
    return device


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """PyTorch's attention, but not by cuDNN, which plans anew for each shape: 1.7 ms of the host's time."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager:
    """The arithmetic of forward passes in training: bfloat16 by autocast, or plain float32.

    Without autocast's cache each use of a weight has its own bfloat16 copy, so the gradients of the chunks of the head
    are added up in float32.
    """
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if dtype == "bfloat16" else nullcontext()
