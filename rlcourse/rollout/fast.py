"""The fast engine: an own decode step over a static cache, sampling on the device, continuous batching.

What makes it faster than `generate`: each distinct prompt is prefilled once for its whole group; weights are fused;
tokens are sampled, and their log-probs kept, on the device; completions that have ended make room for those that wait,
or leave the batch (`scheduler.py`). On a GPU steps are CUDA graphs, of hand-written kernels where they apply
(`triton_step.py`), and the host looks at the flags only every few steps. On a CPU all completions begin together, the
host looks at each step, and only the part of the cache that is in use is read.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcourse.batch import Rollout
from rlcourse.cuda_graphs import CudaGraphs
from rlcourse.device import without_cudnn_attention
from rlcourse.exact.weights import has_kernels, is_exact
from rlcourse.policy import Policy, check_positions
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.scheduler import Plan, Scheduler, drop_ended, halve
from rlcourse.rollout.slots import Room, Slots, decode_step, prefill, rollout_of, sample_at, sample_first_tokens
from rlcourse.sampling import Sampling, sample_tokens

if TYPE_CHECKING:
    from rlcourse.rollout.triton_step import TritonStep

MAX_SLOTS = 256  # completions decoded at once on a GPU; more wait their turn
PREFILL_TOKENS = 16384  # prompts are prefilled so many tokens at a time: attention scores of all at once fill a GPU
CAPTURED_PREFILL = 8192  # tokens of prompts up to which prefill is captured: of more, the host does not wait for long
STEPS_BETWEEN_LOOKS = {"cuda": 16, "cpu": 1}  # decode steps between two reads of the flags; each read stops the host
STEPS_A_GRAPH = 5  # decode steps of one CUDA graph: between two graphs the GPU waits
CACHE_BUCKET = 128  # on a GPU a cache is a multiple of this long, so that a longer prompt seldom needs a new one
PROMPT_BUCKET = 64  # on a GPU prompts are padded to a multiple, so that few prefills are captured


class FastEngine:
    """Rollouts of a Qwen2, Qwen3 or Llama policy. `generate` takes over its weights first, so no stale weight is ever
    sampled from.

    compile: what runs in PyTorch is compiled. max_slots: completions decoded at once; None: MAX_SLOTS on a GPU, all on
    a CPU. kernels: what decodes on a GPU that they can run on: "triton", those in Triton; "exact", with products in
    CuTe DSL where it is installed and they are faster, and the same bits; "cute", attention in CuTe DSL, too, which has
    other bits; "" for PyTorch alone. exact: the log-probs are those of the training pass (`rlcourse.exact`), to the
    last bit; they are with "triton" and "exact" on Hopper. Raises ValueError for a model that `FusedWeights` does not
    know.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: torch.dtype = torch.float32,
        compile: bool = False,
        max_slots: int | None = None,
        kernels: str = "exact",
    ):
        self.policy, self.device, self.kernels = policy, policy.device, kernels
        self.on_gpu = policy.device.type == "cuda"
        self.max_slots = max_slots or (MAX_SLOTS if self.on_gpu else None)
        self.decoder = Decoder(policy.model, dtype, compile)
        self.exact = kernels in ("triton", "exact") and is_exact(self.decoder.weights)
        self.compiled_sample = torch.compile(sample_at, dynamic=True) if compile else None
        self.temperature = torch.ones(1, device=self.device)  # that of the compiled function, at a fixed address
        self.eos = torch.tensor(policy.eos_ids, device=self.device)
        self.sleep()

    def sleep(self) -> None:
        """Give back the memory of cache, buffers and graphs. The next rollout makes them anew."""
        self.room: Room | None = None
        self.slots: Slots | None = None
        self.triton_step: TritonStep | None = None
        self.graphs = CudaGraphs()

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """See `RolloutEngine`. Raises ValueError when prompt and completion do not fit the model's positions."""
        width = max(map(len, prompts))
        check_positions(self.policy.model, width + max_new_tokens)
        self.decoder.sync()
        width = _round_up(width, PROMPT_BUCKET if self.on_gpu else 1)
        completions = len(prompts) * num_generations
        self._make_room(len(prompts), width, completions, max_new_tokens)
        self.slots.begin(prompts, width, num_generations, max_new_tokens)
        last = self._prefill(len(prompts), width)
        if self.triton_step is not None:
            self.triton_step.new_seed()
        if self.exact:
            rows = torch.arange(completions, device=self.device)
            self.triton_step.sample_first(last[rows // num_generations], rows, sampling)
        else:
            sample_first_tokens(
                self.slots, len(prompts), num_generations, lambda rows: sample_tokens(last[rows], sampling), self.eos
            )
        self._decode(completions, width, num_generations, max_new_tokens, sampling)
        rollout = rollout_of(self.slots, len(prompts), completions, self.policy.pad_id, self.eos)
        if not self.on_gpu:
            self.sleep()  # no captured graph knows the cache by its address, and training wants the memory
        return rollout

    def _make_room(self, prompts: int, width: int, completions: int, max_new_tokens: int) -> None:
        """Slots for a rollout: those that are there if they are enough, else larger ones, and no graphs."""
        bucket = CACHE_BUCKET if self.on_gpu else 1
        room = Room(
            slots=min(completions, self.max_slots or completions),
            tokens=_round_up(width + max_new_tokens, bucket),
            prompts=prompts,
            prompt_tokens=_round_up(width, bucket),
            completions=completions,
            new_tokens=max_new_tokens,
        )
        if self.room is not None:
            if self.room.holds(room):
                return
            room = room.joined(self.room)
        self.sleep()  # first, so that old and new do not stand in memory together
        self.room, self.slots = room, Slots.empty(self.decoder, room)
        if self.kernels and has_kernels(self.decoder.weights):
            cute = {"cute_attention": self.kernels == "cute", "cute_products": self.kernels != "triton"}
            from rlcourse.rollout.triton_step import TritonStep  # only where its kernels run

            self.triton_step = TritonStep(self.decoder, self.slots, self.eos, **cute)

    def _prefill(self, prompts: int, width: int) -> Tensor:
        """Keys and values of the prompts into the slots' memory; after their last tokens the logits [prompts,
        vocabulary], or where it is exact the residual stream [prompts, d]."""
        pass_over = self.decoder.prefill
        if self.exact:
            from rlcourse.exact import layers  # only where there is Triton

            pass_over = partial(layers.prefill, self.decoder.weights)

        def run() -> Tensor:
            with without_cudnn_attention():  # lengths differ from call to call
                return prefill(self.slots, pass_over, prompts, width, PREFILL_TOKENS)

        if self.on_gpu and prompts * width <= CAPTURED_PREFILL:
            return self.graphs.run(("prefill", prompts, width), run)
        return run()

    def _decode(
        self, completions: int, width: int, num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> None:
        """Every completion from its second token to its last."""
        by_triton = self.triton_step is not None
        sample = self._sampler(sampling)
        every, resize = STEPS_BETWEEN_LOOKS[self.device.type], halve if self.on_gpu else drop_ended
        scheduler = Scheduler(completions, self.room.slots, max_new_tokens - 1, every, resize, by_triton)
        while plan := scheduler.next_plan():
            if plan.starts and by_triton:
                self.triton_step.start(len(plan.starts))
            elif plan.starts:
                self.slots.start(plan.starts, num_generations)
            if plan.moves:
                self.slots.move(plan.moves, width + plan.longest)
            if by_triton:
                steps = self._triton_steps(plan, sampling)
            else:
                steps = self._torch_steps(plan, width, sample, sampling)
            scheduler.report(*self._run(plan, steps))

    def _sampler(self, sampling: Sampling) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """How a step in PyTorch samples: logits → tokens and log-probs."""
        if self.compiled_sample is None:
            return partial(sample_tokens, sampling=sampling)
        self.temperature.fill_(sampling.temperature or 1.0)
        at_one = sampling if sampling.greedy else replace(sampling, temperature=1.0)
        return partial(self.compiled_sample, temperature=self.temperature, at_one=at_one)

    def _triton_steps(self, plan: Plan, sampling: Sampling) -> Callable[[range], None]:
        """The plan's steps with these numbers, by our kernels. Which they are, these need not know."""

        def run(count: int) -> None:
            for _ in range(count):
                self.triton_step(plan.size, plan.refill, sampling)

        def run_graphs(numbers: range) -> None:
            together, alone = divmod(len(numbers), STEPS_A_GRAPH)
            for count in [STEPS_A_GRAPH] * together + [1] * alone:
                self.graphs.run(("triton", plan.size, plan.refill, sampling, count), partial(run, count))

        return run_graphs if self.on_gpu else lambda numbers: run(len(numbers))

    def _torch_steps(self, plan: Plan, width: int, sample: Callable, sampling: Sampling) -> Callable[[range], None]:
        """The plan's steps with these numbers, in PyTorch. A captured one reads the whole cache: its shape is fixed."""
        step = partial(decode_step, self.slots.first(plan.size), self.decoder, sample, self.eos)

        def run(numbers: range) -> None:
            for number in numbers:
                if self.on_gpu:
                    self.graphs.run(("torch", plan.size, sampling), partial(step, self.room.tokens))
                else:
                    step(min(width + plan.longest + number + 1, self.room.tokens))

        return run

    def _run(self, plan: Plan, steps: Callable[[range], None]) -> tuple[list[bool], int]:
        """The plan's steps; then which slots are done, and the completion that starts next.

        On a GPU as they were before the last step, which is under way while the host looks: so the GPU does not wait.
        """
        steps(range(plan.steps - 1))
        if not self.on_gpu:
            steps(range(plan.steps - 1, plan.steps))
            return self.slots.done[: plan.size].tolist(), int(self.slots.next_completion)
        flags = torch.cat([self.slots.next_completion, self.slots.done[: plan.size]]).to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        steps(range(plan.steps - 1, plan.steps))
        copied.synchronize()
        next_completion, *done = flags.tolist()
        return list(map(bool, done)), next_completion


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
