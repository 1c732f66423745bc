"""A stand-in for vLLM: of its interface what our engine uses, and nothing else, over transformers' model. As far as it
goes it does what vLLM 0.24 does, also what is awkward: it seeds everybody's generators, draws from NumPy's, keeps keys
and values of prompts until it is told that they are stale, ends answers at ids of the model's own unless told not to,
and reports log-probs of the model's own distribution unless told to report those sampled with. Where vLLM and a GPU are
there, `test_engines.py` asks the same of vLLM itself."""

import importlib.machinery
import importlib.util
import os
import random
import sys
import weakref
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from policies import log_distribution
from transformers import AutoConfig, AutoModelForCausalLM

from rlcourse.rollout import vllm
from rlcourse.sampling import Sampling

BLOCK = 16  # tokens
ENGINE_ARGS = {  # what `LLM` hands on, with vLLM's defaults
    "load_format": "auto", "logprobs_mode": "raw_logprobs", "generation_config": "auto", "max_num_seqs": None,
    "max_model_len": None, "enable_sleep_mode": False, "use_tqdm_on_load": True, "distributed_executor_backend": None,
    "gpu_memory_utilization": 0.92,
}  # fmt: skip


def is_there() -> bool:
    """Whether vLLM itself can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


def put_in(monkeypatch) -> None:
    """Within the test, this is vLLM."""
    module = ModuleType("vllm")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = LLM, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm, "check_vllm", lambda device: None)  # it needs no GPU
    monkeypatch.setattr(vllm, "LIVING", weakref.WeakSet())
    LLM.made.clear()


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True

    def __post_init__(self):
        if 0 < self.temperature < 0.01:
            self.temperature = 0.01
        if self.temperature > 2:
            raise ValueError("temperature must be in [0, 2]")
        if self.temperature == 0 and self.n > 1:
            raise ValueError("n must be 1 when using greedy sampling")


class LLM:
    made: list["LLM"] = []  # noqa: RUF012

    def __init__(self, model, *, skip_tokenizer_init, dtype: str, kv_cache_memory_bytes: int, seed=0, **more):
        assert not more.keys() - ENGINE_ARGS.keys()
        self.options = ENGINE_ARGS | more | {"dtype": dtype}
        assert skip_tokenizer_init and self.options["load_format"] == "dummy"  # the folder has neither
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(model)
        [self.architecture] = config.architectures
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.model.requires_grad_(False)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self.model.dtype.itemsize
        self.longest = min(kv_cache_memory_bytes // (BLOCK * token) * BLOCK, config.max_position_embeddings)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=self.longest))
        self.cached: dict[tuple, torch.Tensor] = {}  # of a prompt what its first token is drawn from
        self.asleep, self.heard = 0, []
        self.made.append(self)

    def collective_rpc(self, method: str, kwargs: dict) -> None:
        """What is not in the iterator stays as it is: vLLM says so in its log alone."""
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert method == "reload_weights" and not self.asleep
        own = dict(self.model.named_parameters())
        for name, weight in kwargs["weights_iterator"]:
            own[name].data.copy_(weight)
        self.heard.append("weights")

    def reset_prefix_cache(self) -> None:
        self.cached.clear()

    def sleep(self, level: int) -> None:
        assert self.options["enable_sleep_mode"] and not self.asleep and level == 1
        self.asleep = level
        self.cached.clear()
        self.heard.append("sleep")

    def wake_up(self) -> None:
        assert self.asleep
        self.asleep = 0
        self.heard.append("wake")

    @torch.no_grad()
    def generate(self, prompts, params, *, use_tqdm: bool = True) -> list[SimpleNamespace]:
        assert not self.asleep and not use_tqdm and not params.detokenize
        assert params.n == 1 and params.logprobs == 0 and params.flat_logprobs
        stops = set(params.stop_token_ids or [])
        if not params.ignore_eos:  # also where `generation_config` is "vllm"
            stops.add(self.model.config.eos_token_id)
        answers = [self._complete(prompt["prompt_token_ids"], params, stops) for prompt in prompts]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]

    def _complete(self, prompt: list[int], params: SamplingParams, stops: set[int]) -> SimpleNamespace:
        tokens, logprobs = [], []
        while len(tokens) < min(params.max_tokens, self.longest - len(prompt)) and not stops & set(tokens[-1:]):
            text = tuple(prompt + tokens)
            logits = self.cached.get(text)
            if logits is None:
                logits = self.model(torch.tensor([text])).logits[0, -1].float()
            if not tokens:
                self.cached[text] = logits
            token, logprob = self._draw(logits, params)
            tokens.append(token)
            logprobs.append(logprob)
        return SimpleNamespace(token_ids=tokens, logprobs=SimpleNamespace(logprobs=logprobs))

    def _draw(self, logits, params) -> tuple[int, float]:
        """A token and the log-prob that is reported of it."""
        own = logits.log_softmax(0)
        if params.temperature == 0:
            token = int(logits.argmax())
            return token, own[token].item()
        sampled_from = log_distribution(logits, Sampling(params.temperature, params.top_k, params.top_p))
        token = int(np.searchsorted(sampled_from.double().exp().cumsum(0).numpy(), np.random.random(), side="right"))
        token = min(token, int(sampled_from.isfinite().nonzero().max()))  # the sum may end below 1
        reported = sampled_from if self.options["logprobs_mode"] == "processed_logprobs" else own
        return token, reported[token].item()
