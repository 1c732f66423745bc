"""Log-probs of tokens from the last residual stream: last norm, head, and the sampling distribution, for the trainer
and for the engine, of tokens that it samples outside of its own kernels. Logits stand in memory for `chunk` tokens at
once."""

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlcourse.exact import EXACT, VOCABULARY_TILE, backward_kernels, pass_kernels
from rlcourse.exact.layers import norm_backward, normed
from rlcourse.exact.products import add_to, linear, one_chain, product_float32
from rlcourse.exact.weights import FusedWeights
from rlcourse.sampling import Sampling, sampling_logits


def logprobs(model, weights: FusedWeights, x: Tensor, targets: Tensor, sampling: Sampling, chunk: int) -> Tensor:
    """Log-probs [n] float32 of `targets` [n] under the sampling distribution; x [n, d]: the residual stream after the
    last layer where they are predicted. Differentiable in x and the parameters of `model`."""
    if not sampling.restricted:
        parameters = model.model.norm.weight, model.lm_head.weight
        return LogProbs.apply(x, targets, weights, sampling.inverse_temperature, chunk, *parameters)

    def of_chunk(x: Tensor, targets: Tensor) -> Tensor:
        logits = ScaledLogits.apply(x, weights, model.model.norm.weight, model.lm_head.weight)
        return restricted_logprobs(logits, targets, sampling)

    pieces = zip(x.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([checkpoint(of_chunk, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces])


def restricted_logprobs(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs [n] of targets, of logits [n, vocabulary] that are restricted to top-k and top-p."""
    logits = sampling_logits(logits, sampling, keep=targets)
    return -torch.nn.functional.nll_loss(logits.log_softmax(-1), targets, reduction="none")


class LogProbs(torch.autograd.Function):
    """Log-probs of targets [n] at an inverse temperature, no token left out."""

    @staticmethod
    def forward(ctx, x, targets, weights, inverse_temperature, chunk, norm, head) -> Tensor:
        y, squares = normed(x, weights.norm, weights.dtype)
        found, log_mass = x.new_empty(len(x)), x.new_empty(len(x))
        with one_chain():
            for at in reversed(_chunks(len(x), chunk)):
                ctx.logits = linear(y[at], weights.head)  # not saved for autograd, as the backward pass overwrites it
                _logprobs(weights, ctx.logits, squares[at], targets[at], inverse_temperature, found[at], log_mass[at])
        ctx.save_for_backward(x, targets, y, squares, log_mass)
        ctx.settings = weights, inverse_temperature, chunk
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        weights, inverse_temperature, chunk = ctx.settings
        x, targets, y, squares, log_mass = ctx.saved_tensors
        dy = torch.empty_like(y)
        d_head = torch.zeros(weights.head.shape, device=x.device) if ctx.needs_input_grad[-1] else None
        vocabulary, d = weights.head.shape
        for at in _chunks(len(x), chunk):
            logits = linear(y[at], weights.head) if ctx.logits is None else ctx.logits
            grid = (len(logits), triton.cdiv(vocabulary, VOCABULARY_TILE))
            backward_kernels.logit_gradient_kernel[grid](
                logits, targets[at], squares[at], log_mass[at], gradient[at].contiguous(), vocabulary,
                inverse_temperature, weights.eps, d, VOCABULARY_TILE,
            )  # fmt: skip
            torch.mm(logits, weights.head, out=dy[at])
            if d_head is not None:  # below an adapter the head does not learn
                add_to(d_head, logits.T, y[at])
            logits = ctx.logits = None  # before there are others
        dx, _, _, d_norm = norm_backward(weights, x, weights.norm, squares, dy)
        return dx, None, None, None, None, d_norm, d_head


def _chunks(n: int, chunk: int) -> list[slice]:
    """Of n tokens, from the last on; the one that may be smaller is that of the first tokens."""
    return [slice(max(end - chunk, 0), end) for end in range(n, 0, -chunk)]


def _logprobs(weights, logits, squares, targets, inverse_temperature, logprobs, log_mass) -> None:
    """Of a chunk of logits [n, vocabulary], without their 1 / rms: its part of `logprobs` and `log_mass`."""
    n, vocabulary = logits.shape
    d, tiles = 32 * squares.shape[1], triton.cdiv(vocabulary, VOCABULARY_TILE)
    tile_max, tile_sum = (squares.new_empty(n, tiles) for _ in range(2))
    pass_kernels.mass_kernel[(tiles, n)](
        logits, squares, tile_max, tile_sum, vocabulary, inverse_temperature, weights.eps, d, VOCABULARY_TILE, tiles,
        PDL=False, num_warps=1, **EXACT,
    )  # fmt: skip
    pass_kernels.logprob_kernel[(n,)](
        logits, targets, squares, tile_max, tile_sum, logprobs, log_mass, vocabulary, inverse_temperature, weights.eps,
        d, tiles, triton.next_power_of_2(tiles), **EXACT,
    )  # fmt: skip


class ScaledLogits(torch.autograd.Function):
    """Logits [n, vocabulary] float32 of x [n, d]."""

    @staticmethod
    def forward(ctx, x, weights, norm, head) -> Tensor:
        y, squares = normed(x, weights.norm, weights.dtype)
        with one_chain():
            logits = linear(y, weights.head)
        scale = inverse_rms(weights, squares)
        ctx.save_for_backward(x, y, squares, scale)
        ctx.weights = weights
        return logits.float() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        weights = ctx.weights
        x, y, squares, scale = ctx.saved_tensors
        draw = (gradient * scale).to(weights.dtype)
        dx, _, _, d_norm = norm_backward(weights, x, weights.norm, squares, draw @ weights.head)
        return dx, None, d_norm, product_float32(draw.T, y)


def inverse_rms(weights: FusedWeights, squares: Tensor) -> Tensor:
    """1 / rms [n, 1] of rows, from their squares [n, d / 32]."""
    scale = squares.new_empty(len(squares), 1)
    pass_kernels.scale_kernel[(len(squares),)](squares, scale, weights.eps, 32 * squares.shape[1], **EXACT)
    return scale
