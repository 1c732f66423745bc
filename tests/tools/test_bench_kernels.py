"""The benchmark of kernels: on a GPU, or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, make_policy

from rlcourse.exact.weights import fused_weights
from tools.bench import kernels


@pytest.mark.thorough
@torch.no_grad()
def test_every_piece_runs_and_those_with_an_error_compute_what_pytorch_does():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    policy = make_policy(hidden_size=128, intermediate_size=256, **heads)
    weights = fused_weights(policy.model, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    step = kernels._step(weights, 3)
    found = {}
    for name, (ours, peer, moved, error, _) in kernels._pieces(weights, step, 3).items():
        kernels._fill(step)
        found[name] = error()
        ours()
        peer()
        assert moved > 0
    assert {name for name, error in found.items() if error is not None} == {"attention", "gate_up", "down"}
    assert all(error < 0.02 for error in found.values() if error is not None), found
