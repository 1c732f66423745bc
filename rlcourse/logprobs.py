"""Log-probs of the sampled tokens, in training as in sampling: one forward pass, the vocabulary in chunks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.batch import Rollout
from rlcourse.device import autocast
from rlcourse.head import chunked_logprobs, logprobs_and_states, trunk_of  # noqa: F401 (lesson 12 imports the first from here)
from rlcourse.lora import without_adapter
from rlcourse.sampling import Sampling

WIDTH_ON_GPU = 32  # sequences are this many tokens wide or a multiple: attention is twice as slow on odd widths


class PlainPass:
    """A model's log-probs and states in "float32", or in "bfloat16" by autocast. as_base: without its adapter."""

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
    """Log-probs [rows, T] float32 of a rollout's tokens under the model's sampling distribution, 0 beyond each
    completion, and `hidden_states` [rows, T, d]. Only real completion tokens pass through the head."""
    ids, mask = padded_ids(rollout), rollout.completion_mask
    logprobs, states = logprobs_and_states(
        model, lambda of_ids: before_each_token(of_ids, rollout)[mask], rollout.completion_ids[mask], sampling, chunk,
        compile, input_ids=ids,
    )  # fmt: skip
    return logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs), before_each_token(states, rollout)


def hidden_states(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """The model's last hidden state BEFORE each completion token, from which that token is predicted: [rows, T, d]."""
    states = trunk_of(model)(input_ids=padded_ids(rollout), use_cache=False).last_hidden_state
    return before_each_token(states, rollout)


def padded_ids(rollout: Rollout) -> Tensor:
    """The rollout's ids, on a GPU as wide as attention likes them. Padding comes after a row's tokens, where causal
    attention doesn't see it: no mask is needed, which the fastest kernels don't take, and positions are 0, 1, 2, ..."""
    ids = rollout.ids
    if ids.is_cuda:
        ids = F.pad(ids, (0, -ids.shape[1] % WIDTH_ON_GPU))
    return ids


def before_each_token(values: Tensor, rollout: Rollout) -> Tensor:
    """Values [rows, W, d] at the place before each completion token: [rows, T, d]."""
    columns = torch.arange(rollout.logprobs.shape[1], device=values.device)
    before = (rollout.prompt_lengths[:, None] - 1 + columns).clamp(max=values.shape[1] - 1)  # t - 1 predicts t
    return values.gather(1, before[:, :, None].expand(-1, -1, values.shape[2]))
