"""vLLM as a rollout engine, for models that our own does not know: `python -m pip install 'rlcourse[vllm]'`. It runs in
the trainer's process on the trainer's GPU; of several ranks, each has its own. It is made from the policy's config
alone, with random weights, and takes over the policy's before each rollout, in memory. Log-probs are those of vLLM's
kernels, which round differently from the trainer's: `mismatch` in a step's metrics says by how much."""

import copy
import gc
import importlib.util
import os
import random
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.batch import Prompts, Rollout, make_rollout, right_pad
from rlcourse.dist import launched
from rlcourse.lora import merged_parameters, plain_parameters
from rlcourse.policy import Policy, check_positions
from rlcourse.sampling import Sampling

CACHE_GB = 4.0  # of keys and values, if nothing else is said
MAX_ROWS = 256  # completions decoded at once; more wait their turn
TEMPERATURES = 0.01, 2.0  # it raises lower ones, without a word, and refuses higher ones
LIVING: weakref.WeakSet["VLLMEngine"] = weakref.WeakSet()


class VLLMEngine:
    """Rollouts of a policy by vLLM. cache_gb: GB (10^9 bytes) for keys and values, where a prompt and its completion
    must fit; 0: CACHE_GB. sleeps: `sleep` gives the memory of weights and cache back; without it, it does nothing.
    Raises ValueError where there is no vLLM or no GPU, and beside another engine: of two in one process both sample
    from something else than their policy (seen with vLLM 0.24 on an H200)."""

    exact = False

    def __init__(self, policy: Policy, dtype: torch.dtype, cache_gb: float = 0.0, sleeps: bool = False):
        check_vllm(policy.device)
        if LIVING:
            raise ValueError("A process has one engine vllm at most: delete the other one first, or start a process.")
        self.policy, self.sleeps, self.asleep = policy, sleeps, False
        self.converted = has_other_names(policy.model)
        self.folder = tempfile.TemporaryDirectory(prefix="rlcourse-vllm-")  # as long as the engine is there
        config = copy.deepcopy(policy.model.config)
        config.architectures = [architecture(policy.model)]
        config.save_pretrained(self.folder.name)
        options = {"distributed_executor_backend": "external_launcher"} if launched()[1] > 1 else {}
        self.llm = new_llm(
            self.folder.name,
            dtype,
            load_format="dummy",  # no weights are read
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, not of the model's own
            max_num_seqs=MAX_ROWS,
            max_model_len=-1,  # all of the model's positions, or as many as the cache holds
            kv_cache_memory_bytes=int((cache_gb or CACHE_GB) * 1e9),
            gpu_memory_utilization=0.01,  # which must be free at the start; the size of the cache is said above
            enable_sleep_mode=sleeps,
            **options,
        )
        LIVING.add(self)

    @torch.no_grad()
    def generate(self, prompts: Prompts, num_generations: int, max_new_tokens: int, sampling: Sampling) -> Rollout:
        """See `RolloutEngine`. Raises ValueError for what does not fit model or cache, and some temperatures."""
        room, tokens = self.llm.llm_engine.model_config.max_model_len, max(map(len, prompts)) + max_new_tokens
        refusal = f"fit vLLM's cache, which holds {room:,}: raise --cache-gb."
        check_request(self.policy, tokens, room, sampling, refusal)
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False
        self._take_weights()
        options = {"stop_token_ids": self.policy.eos_ids, "logprobs": 0, "flat_logprobs": True}  # 0 more than sampled
        params = sampling_params(sampling, max_new_tokens, **options)
        rows = [{"prompt_token_ids": list(prompt)} for prompt in prompts for _ in range(num_generations)]
        with numpy_state_kept():
            np.random.seed(int(torch.randint(2**32, ())))  # vLLM draws from NumPy's or from PyTorch's, by model
            outputs = self.llm.generate(rows, params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        tokens, logprobs = [list(c.token_ids) for c in completions], [list(c.logprobs.logprobs) for c in completions]
        return rollout_of(self.policy, prompts, tokens, logprobs)

    def sleep(self) -> None:
        """Give back the memory of weights and cache, if the engine was made for it; the next rollout takes it again."""
        if self.sleeps and not self.asleep:
            # Level 2 would forget the weights, too; and, of some models, what is neither a weight nor a buffer.
            self.llm.sleep(level=1)
            self.asleep = True

    def _take_weights(self) -> None:
        """Hand over the policy's weights as they are now, an adapter merged, one after the other."""
        model = self.policy.model
        weights = merged_parameters(model)
        if self.converted:
            weights = iter(as_saved(model, dict(weights)).items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()  # what is there was computed with other weights


def rollout_of(policy: Policy, prompts: Prompts, tokens: list[list[int]], logprobs: list[list[float]]) -> Rollout:
    """vLLM's completions, one a row, as a Rollout. Raises RuntimeError unless each token has a log-prob."""
    if list(map(len, tokens)) != list(map(len, logprobs)):
        raise RuntimeError("vLLM did not give one log-prob for each token.")
    completion_ids, lengths = right_pad(tokens, policy.device)
    return make_rollout(policy, prompts, completion_ids, lengths, right_pad(logprobs, policy.device)[0])


def check_request(policy: Policy, tokens: int, room: int, sampling: Sampling, refusal: str) -> None:
    """Raise ValueError for so many tokens that don't fit the model or `room`, and a temperature that vLLM refuses."""
    check_positions(policy.model, tokens)
    if tokens > room:
        raise ValueError(f"A prompt and its completion of {tokens:,} tokens do not {refusal}")
    (low, high), temperature = TEMPERATURES, sampling.temperature
    if not sampling.greedy and not low <= temperature <= high:
        raise ValueError(
            f"vLLM samples at temperatures of {low:g} to {high:g}, not {temperature:g}: use another --engine."
        )


def check_vllm(device: torch.device) -> None:
    """Raise ValueError where the engine cannot run."""
    if device.type != "cuda":
        raise ValueError("The engine vllm needs an NVIDIA GPU: use --engine fast or hf-dynamic.")
    if not runs_on(device):
        raise ValueError("The engine vllm is vLLM: `python -m pip install 'rlcourse[vllm]'`.")


def runs_on(device: torch.device) -> bool:
    """Whether the engine can run there."""
    return device.type == "cuda" and importlib.util.find_spec("vllm") is not None


def new_llm(model: str, dtype: torch.dtype, own_process: bool = False, **options: Any) -> Any:
    """vLLM's `LLM` over a model folder, on token ids alone and without sampling defaults of the model's. own_process:
    not in this one, where alone it can be handed tensors. The process's random states stay as they are."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    torch.cuda.empty_cache()  # it looks at what is free
    with random_states_kept():
        return LLM(
            model=model, dtype=str(dtype).removeprefix("torch."), skip_tokenizer_init=True, generation_config="vllm",
            use_tqdm_on_load=False, seed=0, **options,
        )  # fmt: skip


def sampling_params(sampling: Sampling, max_new_tokens: int, **options: Any) -> Any:
    """vLLM's `SamplingParams`: no penalties, and only length and `stop_token_ids`, an option, end a completion."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, max_tokens=max_new_tokens,
        ignore_eos=True, detokenize=False, **options,
    )  # fmt: skip


def free_memory() -> None:
    """Free the GPU memory of an `LLM` that nothing refers to any more."""
    gc.unfreeze()  # vLLM freezes all that there is at its start, itself too
    gc.collect()
    torch.cuda.empty_cache()


def architecture(model: PreTrainedModel) -> str:
    """The name of the model's class in transformers: FSDP makes a class of its own of it."""
    return next(kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))


def has_other_names(model: PreTrainedModel) -> bool:
    """Whether transformers saves the weights under other names, which vLLM knows, or in other pieces than in memory."""
    own = {name: torch.empty(weight.shape, device="meta") for name, weight in plain_parameters(model)}
    return as_saved(model, own).keys() != own.keys()


def as_saved(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, weights)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Within, anybody may seed Python's, NumPy's and PyTorch's global generators; afterwards they are as before."""
    python, devices = random.getstate(), [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), numpy_state_kept():
            yield
    finally:
        random.setstate(python)


@contextmanager
def numpy_state_kept() -> Iterator[None]:
    before = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(before)
