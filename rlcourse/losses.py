"""The losses: one surrogate per token, one aggregation to a scalar, the value loss of PPO and the KL to a reference.

Log-probs, values and advantages are [rows, length], mask is bool [rows, length], True on the tokens that count. What is
at masked positions does not matter, even inf or nan: results and gradients there are 0. So inputs are filled before any
arithmetic, as 0 * nan is nan, and the gradient of a product would pass it on.
"""

import torch
from torch import Tensor


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """pi / pi_old, [rows, length], 0 where masked. Raises ValueError for another level.

    level "token": that of each token (PPO, GRPO). "sequence": the geometric mean over the completion, the same number
    at each of its tokens (GSPO, Zheng et al. 2025, arXiv:2507.18071, equation 7), with the gradient at token t of log
    pi(token t), as in GSPO-token (equation 14), so advantages may differ from token to token.
    """
    log_ratio = logprobs.masked_fill(~mask, 0.0) - old_logprobs.masked_fill(~mask, 0.0)
    if level == "sequence":
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = mean.detach() + (log_ratio - log_ratio.detach())
    elif level != "token":
        raise ValueError(f"Unknown ratio {level!r}: use token or sequence.")
    return log_ratio.exp().masked_fill(~mask, 0.0)


def token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    surrogate: str,
    ratio: str,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """The policy-gradient loss of each token, to be minimised, and where the clip was at work.

    logprobs (with gradient), old_logprobs: [rows, length]; advantages: [rows] or [rows, length], constants. With the
    importance ratio r (`importance_ratio` at level `ratio`) and the advantage A, `surrogate` is
      "reinforce": -A log pi, the ratio and the clip unused (Williams 1992);
      "clip": -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, Schulman et al. 2017, arXiv:1707.06347, equation
        7; clip_high above clip_low is DAPO's clip-higher, arXiv:2503.14476);
      "cispo": -min(r, 1 + clip_high) A log pi, the first factor a constant (CISPO, MiniMax 2025, arXiv:2506.13585;
        the lower clip is left out). In TRL `epsilon_high` is the cap itself: its 5.0 is clip_high 4.0.
    Returns (loss [rows, length], clipped bool [rows, length]), 0 and False where masked. clipped marks the tokens whose
    gradient the clip took away ("clip") or whose weight it capped ("cispo"). Raises ValueError for another surrogate.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    advantages = advantages.expand_as(mask).masked_fill(~mask, 0.0)
    logprobs = logprobs.masked_fill(~mask, 0.0)
    if surrogate == "reinforce":
        return -advantages * logprobs, torch.zeros_like(mask)
    r = importance_ratio(logprobs, old_logprobs, mask, ratio)
    if surrogate == "clip":
        loss = -torch.minimum(r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages)
        clipped = ((r > 1 + clip_high) & (advantages > 0)) | ((r < 1 - clip_low) & (advantages < 0))
    elif surrogate == "cispo":
        loss = -r.detach().clamp(max=1 + clip_high) * advantages * logprobs
        clipped = r > 1 + clip_high
    else:
        raise ValueError(f"Unknown surrogate {surrogate!r}: use reinforce, clip or cispo.")
    return loss, clipped


def sampler_correction(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, level: str, cap: float) -> Tensor:
    """Truncated importance weights of the token losses, [rows, length], for a sampler that isn't quite the policy
    (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").

    logprobs: the trainer's before any update; sampler_logprobs: those tokens were sampled with. level "off": 1
    everywhere; "token": min(pi(token) / pi_sampler(token), cap); "sequence": the ratio of the whole completion, capped
    alike. Without gradient; 1 where masked. Raises ValueError for another level.
    """
    if level == "off":
        return torch.ones_like(logprobs)
    if level not in ("token", "sequence"):
        raise ValueError(f"Unknown sampler correction {level!r}: use off, token or sequence.")
    log_ratio = (logprobs.detach() - sampler_logprobs).masked_fill(~mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(mask)
    return log_ratio.exp().clamp(max=cap).masked_fill(~mask, 1.0)


def aggregate(token_values: Tensor, mask: Tensor, how: str, *, rows: int, tokens: int, max_new_tokens: int) -> Tensor:
    """One number from values by token [rows, length]: the loss of a mini-batch, or a micro-batch's share of it.

    how is
      "sequence_mean": the mean over rows of the mean over their tokens (GRPO), so a token of a long completion weighs
        less;
      "token_mean": the mean over all tokens (DAPO);
      "constant": the sum divided by rows * max_new_tokens, the same for every batch (Dr. GRPO).
    rows and tokens count the WHOLE mini-batch, also when token_values is a micro-batch of it: then the results of the
    micro-batches add up to that of the mini-batch. A row without real tokens adds 0 and still counts as a row. Raises
    ValueError for another `how`.
    """
    token_values = token_values.masked_fill(~mask, 0.0)
    if how == "sequence_mean":
        return (token_values.sum(1) / mask.sum(1).clamp(min=1)).sum() / rows
    if how == "token_mean":
        return token_values.sum() / max(tokens, 1)
    if how == "constant":
        return token_values.sum() / (rows * max_new_tokens)
    raise ValueError(f"Unknown aggregation {how!r}: use sequence_mean, token_mean or constant.")


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """PPO's clipped value loss of each token: half the larger of two squared errors. [rows, length], 0 where masked.

    One error is that of the value (with gradient), the other that of the value kept within `clip` of its old value, so
    that a value gains nothing from moving further in one update (OpenAI baselines; detail 9 of Huang et al. 2022, "The
    37 implementation details of PPO").
    """
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3, an estimate of KL(policy || reference) from each sampled token: exp(-d) - 1 + d, d = log pi - log pi_ref
    (Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html). [rows, length], 0 where masked.

    It's unbiased, never negative, and has low variance. As a loss its mean gradient is that of the other direction,
    KL(reference || policy), for the next token; what a token does to later KL is left out (Tang and Munos 2025,
    arXiv:2506.09477).
    """
    difference = logprobs.masked_fill(~mask, 0.0) - ref_logprobs.masked_fill(~mask, 0.0)
    return torch.expm1(-difference) + difference
