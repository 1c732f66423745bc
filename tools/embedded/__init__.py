"""How the models that ship in `data/` were made."""

from pathlib import Path

import torch

from rlcourse.policy import Policy
from rlcourse.publish import save_model


def save_halved(policy: Policy, output: Path) -> None:
    """Write model and tokenizer in bfloat16: half the size, and the weights are far noisier than its rounding."""
    policy.model.to(torch.bfloat16)
    save_model(policy, output)
