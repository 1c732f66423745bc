"""Policies with an adapter, for the tests of adapters."""

import pytest
import torch
from peft import PeftModel
from policies import DEVICE
from transformers import AutoModelForCausalLM

from rlcourse.adapters import save_adapter
from rlcourse.lora import add_adapter
from rlcourse.policy import load_policy

IDS = torch.tensor([[5, 9, 40, 7, 12, 30, 31, 44, 9]], device=DEVICE)


def adapted(base: str, seed: int = 1, rank: int = 3):
    """A policy with an adapter that changes what it says."""
    policy = load_policy(base, DEVICE)
    torch.manual_seed(seed)
    add_adapter(policy.model, base, rank, 12.0, "all-linear")
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return policy


def saved(policy, folder):
    """The folder, new, with the policy's adapter."""
    folder.mkdir()
    save_adapter(policy.model, folder)
    return folder


@pytest.fixture
def policy(model_folder):
    return adapted(model_folder)


@pytest.fixture
def folder(policy, tmp_path):
    return saved(policy, tmp_path / "adapter")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def merged_by_peft(base: str, folder) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(DEVICE)
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
