"""Log-probs of the sampled tokens, in training as in sampling: one forward pass, the vocabulary in chunks.

The logits of a batch, [tokens, vocabulary] in float32, are by far its largest tensor: 64 x 512 tokens of a vocabulary
of 151,936 take 20 GB. Here they stand in memory for `chunk` tokens at once; the backward pass computes them again.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlcourse.rollout import Rollout
from rlcourse.sampling import Sampling, sampling_logits


def completion_mask(completion_ids: Tensor, eos_ids: Iterable[int]) -> Tensor:
    """Which tokens the policy chose: True up to and including the first EOS, everywhere if there is none.

    completion_ids: [rows, length] int64; eos_ids: the ids that end a completion. Returns bool [rows, length].
    """
    is_eos = torch.isin(completion_ids, torch.tensor(list(eos_ids), device=completion_ids.device))
    return is_eos.cumsum(1) - is_eos.long() == 0  # no EOS strictly before this token


def token_logprobs(
    model: PreTrainedModel, rollout: Rollout, sampling: Sampling, chunk: int, compile: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of a rollout's tokens under the sampling distribution of the model as it is now.

    model: a causal LM of transformers whose logits are its last hidden states times its output embeddings, no more.
    Returns (logprobs [rows, T] float32, entropy [rows, T] float32 without gradient, hidden [rows, T, d]). hidden is the
    state BEFORE each token, from which it was predicted and which the value head of PPO reads. logprobs and entropy are
    0 where rollout.completion_mask is False; only real completion tokens pass through the head.
    """
    mask, prompt_lengths = rollout.completion_mask, rollout.prompt_mask.sum(1)
    output = model.get_decoder()(input_ids=without_left_padding(rollout), use_cache=False)
    before = prompt_lengths[:, None] - 1 + torch.arange(mask.shape[1], device=mask.device)  # t - 1 predicts t
    before = before.clamp(max=output.last_hidden_state.shape[1] - 1)
    hidden = output.last_hidden_state.gather(1, before[:, :, None].expand(-1, -1, output.last_hidden_state.shape[2]))
    head = model.get_output_embeddings().weight
    logprobs, entropy = chunked_logprobs(hidden[mask], head, rollout.completion_ids[mask], sampling, chunk, compile)
    zeros = logprobs.new_zeros(mask.shape)
    return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy), hidden


WIDTH_ON_GPU = 32  # sequences are this many tokens wide or a multiple: attention is twice as slow on odd widths


def without_left_padding(rollout: Rollout) -> Tensor:
    """Token ids [rows, W] of prompts and completions, each row moved to the left until its first token stands first.

    Padding then comes after all real tokens of its row, where causal attention does not see it. So no mask is needed,
    which the fastest attention kernels do not take, and the positions are 0, 1, 2, ... in every row.
    """
    start = (~rollout.prompt_mask).sum(1)
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    width = int((rollout.prompt_mask.sum(1) + rollout.completion_mask.sum(1)).max())
    if ids.is_cuda:
        width = -(-width // WIDTH_ON_GPU) * WIDTH_ON_GPU
    columns = start[:, None] + torch.arange(width, device=ids.device)
    return ids.gather(1, columns.clamp(max=ids.shape[1] - 1))


def chunked_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling, chunk: int, compile: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` under the sampling distribution, and the entropy of that distribution.

    hidden: [n, d] of any float dtype; head: [vocabulary, d]; targets: [n] int64. Returns (logprobs [n], entropy [n]),
    float32; entropy, in nats, carries no gradient. The head product runs in the dtype of `head`, or that of autocast;
    everything after it in float32. Float32 logits exist for `chunk` tokens at once, in both passes: each chunk is
    checkpointed, so the backward pass repeats its head product. `compile` fuses a chunk's passes over its logits.
    """
    of_chunk = _compiled if compile else _logprobs_and_entropy
    pieces = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        results = [of_chunk(h, head, t, sampling) for h, t in pieces]
    else:
        results = [
            checkpoint(of_chunk, h, head, t, sampling, use_reentrant=False, preserve_rng_state=False) for h, t in pieces
        ]
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _logprobs_and_entropy(hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    logits = sampling_logits(F.linear(hidden.to(head.dtype), head), sampling, keep=targets)
    distribution = logits.log_softmax(-1)
    logprobs = -F.nll_loss(distribution, targets, reduction="none")  # not gather, whose compiled backward writes zeros
    with torch.no_grad():  # comes last: the recomputation of a checkpoint stops before it
        lowest = torch.finfo(distribution.dtype).min  # of what is left out: 0 x -inf would be nan
        entropy = -distribution.exp().mul_(distribution.clamp(min=lowest)).sum(-1)
    return logprobs, entropy


_compiled = torch.compile(_logprobs_and_entropy, dynamic=True)
