"""What the model itself says about a rollout: the reference of the engines' tests."""

import torch

from rlcourse.sampling import sampling_logits


def recomputed_logprobs(policy, rollout, sampling):
    """The log-probs [rows, T] of a rollout's tokens, by one pass over whole sequences; 0 beyond the completions."""
    with torch.no_grad():
        logits = policy.model(rollout.ids, use_cache=False).logits  # causal: padding behind a row is not seen
    columns = torch.arange(rollout.logprobs.shape[1], device=rollout.ids.device)
    before = (rollout.prompt_lengths[:, None] + columns - 1).clamp(max=rollout.ids.shape[1] - 1)
    logits = logits[torch.arange(len(logits), device=logits.device)[:, None], before]
    ids = rollout.completion_ids
    chosen = sampling_logits(logits, sampling, keep=ids).log_softmax(-1).gather(2, ids[..., None])[..., 0]
    return chosen.masked_fill(~rollout.completion_mask, 0.0)


def answers(rollout) -> list[list[int]]:
    """The token ids of each completion."""
    lengths = rollout.completion_lengths.tolist()
    return [ids[:length] for ids, length in zip(rollout.completion_ids.tolist(), lengths, strict=True)]


def assert_logprobs_are_the_models(policy, rollout, sampling, atol: float = 1e-4) -> None:
    torch.testing.assert_close(rollout.logprobs, recomputed_logprobs(policy, rollout, sampling), atol=atol, rtol=0)


def change(policy) -> None:
    """The policy's weights, as an update would."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
