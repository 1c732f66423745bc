"""The benchmarks of a decode step's kernels and of lowered programs call them as they are: on a GPU, or in Triton's
interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, make_policy

from rlcourse.bench import kernels, lowered
from rlcourse.rollout.decoder import Decoder
from rlcourse.tasks.kernels.clock import H200, program_us
from rlcourse.tasks.kernels.language import compile_program


@pytest.mark.thorough
@torch.no_grad()
def test_every_piece_runs_and_those_with_an_error_compute_what_pytorch_does():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    policy = make_policy(hidden_size=128, intermediate_size=256, **heads)
    decoder = Decoder(policy.model, torch.bfloat16 if DEVICE == "cuda" else torch.float32, compile=False)
    step = kernels._step(decoder, 3)
    found = {}
    for name, (ours, peer, moved, error, _) in kernels._pieces(decoder, step, 3).items():
        kernels._fill(step)
        found[name] = error()
        ours()
        peer()
        assert moved > 0
    assert {name for name, error in found.items() if error is not None} == {"attention", "gate_up", "down"}
    assert all(error < 0.02 for error in found.values() if error is not None), found


def test_lowered_programs_are_eager_cut_at_random_and_optimal():
    found = lowered.programs(6)
    assert found == lowered.programs(6) and [variant for _, variant, _ in found] == ["eager", "random", "optimum"] * 6
    times, random_cuts = [], set()
    for computation, variant, program in found:
        launches = compile_program(program, computation)
        times.append(program_us(launches, H200))
        if variant == "random":
            random_cuts.add((len(launches), len(computation.lines)))
    for eager, cut, least in zip(times[::3], times[1::3], times[2::3], strict=True):
        assert least <= cut <= eager
    assert any(1 < launches < lines for launches, lines in random_cuts)
