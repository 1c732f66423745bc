"""The paged engine: completions take blocks of the cache as they grow, so that many more of them are decoded at once
than have room for their full length.

Who has which blocks, and who is sent back when there are no more, is the bookkeeping of `blocks.py` and
`paged_scheduler.py`; here is what the device does for it. Kernels and numbers are those of the fast engine: a block is
a tile of attention, and a token's random number is its own, so that answers do not depend on the memory.
"""

from functools import partial

import torch

from rlcourse.batch import Rollout
from rlcourse.cuda_graphs import CudaGraphs
from rlcourse.exact.weights import has_kernels, is_exact
from rlcourse.policy import Policy, check_positions
from rlcourse.rollout.blocks import BLOCK_TOKENS, BlockManager, blocks_in
from rlcourse.rollout.decoder import Decoder
from rlcourse.rollout.paged_prefill import passes, prefill_pieces
from rlcourse.rollout.paged_scheduler import PREFILL_TOKENS, PagedPlan, PagedScheduler, Piece
from rlcourse.rollout.slots import OF_A_SLOT, Room, Slots, rollout_of
from rlcourse.rollout.triton_step import TritonStep
from rlcourse.sampling import Sampling

MAX_SLOTS = 1024  # completions decoded at once, if they have blocks
STEPS_BETWEEN_LOOKS = 16  # decode steps between two reads of lengths; each read stops the host
MOST_PIECES = 256  # of a pass of prefill
SHORTEST_PIECE = 64  # tokens; pieces are padded to a multiple
CAPTURED_PREFILL = 4096  # tokens of a pass up to which it is captured: of more, the host does not wait for long. Then
# pieces, and their length, are padded to a power of two, so that few passes are.


