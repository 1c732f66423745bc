"""Rollout engines: who generates. All take the same prompts and give the same `Rollout`. `gpu_engine.py` and
`torch_engine.py` are the engine fast, `hf.py` is transformers' `generate`, `vllm.py` and `vllm_server.py` are vLLM."""

import sys
from typing import Protocol

import torch
from tqdm import tqdm

from rlcourse.batch import Prompts, Rollout
from rlcourse.config import ENGINES
from rlcourse.exact.weights import fused_weights, has_kernels, unknown_part
from rlcourse.policy import Policy
from rlcourse.sampling import Sampling
from rlcourse.settings import model_and_address

__all__ = ["Rollout", "RolloutEngine", "make_engine"]


class RolloutEngine(Protocol):
    """What the trainer needs of an engine. Randomness comes from torch's global generators (`torch.manual_seed`).
    exact: its log-probs are those of the exact training pass (`rlcourse.exact`), to the last bit."""

    exact: bool

    def generate(self, prompts: Prompts, num_generations: int, max_new_tokens: int, sampling: Sampling) -> Rollout:
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
    """The engine called `engine` over the policy's weights, sampling in `dtype`. hf-dynamic and hf-static: `generate`
    with one of its caches. fast: our own step, in kernels or in PyTorch; `compile` compiles what is in PyTorch.
    longest: tokens of a prompt and its completion at most, if known: hf-static's cache is then made for all. cache_gb:
    GB of the cache of fast's kernels, or of vllm; 0: room for each completion at its full length, or vllm's default.
    sleeps: `sleep` will be called, for which vLLM has to be prepared. vllm@http://HOST:PORT: a vLLM server samples
    instead of this process. hf-dynamic samples from a model that fast does not know, with a warning on stderr. Raises
    ValueError for an unknown name, or what an engine cannot do: a paged cache, a machine without GPU."""
    # An engine is imported when it is asked for: a laptop needs none of what the others import.
    engine, server = model_and_address(engine)
    if engine == "vllm" and server:
        from rlcourse.rollout.vllm_server import VLLMServerEngine

        return VLLMServerEngine(policy, dtype, server)
    if engine == "vllm":
        from rlcourse.rollout.vllm import VLLMEngine

        return VLLMEngine(policy, dtype, cache_gb, sleeps)
    if engine not in ENGINES:
        raise ValueError(f"Unknown engine {engine!r}: use {', '.join(ENGINES[:-1])} or {ENGINES[-1]}.")
    if cache_gb and engine != "fast":
        raise ValueError(f"A paged cache is for the engines fast and vllm, not {engine!r}: leave --cache-gb out.")
    if engine == "fast":
        unknown = unknown_part(policy.model)
        if cache_gb or not unknown:
            return _fast(policy, dtype, compile, cache_gb)
        tqdm.write(f"The fast engine does not know {unknown}: hf-dynamic samples instead.", file=sys.stderr)
    from rlcourse.rollout.hf import HFEngine

    return HFEngine(policy, dtype, "static" if engine == "hf-static" else "dynamic", longest=longest)


def _fast(policy: Policy, dtype: torch.dtype, compile: bool, cache_gb: float) -> RolloutEngine:
    if has_kernels(fused_weights(policy.model, dtype)):
        from rlcourse.rollout.gpu_engine import GPUEngine  # only where there is Triton

        return GPUEngine(policy, dtype, cache_gb)
    if cache_gb:
        needs = "an NVIDIA GPU since Ampere, 16-bit numbers and a model whose sizes our kernels can do"
        raise ValueError(f"A paged cache needs {needs}: leave --cache-gb out.")
    from rlcourse.rollout.torch_engine import TorchEngine

    return TorchEngine(policy, dtype, compile)
