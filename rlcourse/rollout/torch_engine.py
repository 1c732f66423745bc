"""The fast engine in PyTorch: for CPUs, and for GPUs, dtypes and sizes that the kernels of `gpu_engine.py` cannot do.
Each distinct prompt is prefilled once for its whole group. Each completion has a row of the engine's static cache, and
those that have ended leave the batch. On a CPU the host looks who has ended at each step, and only the part of the
cache that is in use is read. On a GPU a step is a CUDA graph, and the host looks every few steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlcourse.batch import (
    PREFILL_TOKENS,
    STEPS_BETWEEN_LOOKS,
    Prompts,
    Rollout,
    completion_lengths,
    make_rollout,
    right_pad,
)
from rlcourse.cuda_graphs import CudaGraphs, halve
from rlcourse.device import without_cudnn_attention
from rlcourse.policy import Policy, check_positions
from rlcourse.rollout.decoder import Attention, Decoder
from rlcourse.sampling import Sampling, sample_tokens

CACHE_BUCKET = 128  # on a GPU a cache is a multiple of this long, so that a longer prompt seldom needs a new one


def without_ended(size: int, live: int) -> int:
    """The smaller batch once 8 rows and a quarter of all have ended: moving a cache costs about one step."""
    ended = size - live
    return live if ended >= 8 and ended >= size / 4 else size


class TorchEngine:
    """Rollouts of a Qwen2, Qwen3 or Llama policy with its weights as they are. compile: layers and sampling are
    compiled. attention: see `Decoder`. Raises ValueError for a model that `FusedWeights` does not know."""

    exact = False

    def __init__(
        self,
        policy: Policy,
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        attention: Attention | None = None,
    ):
        self.policy, self.device = policy, policy.device
        self.on_gpu = policy.device.type == "cuda"
        self.decoder = Decoder(policy.model, dtype, compile, attention)
        self.steps_between_looks = STEPS_BETWEEN_LOOKS if self.on_gpu else 1
        self.compiled_sample = torch.compile(sample_tokens, dynamic=True) if compile else None
        self.temperature = torch.ones(1, device=self.device)  # that of the compiled function, at a fixed address
        self.eos = torch.tensor(policy.eos_ids, device=self.device)
        self.sleep()

    def sleep(self) -> None:
        """Give back the memory of cache, buffers and graphs; the next rollout makes them anew."""
        self.room = 0, 0, 0  # rows, tokens of each, and sampled ones
        self.cache: Tensor | None = None
        self.graphs = CudaGraphs()

    @torch.no_grad()
    def generate(self, prompts: Prompts, num_generations: int, max_new_tokens: int, sampling: Sampling) -> Rollout:
        """See `RolloutEngine`. Raises ValueError when prompt and completion do not fit the model's positions."""
        width, rows = max(map(len, prompts)), len(prompts) * num_generations
        check_positions(self.policy.model, width + max_new_tokens)
        self.decoder.sync()
        self._make_room(rows, width + max_new_tokens, max_new_tokens)
        sample = self._sampler(sampling)
        tokens, logprobs = sample(self._prefill(prompts, num_generations).repeat_interleave(num_generations, 0))
        self.completion[:rows] = torch.arange(rows, device=self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.position[:rows] = lengths.repeat_interleave(num_generations) - 1  # `_record` adds the first token's
        self.done[:rows] = False
        self.column.zero_()
        self._record(rows, tokens, logprobs)
        self._decode(rows, width, max_new_tokens, sampling, sample)
        completion_ids = self.tokens[:rows, :max_new_tokens]
        lengths = completion_lengths(completion_ids, self.policy.eos_ids)
        rollout = make_rollout(self.policy, prompts, completion_ids, lengths, self.logprobs[:rows])
        if not self.on_gpu:
            self.sleep()  # no captured graph knows the cache by its address, and training wants the memory
        return rollout

    def _make_room(self, rows: int, tokens: int, new_tokens: int) -> None:
        """Cache and buffers for a rollout: those that are there if they are enough, else larger ones, and no graphs."""
        wanted = rows, -(-tokens // CACHE_BUCKET) * CACHE_BUCKET if self.on_gpu else tokens, new_tokens
        room = tuple(map(max, wanted, self.room))
        if room == self.room:
            return
        self.sleep()  # first, so that old and new do not stand in memory together
        self.room = room

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        rows, tokens, new_tokens = room
        self.cache = self.decoder.new_cache(rows, tokens)
        # Of each row of the batch: the completion that it decodes, its last token, tokens in its cache, and its end.
        self.completion, self.token, self.position = zeros(rows), zeros(rows), zeros(rows)
        self.done = zeros(rows, dtype=torch.bool)
        self.column = zeros(1)  # of the next token, the same for all
        self.tokens, self.logprobs = zeros(rows, new_tokens), zeros(rows, new_tokens, dtype=torch.float32)

    def _prefill(self, prompts: Prompts, num_generations: int) -> Tensor:
        """Logits [prompts, vocabulary] after the prompts, whose keys and values go into each completion's cache."""
        ids, lengths = right_pad(prompts, self.device)
        width, found, row = ids.shape[1], [], 0
        at_once = max(1, PREFILL_TOKENS // width)
        for some, their_lengths in zip(ids.split(at_once), lengths.split(at_once), strict=True):
            cache = self.decoder.new_cache(len(some), width)
            with without_cudnn_attention():  # lengths differ from call to call
                found.append(self.decoder.prefill(some, their_lengths, cache))
            prompt = torch.arange(len(some), device=self.device).repeat_interleave(num_generations)
            rows = slice(row, row + len(prompt))
            torch.index_select(cache, 2, prompt, out=self.cache[:, :, rows, :, :width])
            row = rows.stop
        return torch.cat(found)

    def _decode(self, rows: int, width: int, max_new_tokens: int, sampling: Sampling, sample: Callable) -> None:
        """Every completion from its second token to its last."""
        size, number = rows, 1  # rows that are decoded; tokens of each
        resize = halve if self.on_gpu else without_ended
        while number < max_new_tokens:
            live = size - int(self.done[:size].sum())  # here the host waits
            if live == 0:
                return
            smaller = resize(size, live)
            if smaller < size:
                self._compact(size, smaller, width + number)
                size = smaller
            for _ in range(min(self.steps_between_looks, max_new_tokens - number)):
                if self.on_gpu:  # a captured step reads the whole cache: its shape is fixed
                    self.graphs.run((size, sampling), partial(self._step, size, self.room[1], sample))
                else:
                    self._step(size, width + number, sample)
                number += 1

    def _step(self, size: int, length: int, sample: Callable) -> None:
        """The next token of the first `size` rows, of `length` tokens at most; unread for rows that are done."""
        cache = self.cache[:, :, :size]
        self._record(size, *sample(self.decoder.decode(self.token[:size], self.position[:size], cache, length)))

    def _record(self, size: int, tokens: Tensor, logprobs: Tensor) -> None:
        """Each row's next token [size] and its log-prob."""
        completion = self.completion[:size]
        self.tokens[completion, self.column], self.logprobs[completion, self.column] = tokens, logprobs
        self.column += 1
        self.token[:size] = tokens
        self.position[:size] += 1
        self.done[:size] |= (tokens[:, None] == self.eos).any(1)

    def _compact(self, size: int, smaller: int, length: int) -> None:
        """The rows behind the first `smaller` that are not done, into ones before that are."""
        source = smaller + (~self.done[smaller:size]).nonzero()[:, 0]
        target = self.done[:smaller].nonzero()[: len(source), 0]
        used = self.cache[:, :, :, :, :length]
        used.index_copy_(2, target, used.index_select(2, source))
        for values in (self.completion, self.token, self.position, self.done):
            values[target] = values[source]

    def _sampler(self, sampling: Sampling) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """logits [rows, vocabulary] → tokens and log-probs [rows]."""
        if self.compiled_sample is None:
            return partial(sample_tokens, sampling=sampling)
        self.temperature.fill_(sampling.temperature or 1.0)
        at_one = sampling if sampling.greedy else replace(sampling, temperature=1.0)
        return partial(self.compiled_sample, sampling=at_one, temperature=self.temperature)