class PagedEngine:
    """Rollouts of a Qwen2, Qwen3 or Llama policy by our Triton kernels, over a paged cache.

    cache_gb: GB (10^9 bytes) of the cache. max_slots: completions decoded at once at most. exact: as `FastEngine`'s.
    Full blocks of prompts are found again by later rollouts with the same weights. Raises ValueError for a model or a
    machine that the kernels cannot do.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype, cache_gb: float, max_slots: int = MAX_SLOTS):
        self.policy, self.device, self.max_slots = policy, policy.device, max_slots
        self.on_gpu = policy.device.type == "cuda"
        self.decoder = Decoder(policy.model, dtype, False)
        weights = self.decoder.weights
        if not has_kernels(weights):
            raise ValueError(
                "A paged cache needs an NVIDIA GPU since Ampere, 16-bit numbers and a model whose sizes our kernels "
                "can do: leave --cache-gb out."
            )
        self.exact = is_exact(weights)
        number_bytes = torch.finfo(dtype).bits // 8
        self.num_blocks = blocks_in(cache_gb, len(weights.layers), weights.kv_heads, weights.head_dim, number_bytes)
        self.late = int(self.on_gpu)  # a GPU does the last step of a plan while the host looks
        self.eos = torch.tensor(policy.eos_ids, device=self.device)
        self.version, self.syncs = 0, weights.syncs  # of the weights, which others may sync, too
        self.sleep()

    def sleep(self) -> None:
        """Give back the memory of cache, buffers and graphs. The next rollout makes them anew."""
        self.room: Room | None = None
        self.slots: Slots | None = None
        self.step: TritonStep | None = None
        self.cache: torch.Tensor | None = None
        self.blocks: BlockManager | None = None  # what the cache has; None: nothing
        self.graphs = CudaGraphs()

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """See `RolloutEngine`. Raises ValueError when a completion of full length does not fit the model's positions or
        the cache."""
        scheduler = self._plans(prompts, num_generations, max_new_tokens)
        while plan := scheduler.next_plan():
            self._prepare(plan, num_generations, sampling)
            scheduler.report(*self._run(plan, scheduler.num_completions, sampling))
        self.blocks = scheduler.blocks
        return rollout_of(self.slots, len(prompts), scheduler.num_completions, self.policy.pad_id, self.eos)

    def _plans(self, prompts: list[list[int]], num_generations: int, max_new_tokens: int) -> PagedScheduler:
        """The scheduler of a rollout, for which everything is made ready. See `generate`."""
        width, completions = max(map(len, prompts)), len(prompts) * num_generations
        check_positions(self.policy.model, width + max_new_tokens)
        self._take_weights()
        blocks = self.blocks or BlockManager(self.num_blocks)
        self.blocks = None  # of a rollout that breaks off blocks stay held
        blocks.use_weights(self.version)
        slots = min(self.max_slots, completions)
        scheduler = PagedScheduler(
            blocks, prompts, num_generations, max_new_tokens, slots, STEPS_BETWEEN_LOOKS, self.late, PREFILL_TOKENS
        )
        self._make_room(Room(slots, width + max_new_tokens, len(prompts), width, completions, max_new_tokens))
        self._begin(prompts, width, num_generations, max_new_tokens)
        self.step.new_seed()
        return scheduler

    def _take_weights(self) -> None:
        """The model's weights as they are now; another `version`, if the cache may be of others."""
        weights = self.decoder.weights
        if weights.syncs != self.syncs or not weights.same_as(self.policy.model):
            self.decoder.sync()
            self.version, self.syncs = self.version + 1, weights.syncs

    def _make_room(self, room: Room) -> None:
        """The cache, and slots for a rollout: those that are there if they are enough, else larger ones and no graphs.
        The cache stays as it is."""
        if self.cache is None:
            self.cache = self.decoder.new_cache(self.num_blocks, BLOCK_TOKENS)
        if self.room is not None:
            if self.room.holds(room):
                return
            room = room.joined(self.room)
        self.slots = self.step = None  # first, so that old and new do not stand in memory together
        self.graphs = CudaGraphs()
        self.room, self.slots = room, Slots.empty(self.decoder, room, self.cache)
        self.step = TritonStep(self.decoder, self.slots, self.eos, cute_attention=False)
        self.of_a_pass = torch.zeros(MOST_PIECES, 4, dtype=torch.long, device=self.device)  # of a pass of prefill

    def _begin(self, prompts: list[list[int]], width: int, num_generations: int, max_new_tokens: int) -> None:
        """Nobody in a slot, no blocks and nothing sampled."""
        slots = self.slots
        slots.begin(prompts, width, num_generations, max_new_tokens)
        self.nobody = len(slots.lengths) - 1
        for tensor in (slots.lengths, slots.ended, slots.block_table, slots.token, slots.position, slots.num_tokens):
            tensor.zero_()
        slots.completion.fill_(self.nobody)
        slots.done.fill_(True)

    def _prepare(self, plan: PagedPlan, num_generations: int, sampling: Sampling) -> None:
        """What a plan wants before its steps, in the order of `paged_scheduler.py`."""
        slots = self.slots
        beyond = slots.completion >= plan.limit
        slots.completion.masked_fill_(beyond, self.nobody)
        slots.done |= beyond
        slots.next_completion.clamp_(max=plan.limit)
        slots.num_completions.fill_(plan.limit)
        if plan.rows:
            rows = torch.tensor(list(plan.rows.values()), dtype=torch.int32, device=self.device)
            slots.block_table[torch.tensor(list(plan.rows), device=self.device), : rows.shape[1]] = rows
        for pieces in passes(plan.pieces, PREFILL_TOKENS, MOST_PIECES):
            self._prefill(pieces, num_generations, sampling)
        if plan.copies:
            source, target = torch.tensor(plan.copies, device=self.device).unbind(1)
            for cache in slots.cache:  # a layer at a time: what is copied stands in memory twice
                cache.index_copy_(1, target, cache.index_select(1, source))
        if plan.together:
            order = slots.done.to(torch.int8).argsort(stable=True)
            for name in OF_A_SLOT:
                getattr(slots, name).copy_(getattr(slots, name)[order])
        self.step.refill(plan.size)

    def _prefill(self, pieces: list[Piece], num_generations: int, sampling: Sampling) -> None:
        """Keys and values of these pieces into their blocks, and first tokens of the groups that begin with one."""
        longest = -(-max(piece.end - piece.begin for piece in pieces) // SHORTEST_PIECE)
        number, length = (1 << (count - 1).bit_length() for count in (len(pieces), longest))
        captured = self.on_gpu and number * length * SHORTEST_PIECE <= CAPTURED_PREFILL
        if not captured:
            number, length = len(pieces), longest
        length *= SHORTEST_PIECE
        numbers = [(p.completion, p.completion // num_generations, p.begin, p.end) for p in pieces]
        numbers += [(self.nobody, 0, 0, 1)] * (number - len(pieces))
        self.of_a_pass[:number] = torch.tensor(numbers)
        run = partial(prefill_pieces, self.decoder.weights, self.slots, self.of_a_pass[:number], length)
        last = self.graphs.run(("prefill", number, length), run) if captured else run()
        first = [i for i, piece in enumerate(pieces) if piece.first_tokens]
        if first:
            x = last[torch.tensor(first, device=self.device)].repeat_interleave(num_generations, 0)
            group = torch.arange(num_generations)
            completions = torch.cat([pieces[i].completion + group for i in first]).to(self.device)
            self.step.sample_first(x, completions, sampling)

    def _run(self, plan: PagedPlan, completions: int, sampling: Sampling) -> tuple[list[int], list[bool]]:
        """The plan's steps; lengths of all completions and whether they have ended, as before its last `late` steps."""
        step, late = partial(self.step, plan.size, True, sampling), min(self.late, plan.steps)
        if self.on_gpu:
            step = partial(self.graphs.run, ("step", plan.size, sampling), step)
        for _ in range(plan.steps - late):
            step()
        said = torch.stack([self.slots.lengths[:completions], self.slots.ended[:completions].long()])
        said = said.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if self.on_gpu else None
        if copied is not None:
            copied.record()
        for _ in range(late):
            step()
        if copied is not None:
            copied.synchronize()
        lengths, ended = said.tolist()
        return lengths, list(map(bool, ended))
