"""From hidden states to log-probs: the head's product, the vocabulary in chunks.

The logits of a batch, [tokens, vocabulary] in float32, are by far its largest tensor: 64 x 512 tokens of a vocabulary
of 151,936 take 20 GB. Only those of `chunk` tokens are in memory; the backward pass computes them again.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlcourse.sampling import Sampling, sampling_logits

OWN_LOGITS = "own_logits"  # the attribute of a model whose logits are more than hidden states times head


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head: its last hidden states are [rows, W, d]."""
    found = model.get_decoder()
    return found if isinstance(found, PreTrainedModel) else model.base_model  # ModernBERT calls its head `decoder`


def logprobs_and_states(
    model: PreTrainedModel,
    pick: Callable[[Tensor], Tensor],
    targets: Tensor,
    sampling: Sampling,
    chunk: int,
    compile: bool,
    **inputs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probs [n] float32 of `targets`, and the last hidden states [rows, W, d] of the model's `inputs`.

    pick: from [rows, W, ...] the n places before the targets. Where `try_model` has found a model's logits to be more
    than hidden states times output embeddings, they're its own, all at once; else in chunks.
    """
    if not getattr(model, OWN_LOGITS, False):
        states = trunk_of(model)(**inputs, use_cache=False).last_hidden_state
        head = model.get_output_embeddings().weight
        return chunked_logprobs(pick(states), head, targets, sampling, chunk, compile), states
    found: list[Tensor] = []
    with trunk_of(model).register_forward_hook(lambda module, given, output: found.append(output[0])):
        logits = model(**inputs, use_cache=False).logits
    return _of_logits(pick(logits), targets, sampling), found[-1]


def chunked_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling, chunk: int, compile: bool = False
) -> Tensor:
    """Log-probs [n] float32 of `targets` [n] int64 under the sampling distribution.

    hidden: [n, d] of any float dtype; head: [vocabulary, d]. The head product runs in the dtype of `head`, or that of
    autocast; everything after it in float32. Each chunk is checkpointed, so the backward pass repeats its head product.
    `compile` fuses a chunk's passes over its logits.
    """
    of_chunk = _compiled() if compile else _logprobs
    pieces = list(zip(hidden.split(chunk), targets.split(chunk), strict=True))
    if len(pieces) == 1 or not torch.is_grad_enabled():
        return torch.cat([of_chunk(h, head, t, sampling) for h, t in pieces])
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(of_chunk, h, head, t, sampling, **options) for h, t in pieces])


def _logprobs(hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    return _of_logits(F.linear(hidden.to(head.dtype), head), targets, sampling)


def _of_logits(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    logits = sampling_logits(logits, sampling, keep=targets)
    # Not gather, whose compiled backward pass writes zeros.
    return -F.nll_loss(logits.log_softmax(-1), targets, reduction="none")


@functools.cache
def _compiled():
    """Compiled only where it's asked for: importing the compiler takes over a second."""
    return torch.compile(_logprobs, dynamic=True)
