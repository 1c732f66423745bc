"""Rollout engines: who generates. All take the same prompts and give the same `Rollout`.

`hf.py` calls transformers' `generate`; `fast.py` runs a decode step of its own over a static cache, `paged.py` the same
step over a paged one; `vllm.py` asks vLLM, for models that our step does not know, and `vllm_server.py` a server of it.
"""

import sys
from typing import Protocol

import torch
from tqdm import tqdm

from rlcourse.batch import Rollout
from rlcourse.config import ENGINES
from rlcourse.exact.weights import unknown_part
from rlcourse.policy import Policy
from rlcourse.sampling import Sampling
from rlcourse.settings import model_and_address

__all__ = ["Rollout", "RolloutEngine", "make_engine"]


class RolloutEngine(Protocol):
    """What the trainer needs of an engine. Randomness comes from torch's global generators (`torch.manual_seed`).

    exact: its log-probs are those of the exact training pass (`rlcourse.exact`), to the last bit.
    """

    exact: bool

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """Sample `num_generations` completions of each prompt (token ids) with the model's weights as they are now."""
        ...

    def sleep(self) -> None:
        """Give back the memory that is not needed until the next rollout."""
        ...


def make_engine(
    policy: Policy,
    engine: str,
    dtype: torch.dtype,
    compile: bool = False,
    longest: int | None = None,
    cache_gb: float = 0.0,
    sleeps: bool = False,
) -> RolloutEngine:
    """The engine called `engine` over the policy's weights, sampling in `dtype`.

    hf-dynamic and hf-static: `generate` with one of its caches; fast: our own step, compiled where it is in PyTorch and
    `compile` says so. longest: tokens of a prompt and its completion at most, if known: a static cache is then made for
    all. cache_gb: the fast engine has a paged cache of so many GB; 0: each completion has room for its full length. Of
    vllm it is the cache's size in any case. sleeps: `sleep` will be called, for which vLLM has to be prepared.
    vllm@http://HOST:PORT: a vLLM server samples instead of this process. A model that the fast engine does not know is
    sampled from by hf-dynamic, which a sentence on stderr says. Raises ValueError for an unknown name, or
    what an engine cannot do: a paged cache, a machine without GPU.
    """
    # An engine is imported when it is asked for: a laptop needs none of what the others import.
    engine, server = model_and_address(engine)
    if engine == "vllm" and server:
        from rlcourse.rollout.vllm_server import VLLMServerEngine

        return VLLMServerEngine(policy, dtype, server)
    if engine == "vllm":
        from rlcourse.rollout.vllm import VLLMEngine

        return VLLMEngine(policy, dtype, cache_gb, sleeps)
    if cache_gb:
        if engine != "fast":
            raise ValueError(f"A paged cache is for the engines fast and vllm, not {engine!r}: leave --cache-gb out.")
        from rlcourse.rollout.paged import PagedEngine  # only where there is Triton

        return PagedEngine(policy, dtype, cache_gb)

    if engine not in ENGINES:
        raise ValueError(f"Unknown engine {engine!r}: use {', '.join(ENGINES[:-1])} or {ENGINES[-1]}.")
    if engine == "fast":
        unknown = unknown_part(policy.model)
        if not unknown:
            from rlcourse.rollout.fast import FastEngine

            return FastEngine(policy, dtype, compile)
        tqdm.write(f"The fast engine does not know {unknown}: hf-dynamic samples instead.", file=sys.stderr)
    from rlcourse.rollout.hf import HFEngine

    return HFEngine(policy, dtype, "static" if engine == "hf-static" else "dynamic", longest=longest)
