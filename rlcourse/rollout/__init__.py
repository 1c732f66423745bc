"""Rollout engines: who generates, slowest first. All take the same prompts and give the same `Rollout`.

`hf.py` calls `generate`, with the attention kernel of `attention.py` if it should; `graph.py` runs its own decode step
over a static cache, captured in a CUDA graph on a GPU.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlcourse.config import ENGINES
from rlcourse.policy import Policy
from rlcourse.sampling import Sampling


@dataclass
class Rollout:
    """Sampled completions. Rows are group-major: row i answers prompt i // num_generations.

    prompt_ids [rows, P] int64, left-padded; prompt_mask [rows, P] bool, False on padding;
    completion_ids [rows, T] int64, right-padded; completion_mask [rows, T] bool, True up to and including EOS;
    logprobs [rows, T] float32, of each token under the distribution it was drawn from, 0 where masked;
    finished [rows] bool, True where EOS was drawn within the limit.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    logprobs: Tensor
    finished: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens in each completion, EOS included: [rows] int64."""
        return self.completion_mask.sum(1)

    def __getitem__(self, rows) -> "Rollout":
        return Rollout(**{name: value[rows] for name, value in vars(self).items()})


class RolloutEngine(Protocol):
    """What the trainer needs of an engine. Randomness comes from torch's global generators (`torch.manual_seed`)."""

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """Sample `num_generations` completions of each prompt (token ids) with the model's weights as they are now."""
        ...

    def sleep(self) -> None:
        """Give back the memory that is not needed until the next rollout."""
        ...


def left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [prompts, P] int64 with padding on the left, and the mask [prompts, P] bool, False on padding."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def make_engine(
    policy: Policy, engine: str, dtype: torch.dtype, compile: bool = False, longest: int | None = None
) -> RolloutEngine:
    """The engine called `engine` over the policy's weights, sampling in `dtype`.

    hf-dynamic and hf-static: `generate` with one of its caches; hf-static-breaks and hf-static-operation: with our
    attention kernel, see `rlcourse.course.lessons.generate_attention`; graph: our own step. longest: tokens of a prompt and its
    completion at most, if known: a static cache is then made for all. Raises ValueError for an unknown name, or an
    architecture that the graph engine does not know.
    """
    if engine == "graph":
        from rlcourse.rollout.graph import GraphEngine

        return GraphEngine(policy, dtype, compile)
    if engine not in ENGINES:
        raise ValueError(f"Unknown engine {engine!r}: use {', '.join(ENGINES[:-1])} or {ENGINES[-1]}.")
    from rlcourse.rollout.hf import HFEngine

    _, cache, *way = engine.split("-")
    return HFEngine(policy, dtype, cache, attention=f"rlcourse-{way[0]}" if way else "sdpa", longest=longest)
