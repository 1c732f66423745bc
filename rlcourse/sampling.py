"""How a token is sampled from logits, and its log-probability. In PyTorch sampling and training both call
`sampling_logits`; the kernels of the GPU engine and of the exact pass both take `Sampling.inverse_temperature`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.settings import COUNT_OR_NONE, TEMPERATURE, TOP_P


@dataclass(frozen=True)
class Sampling:
    """Softmax of logits / temperature, restricted to top-k and top-p. temperature 0 means greedy; top_k 0 and top_p 1
    mean no restriction. Raises ValueError for a number out of range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature != 0:
            TEMPERATURE.check("temperature", self.temperature)
        COUNT_OR_NONE.check("top_k", self.top_k)
        TOP_P.check("top_p", self.top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def inverse_temperature(self) -> float:
        """What logits are multiplied with; 1 if greedy."""
        return 1.0 if self.greedy else 1.0 / self.temperature

    @property
    def restricted(self) -> bool:
        return self.top_k != 0 or self.top_p != 1.0


GREEDY = Sampling(temperature=0.0)


def sampling_logits(
    logits: Tensor, sampling: Sampling, keep: Tensor | None = None, temperature: Tensor | None = None
) -> Tensor:
    """The logits whose softmax is the sampling distribution, float32: scaled by temperature, -inf where excluded.

    logits: [..., vocabulary]. keep: [...] token ids that stay in the set even if rounding would put them just outside;
    training passes those that were sampled. Top-p keeps the smallest set of most probable tokens whose mass reaches
    top_p, applied after top-k. Greedy leaves the logits alone. temperature [1]: in place of the
    sampling's, so that one compiled program serves all.
    """
    logits = logits.float()
    if sampling.greedy:
        return logits
    if temperature is not None or sampling.temperature != 1.0:
        logits = logits / (sampling.temperature if temperature is None else temperature)
    if not sampling.restricted:
        return logits
    excluded = torch.zeros_like(logits, dtype=torch.bool)
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        excluded = logits < threshold
    if sampling.top_p < 1.0:
        ordered, order = logits.masked_fill(excluded, float("-inf")).sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # The mass before a token is enough already. In float64, as a GPU adds in an order that depends on the rows.
        beyond = probabilities.cumsum(-1, dtype=torch.float64) - probabilities >= sampling.top_p
        excluded = excluded | torch.zeros_like(excluded).scatter(-1, order, beyond)
    if keep is not None:
        excluded = excluded.scatter(-1, keep[..., None], False)
    return logits.masked_fill(excluded, float("-inf"))


def sample_tokens(logits: Tensor, sampling: Sampling, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw one token per row with torch's global random state: (tokens [rows] int64, their log-probs [rows] float32).

    logits: [rows, vocabulary]. Gumbel-max: argmax(logits - log(-log u)) is a draw from softmax(logits), done on the
    device without a sync; u = 0 gives -inf, a token that is never chosen. Greedy takes the argmax; its log-prob is that
    of the full softmax. temperature: see `sampling_logits`.
    """
    logits = sampling_logits(logits, sampling, temperature=temperature)
    if sampling.greedy:
        tokens = logits.argmax(-1)
    else:
        uniform = torch.rand(logits.shape, device=logits.device)
        tokens = (logits - uniform.log_().neg_().log_()).argmax(-1)
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs
