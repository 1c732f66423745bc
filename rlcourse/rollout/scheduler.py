"""Continuous batching over a paged cache as bookkeeping: who is decoded when, in which blocks. No tensors here.
Completions are admitted in their order (those of a prompt follow each other), so one number says who may run: those
below `admitted` have blocks and run, wait for a slot, or have ended. The device gives them free slots by itself, and
the host need not know slots. A prompt is prefilled as its first completion; the others share its full blocks and have a
copy of the one that is partly filled. When blocks run out fewer are admitted: the youngest returns its blocks, keeps
its tokens, and is prefilled again later. The oldest is never sent back, so every rollout ends."""

from dataclasses import dataclass
from itertools import islice

from rlcourse.batch import PREFILL_TOKENS, Prompts
from rlcourse.cuda_graphs import halve
from rlcourse.rollout.blocks import NULL_BLOCK, BlockManager


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` - 1 of a completion (its prompt, then what it has sampled), to prefill into its blocks.
    first_tokens: it is a prompt's last one, after which the first token of each completion of the prompt is sampled."""

    completion: int
    begin: int
    end: int
    first_tokens: bool


@dataclass(frozen=True)
class Plan:
    """What the device does before the host looks again, in this order. admitted: completions from here on leave their
    slots, and none of them gets one. rows: new rows of the block table, by completion. pieces: what is prefilled; then
    copies: (source, target), blocks that are copied in all layers. compact: slots that are not done move to the front,
    in their order. steps: so many decode steps of the first `size` slots. Before the first and after each, slots that
    are done take the next completions that are admitted, both in their order."""

    admitted: int
    rows: dict[int, list[int]]
    pieces: list[Piece]
    copies: list[tuple[int, int]]
    size: int
    compact: bool
    steps: int


class Scheduler:
    """Plans the decoding of `num_generations` completions of each prompt in `num_slots` slots and the manager's blocks.

        while plan := scheduler.schedule():
            ...
            scheduler.report(lengths, ended)

    overlap: steps of a plan that the device runs after the snapshot that is reported, while the host plans.
    prefill_tokens: the most that a plan prefills. If a rollout breaks off, its blocks stay held: take a new
    BlockManager. Raises ValueError when a completion of full length does not fit.
    """

    def __init__(
        self,
        blocks: BlockManager,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        num_slots: int,
        steps_between_looks: int = 1,
        overlap: int = 0,
        prefill_tokens: int = PREFILL_TOKENS,
    ):
        longest = max(map(len, prompts))
        needed = blocks.blocks_for(longest + max_new_tokens - 1)
        if needed > blocks.usable:
            which = f"A prompt of {longest} tokens with {max_new_tokens} new ones needs {needed} blocks of "
            there = f"{blocks.block_tokens} tokens, and the cache has {blocks.usable}: give it a larger budget."
            raise ValueError(which + there)
        self.blocks, self.prompts, self.num_generations = blocks, prompts, num_generations
        self.max_new_tokens, self.prefill_tokens = max_new_tokens, prefill_tokens
        self.steps_between_looks, self.overlap = steps_between_looks, overlap
        self.num_completions = len(prompts) * num_generations
        self.num_slots = self.size = min(num_slots, self.num_completions)
        # Of completions that have blocks and wait for a slot, the most, and so few that more should start.
        self.most_waiting = max(self.num_slots, steps_between_looks)
        self.few_waiting = max(self.num_slots // 8, steps_between_looks // 2)
        # A slot that is done stands at its next position, which is the end of the longest.
        self.table_width = blocks.blocks_for(longest + max_new_tokens)
        self.lengths, self.ended = [0] * self.num_completions, [False] * self.num_completions
        self.starts_with = [1] * self.num_completions  # tokens that it has when it starts, or starts again
        self.admitted = 0
        self.tables: dict[int, list[int]] = {}  # of admitted ones that have not ended, the youngest last
        self.prefilling: list[int] | None = None  # table of completion `admitted` while it is prefilled,
        self.prefilled = 0  # and so many of its tokens are
        self.prompt_blocks: list[int] | None = None  # of the prompt whose next completion, not its first, is `admitted`
        self.leaving: list[int] = []  # blocks of prompts all of whose completions have started: the plan copies them
        self.reserved: int | None = None  # blocks until those in slots have their full length, counted once a plan
        self.unseen = 0  # steps that the device has done since what was reported

    def schedule(self) -> Plan | None:
        """What to do next; None when all completions have ended."""
        self.rows, self.pieces, self.copies = {}, [], []  # of the plan
        self._release()
        admitted = self.admitted
        self._grow()
        if self.admitted == admitted:  # none was preempted, of which it isn't known yet how far it got
            self._start()
        if self.admitted == self.num_completions and not self.tables:
            self._release()
            return None
        size = halve(self.num_slots, min(len(self.tables), self.num_slots))
        left = self.max_new_tokens - min(map(self._at_least, self.tables), default=self.max_new_tokens)
        steps = min(self.steps_between_looks, left)
        rows = {i: table + [NULL_BLOCK] * (self.table_width - len(table)) for i, table in self.rows.items()}
        plan = Plan(self.admitted, rows, self.pieces, self.copies, size, size < self.size, steps)
        self.size, self.unseen = size, min(self.overlap, steps)
        return plan

    def report(self, lengths: list[int], ended: list[bool]) -> None:
        """Tokens that each completion has sampled, and whether it has ended, before the plan's last `overlap` steps."""
        self.lengths, self.ended = list(lengths), list(ended)

    def _prompt(self, completion: int) -> list[int]:
        return self.prompts[completion // self.num_generations]

    def _to_cache(self, completion: int) -> int:
        """Tokens that are in the cache when the completion starts: all but the last sampled one."""
        return len(self._prompt(completion)) + max(self.lengths[completion], 1) - 1

    def _at_least(self, completion: int) -> int:
        """Tokens that it has sampled by now, if it has not ended: once it runs, one at each step."""
        length = self.lengths[completion]
        return length + self.unseen if length > self.starts_with[completion] else length

    def _blocks_needed(self, completion: int) -> int:
        """By a completion that starts, until the host acts again."""
        tokens = self._to_cache(completion) + self.steps_between_looks
        most = len(self._prompt(completion)) + self.max_new_tokens - 1
        return self.blocks.blocks_for(min(tokens, most))

    def _release(self) -> None:
        """Return the blocks that nobody needs since the last plan."""
        self.blocks.release(self.leaving)
        self.leaving = []
        for completion in [i for i in self.tables if self.ended[i] or self._at_least(i) >= self.max_new_tokens]:
            self.blocks.release(self.tables.pop(completion))
            self.rows[completion] = []

    def _grow(self) -> None:
        """Blocks for what runs, the oldest first."""
        ahead, most = self.unseen + self.steps_between_looks - 1, self.max_new_tokens - 1
        for completion, table in list(self.tables.items()):
            # As `_blocks_needed`, without its calls: the GPU waits for this loop over all that run.
            tokens = len(self.prompts[completion // self.num_generations]) + min(self.lengths[completion] + ahead, most)
            more = -(-tokens // self.blocks.block_tokens) - len(table)
            while completion < self.admitted and more > self.blocks.available:
                self._preempt()
            if completion < self.admitted and more > 0:
                table += self.blocks.allocate(more)
                self.rows[completion] = table

    def _preempt(self) -> None:
        """Free blocks of the youngest that has some: what is prefilled, else a completion, never the last one."""
        if self.prefilling is not None:
            self.blocks.release(self.prefilling)
            self.prefilling, self.rows[self.admitted] = None, []
        elif len(self.tables) > 1:
            first_of_prompt = self.admitted // self.num_generations * self.num_generations
            self.admitted, table = self.tables.popitem()
            self.blocks.release(table)
            self.rows[self.admitted] = []
            if self.admitted <= first_of_prompt:
                self._let_go_of_prompt()
        else:
            assert self.prompt_blocks is not None, "the oldest does not fit alone"
            self._let_go_of_prompt()

    def _let_go_of_prompt(self) -> None:
        if self.prompt_blocks is not None:
            self.blocks.release(self.prompt_blocks)
            self.prompt_blocks = None

    def _start(self) -> None:
        """Admit more while slots, blocks and tokens to prefill allow."""
        if len(self.tables) - self.num_slots > self.few_waiting:
            return  # one pass for many prompts takes less time than many passes
        tokens, self.reserved = self.prefill_tokens, None
        while self.admitted < self.num_completions and (self.ended[self.admitted] or self._room_ahead()):
            if not self.ended[self.admitted]:
                if self.prefilling is None and not self._begin():
                    if self.tables or self.prompt_blocks is None:
                        return
                    self._let_go_of_prompt()  # its partly filled block may be what is missing
                    continue
                tokens = self._prefill(tokens)
                if self.prefilled < self._to_cache(self.admitted):
                    return
                self.tables[self.admitted], self.prefilling = self.prefilling, None
                self.starts_with[self.admitted] = self.lengths[self.admitted]
            self.admitted += 1
            if self.admitted % self.num_generations == 0 and self.prompt_blocks is not None:
                self.leaving += self.prompt_blocks
                self.prompt_blocks = None

    def _room_ahead(self) -> bool:
        """Whether one more may have blocks: there is a slot for it, or there may be before the next look, and it takes
        no block that those in slots need to reach their full length."""
        waiting = len(self.tables) - self.num_slots
        if not 0 <= waiting < self.most_waiting:
            return waiting < 0
        if self.reserved is None:  # of those in slots nothing changes while others start
            in_slots = islice(self.tables.values(), self.num_slots)
            self.reserved = self.num_slots * self.table_width - sum(map(len, in_slots))
        return self.blocks.available > self.reserved

    def _begin(self) -> bool:
        """A table for completion `admitted`, if there are blocks: shared ones, then its own."""
        completion, prompt = self.admitted, self._prompt(self.admitted)
        full, partly_filled = divmod(len(prompt), self.blocks.block_tokens)
        copies = self.prompt_blocks is not None and self.lengths[completion] == 1
        if copies:
            shared, self.prefilled = self.blocks.share(self.prompt_blocks[:full]), len(prompt)
        else:  # logits come from the last token, so a new prompt's last token is not found but computed
            fresh = self.lengths[completion] == 0
            shared = self.blocks.find(prompt, (len(prompt) - 1) // self.blocks.block_tokens if fresh else full)
            self.prefilled = len(shared) * self.blocks.block_tokens
        own = self._blocks_needed(completion) - len(shared)
        if own > self.blocks.available:
            self.blocks.release(shared)
            return False
        self.prefilling = self.rows[completion] = shared + self.blocks.allocate(own)
        if copies and partly_filled:
            self.copies.append((self.prompt_blocks[full], self.prefilling[full]))
        return True

    def _prefill(self, tokens: int) -> int:
        """The next piece, of so many tokens at most, of completion `admitted`; how many tokens are left for others."""
        completion, prompt, begin = self.admitted, self._prompt(self.admitted), self.prefilled
        self.prefilled = min(self._to_cache(completion), begin + tokens)
        if self.prefilled > begin:
            first_tokens = self.lengths[completion] == 0 and self.prefilled == len(prompt)
            self.pieces.append(Piece(completion, begin, self.prefilled, first_tokens))
            self.blocks.keep(prompt[: self.prefilled], self.prefilling)
            if first_tokens:
                group = slice(completion, completion + self.num_generations)
                self.lengths[group] = [1] * self.num_generations
                self.ended[group] = [self.max_new_tokens == 1] * self.num_generations
                self.prompt_blocks = self.blocks.share(self.prefilling[: self.blocks.blocks_for(len(prompt))])
        return tokens - (self.prefilled - begin)
