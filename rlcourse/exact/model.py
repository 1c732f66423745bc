"""Log-probs of a rollout's tokens by the training pass whose numbers are the engine's."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.batch import Rollout
from rlcourse.exact import head
from rlcourse.exact.captured import CapturedLayers
from rlcourse.exact.layers import trunk
from rlcourse.exact.sequences import Sequences
from rlcourse.exact.weights import fused_weights
from rlcourse.sampling import Sampling

WIDTH = 64  # of which the number of tokens and the longest sequence are multiples


class ExactPass:
    """What `rlcourse.logprobs` computes, of a float32 model of `FusedWeights`, with the numbers of the fast engine.
    recompute: save memory, see `LayerFunction`."""

    exact = True

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, recompute: bool = False):
        self.model, self.weights, self.recompute = model, fused_weights(model, dtype), recompute
        self.captured = None if recompute or model.device.type != "cuda" else CapturedLayers(model, self.weights)

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
        self.weights.follow(self.model)
        ids, sequences, before = pack(rollout, self.captured)
        x = trunk(self.model, self.weights, ids, sequences, self.recompute, self.captured)
        return x[before]  # whose gradient is added up in one order, that of index_select is not

    def _normed(self, states: Tensor, mask: Tensor) -> Tensor:
        norm = self.model.model.norm
        normed = F.rms_norm(states, states.shape[-1:], norm.weight, norm.variance_epsilon)
        return normed.new_zeros(*mask.shape, states.shape[-1]).masked_scatter(mask[:, :, None], normed)


def pack(rollout: Rollout, captured: CapturedLayers | None = None) -> tuple[Tensor, Sequences, Tensor]:
    """The rollout's tokens without its padding, each prompt once: (ids [N], sequences, before [completion tokens]:
    where among the N the token before each of them is). Sequences are rows, those of one prompt together; behind them
    some of padding make N a multiple of `size_step`. captured: who captures each size by itself, so that there should
    be fewer of them: for that, empty sequences make their number one of `few`."""
    ids, device, host = rollout.ids, rollout.ids.device, rollout.ids.cpu().numpy()
    prompts, answers = rollout.prompt_lengths.cpu(), rollout.completion_lengths.cpu()
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts.tolist()):
        groups.setdefault(host[row, :prompt].tobytes(), []).append(row)
    order = torch.tensor([row for rows in groups.values() for row in rows])
    follows = torch.tensor([row != rows[0] for rows in groups.values() for row in rows])
    shared = prompts[order] * follows
    lengths = (prompts + answers)[order]
    tokens = int((lengths - shared).sum())
    step, width = size_step(tokens), WIDTH
    coarse = max(2 * step, captured.step // WIDTH * WIDTH) if captured is not None else 0
    captures = captured is not None and tokens + coarse <= captured.tokens
    if captures:
        step, width = coarse, 2 * WIDTH
    length = ids.shape[1] + -ids.shape[1] % width
    count = len(lengths) + -(-step // length)
    fillers = length * torch.arange((few(count) if captures else count) - len(lengths))
    lengths = torch.cat([lengths, (-tokens % step - fillers).clamp(0, length)])
    sequences = Sequences.of(lengths, F.pad(shared, (0, len(fillers))), length, device)
    ids = F.pad(ids[order.to(device)], (0, length - ids.shape[1], 0, len(fillers))).flatten()[sequences.places]
    count, before = int(answers.sum()), prompts - 1 + answers - answers.cumsum(0)
    answers, before, place = torch.stack([answers, before, order.argsort()]).to(device)
    row = torch.arange(len(answers), device=device).repeat_interleave(answers, output_size=count)
    return ids, sequences, sequences.find(place[row], before[row] + torch.arange(count, device=device))


def few(count: int) -> int:
    """The next number up of a few: multiples of 4, and of a quarter of the next power of two."""
    unit = max(4, 2 ** (count - 1).bit_length() // 4)
    return -(-count // unit) * unit


def size_step(tokens: int) -> int:
    """Of which N is a multiple: WIDTH, or of 4,096 tokens and more a 64th to a 32nd. For each new size cuBLAS looks for
    its kernels anew, which takes the host longer than a small model takes the GPU."""
    return max(WIDTH, 2 ** (tokens.bit_length() - 1) // 32)
