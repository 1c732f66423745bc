"""Log-probs of a rollout's tokens by the training pass whose numbers are the engine's."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.batch import Rollout
from rlcourse.exact import head
from rlcourse.exact.layers import trunk
from rlcourse.exact.weights import fused_weights
from rlcourse.sampling import Sampling

WIDTH = 64  # sequences are this many tokens wide or a multiple: cuDNN plans attention's backward pass for each width


class ExactPass:
    """What `rlcourse.logprobs` computes, of a model of `FusedWeights` that is float32, with the numbers of the fast
    engine. recompute: save memory, computing each layer again for its gradients."""

    exact = True

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, recompute: bool = False):
        self.model, self.weights, self.recompute = model, fused_weights(model, dtype), recompute

    def token_logprobs(self, rollout: Rollout, sampling: Sampling, chunk: int) -> tuple[Tensor, Tensor]:
        """(logprobs [rows, T] float32, 0 beyond each completion; hidden [rows, T, d])."""
        mask, states = rollout.completion_mask, self._states(rollout)
        found = head.logprobs(self.model, self.weights, states[mask], rollout.completion_ids[mask], sampling, chunk)
        return found.new_zeros(mask.shape).masked_scatter(mask, found), self._normed(states)

    def hidden_states(self, rollout: Rollout) -> Tensor:
        """The last hidden state BEFORE each completion token, [rows, T, d] float32."""
        return self._normed(self._states(rollout))

    def _states(self, rollout: Rollout) -> Tensor:
        """The residual stream [rows, T, d] after the last layer, before each completion token."""
        self.weights.sync(self.model)
        ids = F.pad(rollout.ids, (0, -rollout.ids.shape[1] % WIDTH))
        x = trunk(self.model, self.weights, ids, self.recompute).view(*ids.shape, -1)
        columns = torch.arange(rollout.logprobs.shape[1], device=x.device)
        before = (rollout.prompt_lengths[:, None] - 1 + columns).clamp(max=x.shape[1] - 1)
        return x.gather(1, before[:, :, None].expand(-1, -1, x.shape[2]))

    def _normed(self, states: Tensor) -> Tensor:
        norm = self.model.model.norm
        return F.rms_norm(states, states.shape[-1:], norm.weight, norm.variance_epsilon)
