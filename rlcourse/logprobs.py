"""Log-probs of the sampled tokens, in training as in sampling: one forward pass, the vocabulary in chunks.

The logits of a batch, [tokens, vocabulary] in float32, are by far its largest tensor: 64 x 512 tokens of a vocabulary
of 151,936 take 20 GB. Here they stand in memory for `chunk` tokens at once; the backward pass computes them again.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlcourse.batch import Rollout
from rlcourse.device import autocast
from rlcourse.lora import without_adapter
from rlcourse.sampling import Sampling, sampling_logits

WIDTH_ON_GPU = 32  # sequences are this many tokens wide or a multiple: attention is twice as slow on odd widths


class PlainPass:
    """`token_logprobs` and `hidden_states` of a model in a precision: "float32", or "bfloat16" by autocast.

    as_base: of a model with an adapter, what it is without it.
    """

    exact = False  # its numbers are not the engine's

    def __init__(self, model: PreTrainedModel, dtype: str, compile: bool = False, as_base: bool = False):
        self.model, self.dtype, self.compile, self.as_base = model, dtype, compile, as_base

    def token_logprobs(self, rollout: Rollout, sampling: Sampling, chunk: int) -> tuple[Tensor, Tensor]:
        with self._as_asked():
            return token_logprobs(self.model, rollout, sampling, chunk, self.compile)

    def hidden_states(self, rollout: Rollout) -> Tensor:
        with self._as_asked():
            return hidden_states(self.model, rollout)

    @contextmanager
    def _as_asked(self) -> Iterator[None]:
        base = without_adapter(self.model) if self.as_base else nullcontext()
        with base, autocast(self.dtype, self.model.device):
            yield


def token_logprobs(
    model: PreTrainedModel, rollout: Rollout, sampling: Sampling, chunk: int, compile: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of a rollout's tokens under the sampling distribution of the model as it is now.

    model: a causal LM of transformers whose logits are its last hidden states times its output embeddings, no more.
    Returns (logprobs [rows, T] float32, 0 beyond each completion; hidden [rows, T, d], see `hidden_states`). Only real
    completion tokens pass through the head.
    """
    mask, hidden = rollout.completion_mask, hidden_states(model, rollout)
    head = model.get_output_embeddings().weight
    logprobs = chunked_logprobs(hidden[mask], head, rollout.completion_ids[mask], sampling, chunk, compile)
    return logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs), hidden


def hidden_states(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """The model's last hidden state BEFORE each completion token, from which that token is predicted: [rows, T, d].

    Padding comes after all real tokens of its row, where causal attention does not see it. So no mask is needed, which
    the fastest attention kernels do not take, and positions are 0, 1, 2, ... in every row. Micro-batches have rows of
    like length, so little is padding: less than what a mask costs on a CPU, which rows that are joined would need.
    """
    ids = rollout.ids
    if ids.is_cuda:
        ids = F.pad(ids, (0, -ids.shape[1] % WIDTH_ON_GPU))
    states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    columns = torch.arange(rollout.logprobs.shape[1], device=ids.device)
    before = (rollout.prompt_lengths[:, None] - 1 + columns).clamp(max=ids.shape[1] - 1)  # t - 1 predicts t
    return states.gather(1, before[:, :, None].expand(-1, -1, states.shape[2]))


def chunked_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling, chunk: int, compile: bool = False
) -> Tensor:
    """Log-probs [n] float32 of `targets` under the sampling distribution.

    hidden: [n, d] of any float dtype; head: [vocabulary, d]; targets: [n] int64. The head product runs in the dtype of
    `head`, or that of autocast; everything after it in float32. Float32 logits exist for `chunk` tokens at once, in
    both passes: each chunk is checkpointed, so the backward pass repeats its head product. `compile` fuses a chunk's
    passes over its logits.
    """
    of_chunk = _compiled() if compile else _logprobs
    pieces = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        return torch.cat([of_chunk(h, head, t, sampling) for h, t in pieces])
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(of_chunk, h, head, t, sampling, **options) for h, t in pieces])


def _logprobs(hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    logits = sampling_logits(F.linear(hidden.to(head.dtype), head), sampling, keep=targets)
    # Not gather, whose compiled backward pass writes zeros.
    return -F.nll_loss(logits.log_softmax(-1), targets, reduction="none")


@functools.cache
def _compiled():
    """`_logprobs`, compiled. Only where it is asked for: importing the compiler takes over a second."""
    return torch.compile(_logprobs, dynamic=True)
