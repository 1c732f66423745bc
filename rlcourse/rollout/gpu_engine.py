"""The fast engine on a GPU: our own decode step by hand-written kernels, a paged cache and continuous batching. A
prompt is prefilled once for its whole group; tokens are sampled, and their log-probs kept, on the device; a completion
that has ended makes room for one that waits, within the step. Steps are CUDA graphs, and the host looks who has ended
only every few steps: `scheduler.py` decides what is decoded when, in which blocks of `blocks.py`, and this module
carries out its plans. Without top-k and top-p a token's random number depends only on its completion and place, so
answers do not depend on the memory."""

from functools import partial

import torch
from torch import Tensor

from rlcourse.batch import MAX_SLOTS, PREFILL_TOKENS, STEPS_BETWEEN_LOOKS, Prompts, Rollout, make_rollout
from rlcourse.cuda_graphs import CudaGraphs
from rlcourse.exact.weights import fused_weights, is_exact
from rlcourse.policy import Policy, check_positions
from rlcourse.rollout.blocks import BLOCK_TOKENS, BlockManager, blocks_in
from rlcourse.rollout.prefill import passes, prefill_pieces
from rlcourse.rollout.scheduler import Piece, Plan, Scheduler
from rlcourse.rollout.slots import Room, Slots
from rlcourse.rollout.triton_step import TritonStep
from rlcourse.sampling import Sampling

MOST_SLOTS = 1024  # completions decoded at once, if their blocks fit a budget
STEPS_A_GRAPH = 5  # decode steps of one CUDA graph: between two graphs the GPU waits
COPIED_AT_ONCE = 64  # blocks: what is copied stands in memory twice
MOST_PIECES = 256  # of a pass of prefill
SHORTEST_PIECE = 64  # tokens; pieces are padded to a multiple, so that few passes are captured
CAPTURED_PREFILL = 4096  # tokens of a pass up to which it is captured: of more, the host does not wait for long. Then
# pieces, and their length, are padded to a power of two, so that few passes are.


