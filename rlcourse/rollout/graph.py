"""The graph engine: an own decode step over a static cache, sampling on the device, one CUDA graph a step on a GPU.

What makes it faster than `generate`: each distinct prompt is prefilled once for its whole group; weights are fused; one
step is a fixed list of kernels that a CUDA graph replays without the host; tokens are drawn, and their log-probs kept,
on the device; the host looks at the EOS flags only every few steps, and then finished completions make room for waiting
ones (`slots.py`). On a CPU there is nothing to capture: all completions begin together, and leave when they end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcourse.policy import Policy
from rlcourse.rollout import Rollout, fused, left_pad, slots
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.slots import Slots
from rlcourse.sampling import Sampling, draw

MAX_SLOTS = 256  # completions decoded at once on a GPU; more wait their turn
CACHE_BUCKET = 128  # a slot's cache is a multiple of this long, so that a longer prompt seldom needs a new one
CAPTURED_GRAPHS = 32  # graphs kept; the one used longest ago goes first
EAGER_RUNS = 1  # before a graph is captured: what is loaded and compiled then must not happen under capture
PROMPT_BUCKET = 64  # on a GPU prompts are padded to a multiple, so that few prefills are captured
CAPTURED_PREFILL = 8192  # tokens of prompts up to which prefill is captured: of more, the host does not wait for long
PREFILL_TOKENS = 16384  # prompts are prefilled so many tokens at a time: attention scores of all at once fill a GPU


@dataclass
class State:
    """Everything a decode step on a CPU reads and writes. R live rows of `outputs` rows in all.

    row [R]: where a live row's outputs go; token, position [R]; done [R] bool; slot [1] and step [1] int64: the cache
    slot and output column that come next; bias [R, 1, 1, S]: 0 where attention may look, -inf elsewhere; cache [layers,
    2, R, K, S, D]; out_tokens [outputs, T] int64, out_logprobs [outputs, T] float32, out_lengths [outputs].
    """

    row: Tensor
    token: Tensor
    position: Tensor
    done: Tensor
    slot: Tensor
    step: Tensor
    bias: Tensor
    cache: Tensor
    out_tokens: Tensor
    out_logprobs: Tensor
    out_lengths: Tensor


def accept(state: State, tokens: Tensor, logprobs: Tensor, eos: Tensor) -> None:
    """Write down one drawn token a row, and note which rows are done. tokens, logprobs [R]; eos [number of ids].

    Which tokens count comes from which rows were alive, never from the token itself: a pad token can be sampled too.
    """
    alive = ~state.done
    where = (state.row, state.step.expand_as(state.row))
    state.out_tokens.index_put_(where, torch.where(alive, tokens, state.out_tokens[where]))
    state.out_logprobs.index_put_(where, torch.where(alive, logprobs, 0.0))
    state.out_lengths.index_add_(0, state.row, alive.long())
    state.done |= (tokens[:, None] == eos).any(1)
    state.token.copy_(tokens)
    state.step += 1


class GraphEngine:
    """Rollouts of a Qwen2 or Qwen3 policy. `generate` takes over its weights first, so no stale weight is ever sampled
    from."""

    def __init__(self, policy: Policy, dtype: torch.dtype = torch.float32, compile: bool = False):
        self.policy = policy
        self.decoder = Decoder(policy.model, dtype, compile)
        self.draw = torch.compile(draw, dynamic=False) if compile and policy.device.type == "cuda" else draw
        self.device = policy.device
        self.eos = torch.tensor(policy.eos_ids, device=self.device)
        self.max_slots = MAX_SLOTS
        self.kernels = "cute"  # on a GPU: attention in CuTe DSL where that wins, the rest in Triton; or "triton", or ""
        self.sleep()

    def sleep(self) -> None:
        """Give back the memory of cache, buffers and graphs. The next rollout makes them anew."""
        self.slots: Slots | None = None
        self.fused: fused.FusedStep | None = None
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.eager_runs: dict[tuple, int] = {}
        self.prompts: dict[tuple[int, int], list[Tensor]] = {}  # ids, mask and logits of captured prefills

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """See `RolloutEngine`. Raises ValueError when prompt and completion do not fit the model's positions."""
        self.decoder.sync()
        ids, mask = left_pad(prompts, self.policy.pad_id, self.device)
        limit = self.decoder.config.max_position_embeddings
        if ids.shape[1] + max_new_tokens > limit:
            raise ValueError(
                f"A prompt of {ids.shape[1]} tokens and {max_new_tokens} new ones exceed the model's {limit} "
                "positions: lower max_prompt_tokens or max_new_tokens."
            )
        if self.device.type == "cuda":
            outputs = self._run_slots(prompts, num_generations, max_new_tokens, sampling)
        else:
            padded = right_pad(prompts, self.policy.pad_id, self.device)
            state = self._run_plain(*padded, num_generations, max_new_tokens, sampling)
            outputs = state.out_tokens, state.out_logprobs, state.out_lengths
        return self._rollout(*outputs, ids, mask, num_generations)

    def _new_state(self, rows: int, slots: int, max_new_tokens: int) -> State:
        def zeros(*shape, dtype=torch.long):
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return State(
            row=torch.arange(rows, device=self.device),
            token=zeros(rows),
            position=zeros(rows),
            done=zeros(rows, dtype=torch.bool),
            slot=zeros(1),
            step=zeros(1),
            bias=zeros(rows, 1, 1, slots, dtype=torch.float32),
            cache=self.decoder.new_cache(rows, slots),
            out_tokens=zeros(rows, max_new_tokens),
            out_logprobs=zeros(rows, max_new_tokens, dtype=torch.float32),
            out_lengths=zeros(rows),
        )

    def _start(self, state: State, ids: Tensor, mask: Tensor, num_generations: int, sampling: Sampling) -> None:
        """Prefill each prompt once, give its keys and values to its rows, and draw the first token."""
        width = ids.shape[1]
        by_prompt = state.cache.unflatten(2, (len(ids), num_generations))  # [layers, 2, prompts, G, K, S, D]
        at_once = max(1, PREFILL_TOKENS // width)
        pieces = []
        for first in range(0, len(ids), at_once):
            some = slice(first, first + at_once)
            piece, prompt_cache = self.decoder.prefill(ids[some], mask[some])
            by_prompt[:, :, some, :, :, :width] = prompt_cache[:, :, :, None]
            pieces.append(piece)
        logits = torch.cat(pieces)
        mask = mask.repeat_interleave(num_generations, dim=0)
        state.bias.fill_(float("-inf"))
        state.bias[:, 0, 0, :width].masked_fill_(mask, 0.0)
        state.position.copy_(mask.sum(1))
        state.slot.fill_(width)
        state.step.zero_()
        state.done.zero_()
        state.out_lengths.zero_()
        state.out_logprobs.zero_()
        state.out_tokens.fill_(self.policy.pad_id)
        accept(state, *draw(logits.repeat_interleave(num_generations, dim=0), sampling), self.eos)

    def _step(self, state: State, length: int, sampling: Sampling) -> None:
        """One decode step: read the last token, attend to `length` slots, draw the next one."""
        state.bias.index_fill_(3, state.slot, 0.0)
        logits = self.decoder.decode(state.token, state.position, state.slot, state.cache, state.bias[..., :length])
        accept(state, *self.draw(logits, sampling), self.eos)
        state.position += 1
        state.slot += 1

    def _run_plain(self, ids, mask, num_generations, max_new_tokens, sampling) -> State:
        """The CPU's loop: attend to the slots in use alone, and let finished rows leave the batch."""
        width = ids.shape[1]
        state = self._new_state(len(ids) * num_generations, width + max_new_tokens, max_new_tokens)
        self._start(state, ids, mask, num_generations, sampling)
        for step in range(1, max_new_tokens):
            done = int(state.done.sum())
            if done == len(state.done):
                break
            if done >= 8 and done >= 0.25 * len(state.done):  # moving the cache costs about one step
                drop_finished(state, width + step)
            self._step(state, width + step, sampling)
        return state

    def _run_slots(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The GPU's loop: tokens and log-probs [completions, T], lengths [completions]."""
        on_gpu = self.device.type == "cuda"
        ids, mask = right_pad(prompts, self.policy.pad_id, self.device, PROMPT_BUCKET if on_gpu else 1)
        self._make_room(*ids.shape, num_generations, max_new_tokens)
        prefill = self._captured_prefill if on_gpu and ids.numel() <= CAPTURED_PREFILL else self._prefill
        logits = prefill(ids, mask)
        by_kernels = self.fused is not None and fused.can_draw(sampling)
        if by_kernels:
            self.fused.new_seed()
        step_of = partial(self._step_of, sampling=sampling)
        slots.run(self.slots, logits, num_generations, max_new_tokens, sampling, self.eos, step_of, by_kernels)
        return self.slots.tokens, self.slots.logprobs, self.slots.lengths[: len(prompts) * num_generations]

    def _prefill(self, ids: Tensor, mask: Tensor) -> Tensor:
        return slots.prefill(self.slots, self.decoder, ids, mask, PREFILL_TOKENS)

    def _captured_prefill(self, ids: Tensor, mask: Tensor) -> Tensor:
        """`_prefill` by a CUDA graph for each shape: of few prompts, a GPU runs the kernels faster than the host starts
        them."""
        shape = tuple(ids.shape)
        held = self.prompts.setdefault(shape, [ids, mask, None])
        held[0].copy_(ids)
        held[1].copy_(mask)

        def run() -> None:
            held[2] = self._prefill(held[0], held[1])

        self._captured(shape, run)
        return held[2]

    def _make_room(self, prompts: int, width: int, num_generations: int, max_new_tokens: int) -> None:
        """Slots for a rollout: those that are there if they are enough, else larger ones, and no graphs."""
        completions = prompts * num_generations
        needs = (min(completions, self.max_slots), width + max_new_tokens, completions, max_new_tokens, prompts, width)
        if self.slots is not None:
            have = self.slots
            room_for = have.prompt_cache.shape[2], have.prompt_cache.shape[4]
            has = (len(have.row), have.cache.shape[4], *have.tokens.shape, *room_for)
            if all(a <= b for a, b in zip(needs, has, strict=True)):
                return
            needs = tuple(map(max, needs, has))
        self.sleep()
        rows, length, completions, max_new_tokens, prompts, width = needs
        length, width = (-(-n // CACHE_BUCKET) * CACHE_BUCKET for n in (length, width))
        self.slots = Slots.empty(self.decoder, rows, length, completions, max_new_tokens, prompts, width)
        if self.kernels and fused.supported(self.decoder):
            self.fused = fused.FusedStep(self.decoder, self.slots, self.eos, cute=self.kernels == "cute")

    def _step_of(self, size: int, refill: bool, sampling: Sampling) -> Callable[[], None]:
        """A function that does one decode step of the first `size` slots: eagerly at first, then by a CUDA graph."""
        if self.fused is not None and fused.can_draw(sampling):
            step = partial(self.fused, size, refill, sampling)
        else:
            draw_tokens = partial(self.draw, sampling=sampling)
            step = partial(slots.step, self.slots.first(size), self.decoder, draw_tokens, self.eos)
        if self.device.type != "cuda":
            return step
        return partial(self._captured, (size, refill, sampling), step)

    def _captured(self, key: tuple, run: Callable[[], None]) -> None:
        """Run what reads and writes the same memory each time: eagerly at first, then by a CUDA graph."""
        if key in self.graphs:
            self.graphs[key] = self.graphs.pop(key)  # moved to the end: used last
            self.graphs[key].replay()
            return
        self.eager_runs[key] = self.eager_runs.get(key, 0) + 1
        if self.eager_runs[key] <= EAGER_RUNS:
            run()
            return
        while len(self.graphs) >= CAPTURED_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        self.graphs[key] = graph
        graph.replay()

    def _rollout(self, tokens: Tensor, logprobs: Tensor, lengths: Tensor, ids, mask, num_generations: int) -> Rollout:
        """Gather the outputs; the width is that of the longest completion."""
        rows, longest = len(ids) * num_generations, int(lengths.max())
        lengths = lengths.clone()
        real = torch.arange(longest, device=self.device) < lengths[:, None]
        tokens = tokens[:rows, :longest].masked_fill(~real, self.policy.pad_id)
        last = tokens.gather(1, (lengths - 1)[:, None])
        return Rollout(
            prompt_ids=ids.repeat_interleave(num_generations, dim=0),
            prompt_mask=mask.repeat_interleave(num_generations, dim=0),
            completion_ids=tokens,
            completion_mask=real,
            logprobs=logprobs[:rows, :longest].masked_fill(~real, 0.0),
            finished=(last == self.eos).any(1),
        )


def right_pad(prompts: list[list[int]], pad_id: int, device: torch.device, bucket: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids and mask [prompts, P], P a multiple of `bucket`, with padding on the right: a prompt begins at slot 0
    of its cache."""
    ids, mask = left_pad([prompt[::-1] for prompt in prompts], pad_id, device)
    more = (-ids.shape[1] % bucket, 0)
    return F.pad(ids, more, value=pad_id).flip(1), F.pad(mask, more).flip(1)


def drop_finished(state: State, length: int) -> None:
    """Keep the live rows alone; the first `length` cache slots move to the front of the same memory."""
    keep = (~state.done).nonzero()[:, 0]
    for name in ("row", "token", "position", "done", "bias"):
        setattr(state, name, getattr(state, name)[keep])
    state.cache[:, :, : len(keep), :, :length] = state.cache[:, :, keep, :, :length]
    state.cache = state.cache[:, :, : len(keep)]
