"""Losses and advantages equal to those of TRL's GRPOTrainer on the same numbers.

TRL computes both inside methods of its trainer, so the methods run on a stand-in that holds the attributes they read.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from rlcourse import losses

LENGTHS = [8, 1, 5, 3]  # TRL divides its metrics by the length: no empty row
ROWS, T, LIMIT = len(LENGTHS), 8, 12
MASK = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
ADVANTAGES = torch.tensor([1.0, -0.5, -1.5, 2.0], dtype=torch.float64)


class OneProcess:
    """What the trainer asks of `accelerate` when there is one process."""

    device, num_processes, process_index = torch.device("cpu"), 1, 0

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def trl_loss(logprobs, old, ref, loss_type, level, clip_low, clip_high, kl_coef):
    """The loss of TRL, and the share of tokens that it reports as clipped."""
    loss = {"loss_type": loss_type, "importance_sampling_level": level, "beta": kl_coef, "max_completion_length": LIMIT}
    clip = {"epsilon_low": clip_low, "epsilon_high": clip_high}
    unused = dict.fromkeys(("aux_loss_enabled", "use_vllm", "_entropy_bonus_enabled"), False)
    unused |= {"current_gradient_accumulation_steps": 1, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=OneProcess(),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        **(loss | clip | unused),
    )
    ids = torch.zeros(ROWS, T, dtype=torch.int64)
    inputs = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "num_items_in_batch": MASK.sum()}
    inputs |= {"completion_ids": ids, "completion_mask": MASK.long(), "advantages": ADVANTAGES}
    inputs |= {"old_per_token_logps": old, "ref_per_token_logps": ref}
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    metrics = trainer._metrics["train"]
    return loss, metrics["clip_ratio/region_mean" if loss_type != "cispo" else "cispo_clip_ratio"][0]


AGGREGATION = dict.fromkeys(("bnpo", "dapo", "cispo"), "token_mean") | {"grpo": "sequence_mean", "dr_grpo": "constant"}


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("level, clip_high", [("token", 0.2), ("token", 0.28), ("sequence", 0.05)])
@pytest.mark.parametrize("loss_type", AGGREGATION)
def test_loss_and_gradient_equal_those_of_trl(loss_type, level, clip_high, kl_coef):
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(ROWS, T, generator=generator, dtype=torch.float64) for _ in range(3)]
    old, ref = -2 - noise[0].abs(), -2 - noise[1].abs()
    ours, theirs = ((old + 0.3 * noise[2]).requires_grad_() for _ in range(2))

    switches = {"surrogate": "cispo" if loss_type == "cispo" else "clip", "ratio": level}
    switches |= {"clip_low": 0.1, "clip_high": clip_high}
    per_token, clipped = losses.token_loss(ours, old, ADVANTAGES, MASK, **switches)
    per_token = per_token + kl_coef * losses.kl_estimate(ours, ref, MASK)
    how = AGGREGATION[loss_type]
    loss = losses.aggregate(per_token, MASK, how, rows=ROWS, tokens=int(MASK.sum()), max_new_tokens=LIMIT)
    loss.backward()

    # TRL's epsilon_high is the cap of the weight itself in CISPO, and the distance from 1 elsewhere
    epsilon_high = 1 + clip_high if loss_type == "cispo" else clip_high
    expected, clip_fraction = trl_loss(theirs, old, ref, loss_type, level, 0.1, epsilon_high, kl_coef)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert clipped.any() and not clipped[MASK].all(), "the batch should show both"
    if level == "token":  # TRL counts sequences at the other level, and good tokens alone in CISPO
        counted = clipped & (ADVANTAGES > 0)[:, None] if loss_type == "cispo" else clipped
        assert (counted.sum() / MASK.sum()).item() == pytest.approx(clip_fraction)
