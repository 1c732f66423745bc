"""Small models that the kernels of `rlcourse/exact` fit: one layer, quick in Triton's interpreter."""

import torch
from policies import Policy, make_policy

SHAPES = {
    "qwen2": {"intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3": {
        "architecture": "qwen3", "intermediate_size": 320, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "tied": False,
    },
    "llama": {
        "architecture": "llama", "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "tied": False,
    },
    "tied llama": {
        "architecture": "llama", "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 128,
    },
}  # fmt: skip


def small_policy(shape: str, seed: int = 0, **sizes) -> Policy:
    policy = make_policy(seed, **({"hidden_size": 128, "num_hidden_layers": 1} | SHAPES[shape] | sizes))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() == 2:  # initialised for width 32
                parameter.mul_((32 / parameter.shape[1]) ** 0.5)
    return policy
