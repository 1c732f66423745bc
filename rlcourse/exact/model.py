"""Log-probs of a rollout's tokens by the training pass whose numbers are the engine's."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.batch import Rollout
from rlcourse.exact import head
from rlcourse.exact.layers import trunk
from rlcourse.exact.sequences import Sequences
from rlcourse.exact.weights import fused_weights
from rlcourse.sampling import Sampling

WIDTH = 64  # tokens are a multiple of it, and so is the longest sequence: cuDNN plans for each length, Triton for some


class ExactPass:
    """What `rlcourse.logprobs` computes, of a model of `FusedWeights` that is float32, with the numbers of the fast
    engine. recompute: save memory, computing each layer again for its gradients."""

    exact = True

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, recompute: bool = False):
        self.model, self.weights, self.recompute = model, fused_weights(model, dtype), recompute

    def token_logprobs(self, rollout: Rollout, sampling: Sampling, chunk: int) -> tuple[Tensor, Tensor]:
        """(logprobs [rows, T] float32, 0 beyond each completion; hidden [rows, T, d], likewise)."""
        mask, states = rollout.completion_mask, self._states(rollout)
        found = head.logprobs(self.model, self.weights, states, rollout.completion_ids[mask], sampling, chunk)
        return found.new_zeros(mask.shape).masked_scatter(mask, found), self._normed(states, mask)

    def hidden_states(self, rollout: Rollout) -> Tensor:
        """The last hidden state BEFORE each completion token, [rows, T, d] float32, 0 beyond each completion."""
        return self._normed(self._states(rollout), rollout.completion_mask)

    def _states(self, rollout: Rollout) -> Tensor:
        """The residual stream [completion tokens, d] after the last layer, before each of them."""
        self.weights.sync(self.model)
        ids, sequences = pack(rollout)
        x = trunk(self.model, self.weights, ids, sequences, self.recompute)
        columns = torch.arange(rollout.logprobs.shape[1], device=x.device)
        before = (sequences.bounds[:-2] + rollout.prompt_lengths)[:, None] - 1 + columns
        return x.index_select(0, before[rollout.completion_mask])

    def _normed(self, states: Tensor, mask: Tensor) -> Tensor:
        norm = self.model.model.norm
        normed = F.rms_norm(states, states.shape[-1:], norm.weight, norm.variance_epsilon)
        return normed.new_zeros(*mask.shape, states.shape[-1]).masked_scatter(mask[:, :, None], normed)


def pack(rollout: Rollout) -> tuple[Tensor, Sequences]:
    """The rollout's tokens [N] without its padding, each row a sequence; behind them a last one, of padding, that makes
    N a multiple of WIDTH."""
    width = rollout.ids.shape[1]
    lengths = F.pad(rollout.lengths, (0, 1))
    lengths[-1] = -lengths.sum() % WIDTH
    sequences = Sequences.of(lengths, max(width + -width % WIDTH, WIDTH))
    return F.pad(rollout.ids, (0, sequences.length - width, 0, 1)).flatten()[sequences.places], sequences
