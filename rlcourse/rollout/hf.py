"""The engine that everybody starts from: transformers' `generate`, with a dynamic or a static cache. A logits processor
of ours makes the sampling distribution, so that sampling and training share one definition, and keeps log-probs."""

import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, LogitsProcessor, StaticCache

from rlcourse.batch import Prompts, Rollout, completion_lengths, make_rollout
from rlcourse.dist import is_sharded
from rlcourse.lora import base_parameters, copy_merged
from rlcourse.policy import Policy, check_positions, low_precision_copy
from rlcourse.sampling import Sampling, sampling_logits


def left_pad(prompts: Prompts, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [prompts, P] int64, padded on the left, and the mask [prompts, P] int64, 0 on padding."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return ids, (torch.arange(width, device=device) >= width - lengths[:, None]).long()


class KeepLogprobs(LogitsProcessor):
    """Turn logits into the sampling distribution, and keep the log-prob of the token sampled from it: that of step t is
    seen at step t + 1 as the last input, the last one by `finish`."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.distribution: Tensor | None = None
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.finish(input_ids)
        self.distribution = sampling_logits(scores, self.sampling).log_softmax(-1)
        return self.distribution

    def finish(self, input_ids: Tensor) -> None:
        if self.distribution is not None:
            self.logprobs.append(self.distribution.gather(1, input_ids[:, -1:]))


class HFEngine:
    """Rollouts by `generate`. cache: "dynamic", "static", or "none", which computes the whole sequence anew for each
    token. With a static cache, which is kept from call to call, transformers compiles the decode step on a GPU if
    `compile`. attention: "sdpa", or with a static cache a name registered in transformers' `AttentionInterface`.
    longest: tokens of prompt and completion that a static cache has room for from the start. Raises ValueError for an
    unknown attention, or one that has no static cache."""

    exact = False

    def __init__(
        self,
        policy: Policy,
        dtype: torch.dtype = torch.float32,
        cache: str = "dynamic",
        compile: bool = True,
        attention: str = "sdpa",
        longest: int | None = None,
    ):
        if attention not in AttentionInterface():
            raise ValueError(f"Unknown attention {attention!r}: register it in transformers' AttentionInterface first.")
        if attention != "sdpa" and cache != "static":
            raise ValueError(f"Attention {attention!r} reads a static cache: use cache='static', not {cache!r}.")
        self.policy, self.cache, self.compile, self.longest = policy, cache, compile, longest
        self.kept: tuple[int, int, StaticCache] | None = None  # rows, tokens and the cache
        own = dtype != torch.float32 or attention != "sdpa" or is_sharded(policy.model)
        self.model = low_precision_copy(policy.model, dtype) if own else policy.model
        if attention != "sdpa":
            self.model.set_attn_implementation(attention)

    @torch.no_grad()
    def generate(self, prompts: Prompts, num_generations: int, max_new_tokens: int, sampling: Sampling) -> Rollout:
        """See `RolloutEngine`. Raises ValueError when prompt and completion do not fit the model's positions."""
        check_positions(self.policy.model, max(map(len, prompts)) + max_new_tokens)
        self._sync()
        ids, mask = left_pad(prompts, self.policy.pad_id, self.policy.device)
        ids, mask = ids.repeat_interleave(num_generations, dim=0), mask.repeat_interleave(num_generations, dim=0)
        keep, static = KeepLogprobs(sampling), self.cache == "static"
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=not sampling.greedy, eos_token_id=self.policy.eos_ids,
            pad_token_id=self.policy.pad_id, use_cache=self.cache != "none", disable_compile=not self.compile,
            temperature=1.0, top_k=0, top_p=1.0,  # ours are applied in KeepLogprobs; top-k is 50 by default
        )  # fmt: skip
        cache = self._static_cache(len(ids), ids.shape[1] + max_new_tokens) if static else None
        inputs = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
        training = self.model.training
        self.model.eval()
        output = self.model.generate(**inputs, generation_config=settings, logits_processor=[keep])
        self.model.train(training)
        keep.finish(output)
        completion_ids = output[:, ids.shape[1] :]
        lengths = completion_lengths(completion_ids, self.policy.eos_ids)
        return make_rollout(self.policy, prompts, completion_ids, lengths, torch.cat(keep.logprobs, dim=1))

    def sleep(self) -> None:
        """Give back the memory of a static cache; the next rollout makes it anew."""
        self.kept = None

    def _static_cache(self, rows: int, tokens: int) -> StaticCache:
        """An empty cache for so many rows and tokens at least: the one that is there, if it will do."""
        if self.kept is not None and self.kept[0] == rows and self.kept[1] >= tokens:
            self.kept[2].reset()
        else:
            room = max(tokens, self.longest or 0)
            self.kept = rows, room, StaticCache(config=self.model.config, max_cache_len=room)
        return self.kept[2]

    def _sync(self) -> None:
        """Take over the policy's weights as they are now, an adapter merged, where sampling runs on a copy."""
        if self.model is not self.policy.model:
            model = self.policy.model
            copy_merged(list(self.model.parameters()), base_parameters(model), model)