class GPUEngine:
    """Rollouts of a Qwen2, Qwen3 or Llama policy with its weights as they are, for models and GPUs that pass
    `has_kernels`. Full blocks of prompts are found again by later rollouts with the same weights. cache_gb: GB (10^9
    bytes) of the cache; 0: so much that nobody is ever sent back. max_slots: completions decoded at once at most; None:
    MAX_SLOTS, or MOST_SLOTS within a budget. cute: products are in CuTe DSL where that is faster. exact: the log-probs
    are those of the training pass (`rlcourse.exact`), to the last bit, as they are on Hopper."""

    def __init__(
        self, policy: Policy, dtype: torch.dtype, cache_gb: float = 0.0, max_slots: int | None = None, cute: bool = True
    ):
        self.policy, self.device, self.cute = policy, policy.device, cute
        self.on_gpu = policy.device.type == "cuda"
        self.max_slots = max_slots or (MOST_SLOTS if cache_gb else MAX_SLOTS)
        self.weights = weights = fused_weights(policy.model, dtype)
        self.exact = is_exact(weights)
        sizes = len(weights.layers), weights.kv_heads, weights.head_dim, torch.finfo(dtype).bits // 8
        self.budget = blocks_in(cache_gb, *sizes)  # blocks; 0: as many as a rollout needs
        self.overlap = int(self.on_gpu)  # a GPU does the last step of a plan while the host looks
        self.eos = torch.tensor(policy.eos_ids, device=self.device)
        self.sleep()

    def sleep(self) -> None:
        """Give back the memory of cache, buffers and graphs; the next rollout makes them anew."""
        self.room: Room | None = None
        self.slots: Slots | None = None
        self.step: TritonStep | None = None
        self.cache: Tensor | None = None  # [layers, 2, num_blocks, K, BLOCK_TOKENS, D]
        self.blocks: BlockManager | None = None  # what the cache has; None: nothing
        self.graphs = CudaGraphs()

    @torch.no_grad()
    def generate(self, prompts: Prompts, num_generations: int, max_new_tokens: int, sampling: Sampling) -> Rollout:
        """See `RolloutEngine`. Raises ValueError for what does not fit the model's positions or the cache."""
        check_positions(self.policy.model, max(map(len, prompts)) + max_new_tokens)
        self._make_room(prompts, num_generations, max_new_tokens)
        self.weights.follow_any_change(self.policy.model)
        blocks, self.blocks = self.blocks or BlockManager(self.cache.shape[2]), None  # broken off, blocks stay held
        blocks.use_weights(self.weights.syncs)
        sizes = self.max_slots, STEPS_BETWEEN_LOOKS, self.overlap, PREFILL_TOKENS
        scheduler = Scheduler(blocks, prompts, num_generations, max_new_tokens, *sizes)
        slots, completions = self.slots, scheduler.num_completions
        slots.begin(prompts, num_generations, max_new_tokens)
        self.step.new_seed()
        while plan := scheduler.schedule():
            self._prepare(plan, num_generations, sampling)
            scheduler.report(*self._run(plan, completions, sampling))
        self.blocks = blocks
        lengths = slots.lengths[:completions].clone()
        return make_rollout(self.policy, prompts, slots.tokens[:completions], lengths, slots.logprobs[:completions])

    def _make_room(self, prompts: Prompts, num_generations: int, max_new_tokens: int) -> None:
        """Cache and slots for a rollout: those that are there if they are enough, else larger ones, and no graphs."""
        longest, completions = max(map(len, prompts)), len(prompts) * num_generations
        # In whole blocks, so that a longer prompt seldom needs more room.
        tokens, prompt_tokens = (-(-n // BLOCK_TOKENS) * BLOCK_TOKENS for n in (longest + max_new_tokens, longest))
        room = Room(min(self.max_slots, completions), tokens, len(prompts), prompt_tokens, completions, max_new_tokens)
        room = room if self.room is None else room.joined(self.room)
        if room == self.room:
            return
        self.room = self.slots = self.step = None  # first, so that old and new do not stand in memory together
        self.graphs = CudaGraphs()
        weights, num_blocks = self.weights, self.budget
        if not num_blocks:  # the null block, full slots and the prompts
            num_blocks = 1 + (room.slots * room.tokens + room.prompts * room.prompt_tokens) // BLOCK_TOKENS
        if self.cache is None or self.cache.shape[2] < num_blocks:
            self.cache = self.blocks = None
            shape = len(weights.layers), 2, num_blocks, weights.kv_heads, BLOCK_TOKENS, weights.head_dim
            self.cache = torch.zeros(shape, dtype=weights.dtype, device=self.device)  # as 0 x garbage could be nan
        self.room, self.slots = room, Slots.empty(room, self.device)
        self.step = TritonStep(weights, self.slots, self.cache, self.eos, self.cute)
        self.of_a_pass = torch.zeros(MOST_PIECES, 4, dtype=torch.long, device=self.device)  # of a pass of prefill

    def _prepare(self, plan: Plan, num_generations: int, sampling: Sampling) -> None:
        """What a plan wants before its steps."""
        slots = self.slots
        slots.admit(plan.admitted)
        if plan.rows:
            rows = torch.tensor(list(plan.rows.values()), dtype=torch.int32, device=self.device)
            slots.block_table[torch.tensor(list(plan.rows), device=self.device), : rows.shape[1]] = rows
        for pieces in passes(plan.pieces, PREFILL_TOKENS, MOST_PIECES):
            self._prefill(pieces, num_generations, sampling)
        if plan.copies:
            for some in torch.tensor(plan.copies, device=self.device).split(COPIED_AT_ONCE):
                source, target = some.unbind(1)
                self.cache.index_copy_(2, target, self.cache.index_select(2, source))
        if plan.compact:
            slots.compact()
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
        numbers += [(self.slots.no_completion, 0, 0, 1)] * (number - len(pieces))
        self.of_a_pass[:number] = torch.tensor(numbers)
        run = partial(prefill_pieces, self.weights, self.slots, self.cache, self.of_a_pass[:number], length)
        last = self.graphs.run(("prefill", number, length), run) if captured else run()
        first = [i for i, piece in enumerate(pieces) if piece.first_tokens]
        if first:
            x = last[torch.tensor(first, device=self.device)].repeat_interleave(num_generations, 0)
            group = torch.arange(num_generations)
            completions = torch.cat([pieces[i].completion + group for i in first]).to(self.device)
            self.step.sample_first(x, completions, sampling)

    def _run(self, plan: Plan, completions: int, sampling: Sampling) -> list[list[int]]:
        """Run the plan's steps. Returns all lengths, and who has ended, as of before its last `overlap` steps."""
        overlap = min(self.overlap, plan.steps)
        self._steps(plan.steps - overlap, plan.size, sampling)
        snapshot = torch.stack([self.slots.lengths[:completions], self.slots.ended[:completions].long()])
        snapshot = snapshot.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if self.on_gpu else None
        if copied is not None:
            copied.record()
        self._steps(overlap, plan.size, sampling)
        if copied is not None:
            copied.synchronize()
        return snapshot.tolist()

    def _steps(self, number: int, size: int, sampling: Sampling) -> None:
        def run(count: int) -> None:
            for _ in range(count):
                self.step(size, sampling)

        if not self.on_gpu:
            return run(number)
        together, alone = divmod(number, STEPS_A_GRAPH)
        for count in [STEPS_A_GRAPH] * together + [1] * alone:
            self.graphs.run(("step", size, sampling, count), partial(run, count))
