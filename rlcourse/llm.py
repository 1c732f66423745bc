"""The rollout engine for programs of your own: prompts in; texts, tokens and their log-probs out."""

from dataclasses import dataclass

import torch

from rlcourse.config import make_config
from rlcourse.device import find_device, without_cudnn_attention
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling


@dataclass(frozen=True)
class Completion:
    """A sampled answer: its text; its tokens, with the one that ends it; the log-prob of each under the distribution it
    was sampled from; whether it ended by itself."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finished: bool


class LLM:
    """A model with the engine that samples from it.

        from rlcourse.llm import LLM

        llm = LLM("embedded")
        [[answer]] = llm.generate(["Tom has 3 apples and buys 12 more. How many apples does he have?"])

    model: "embedded", a folder, or a name on the Hugging Face hub. engine, cache_gb: see
    `rlcourse.rollout.make_engine`. dtype: "float32" or "bfloat16"; None: bfloat16 on a GPU. device: "cpu", "cuda" or
    "auto". Raises ValueError or FileNotFoundError, in one sentence, for what cannot be loaded.
    """

    def __init__(
        self, model: str = "embedded", engine: str = "fast", dtype: str | None = None, device: str = "auto",
        cache_gb: float = 0.0,
    ):  # fmt: skip
        found = find_device(make_config(device=device, engine=engine, cache_gb=cache_gb))
        dtype = dtype or ("bfloat16" if found.type == "cuda" else "float32")
        make_config(dtype=dtype)  # refuses what is no dtype
        self.policy = load_policy(model, found)
        self.engine = make_engine(self.policy, engine, getattr(torch, dtype), cache_gb=cache_gb, sleeps=True)

    def generate(
        self,
        prompts: list[str | list[int]],
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        num_generations: int = 1,
    ) -> list[list[Completion]]:
        """`num_generations` completions of each prompt, in their order; `torch.manual_seed` decides which.

        prompts: the question of a chat, or token ids as they are. sampling: temperature 1 if not given. Raises
        ValueError for prompts that are empty or don't fit, RuntimeError if probabilities aren't finite.
        """
        if isinstance(prompts, str) or not all(isinstance(prompt, str | list | tuple) for prompt in prompts):
            raise ValueError("prompts is a list of questions, or of lists of token ids: put a single one in brackets.")
        ids = [self.policy.prompt(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        entries = self.policy.model.get_input_embeddings().num_embeddings
        if not ids or not all(some and all(isinstance(t, int) and 0 <= t < entries for t in some) for some in ids):
            last = entries - 1
            raise ValueError(f"Every prompt needs a token, and every token an id from 0 to {last}: check the prompts.")
        if max_new_tokens < 1 or num_generations < 1:
            raise ValueError("max_new_tokens and num_generations must be at least 1.")
        with without_cudnn_attention():  # lengths differ from call to call
            rollout = self.engine.generate(ids, num_generations, max_new_tokens, sampling or Sampling())
        if not rollout.logprobs.isfinite().all():
            raise RuntimeError("The model's probabilities are not finite: use another checkpoint.")
        texts = self.policy.texts(rollout.completion_ids, rollout.completion_mask)
        of_rows = rollout.completion_ids, rollout.logprobs, rollout.completion_lengths, rollout.finished
        rows = zip(texts, *(of.tolist() for of in of_rows), strict=True)
        found = [Completion(text, tokens[:n], logprobs[:n], finished) for text, tokens, logprobs, n, finished in rows]
        return [found[first : first + num_generations] for first in range(0, len(found), num_generations)]

    def sleep(self) -> None:
        """Give the memory of cache and graphs back; the next call takes it again."""
        self.engine.sleep()
