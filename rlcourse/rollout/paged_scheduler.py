"""Continuous batching over a paged cache as bookkeeping: who is decoded when, in which blocks. No tensors here.

Completions start in their order (those of a prompt follow each other), so one number says who may run: those below
`limit` have blocks and run, wait for a free slot, or have ended; from `limit` on they wait. The device gives free slots
to completions below the limit by itself, and the host need not know slots. When blocks run out the limit goes down: the
youngest returns its blocks, keeps its tokens, and is later prefilled again from prompt and tokens. The oldest is never
sent back, so every rollout ends. A prompt is prefilled as its first completion; the others have its full blocks in
their tables and a copy of the one that is partly filled.

What the device has, N completions, T new tokens at most, n sampled tokens of a completion, P of its prompt:

    block_table [N + 1, table_width]     0 where there is no block; row N, NOBODY's, stays 0
    tokens [N + 1, T + 1], lengths [N + 1], ended [N + 1]     of each completion; nothing is sampled: 0 and False
    completion, token, position, num_tokens, done     of each slot; before a rollout: NOBODY and done
    next_completion     the next that takes a free slot; 0 at first

A rollout is `while plan := scheduler.next_plan()`; for each the device does, in this order:

 1. Slots with completion >= plan.limit become NOBODY's and done; next_completion = min(next_completion, plan.limit).
 2. block_table[i] = row for each of plan.rows.
 3. plan.pieces, in order or by `begin`: keys and values of tokens begin to end - 1 of a completion (its prompt, then
    what it has sampled) into the blocks of its row. A piece may read what an earlier one has written, which begins
    before it: if both are one forward pass, each layer writes all keys and values before it reads any. After a piece
    with `first_tokens`, which is of a group's first completion, the first token of each of the group is sampled:
    lengths = 1, and ended if it is the end or T = 1.
 4. plan.copies, in any order: block `source` to block `target`, all layers.
 5. If plan.together, live slots move to the front: every array of the slots in the order of a stable argsort of done.
 6. Refill: those of the first plan.size slots that are done take, in their order, the completions from next_completion
    on that are below plan.limit, in theirs: with n = lengths[i], token = tokens[i, n - 1], position = P + n - 1,
    num_tokens = n, done = ended[i].
 7. plan.steps times: a decode step of the first plan.size slots, and a refill. A slot that is not done writes keys and
    values at `position` of its completion's row, and tokens, lengths and ended of its completion. One that is done
    writes nothing of a completion; its keys and values it may write at `position` of the row too, which then has its
    old blocks or 0 there.

Then scheduler.report(lengths, ended), of N each, as they were before the last `late` of the steps (of fewer: before
all; of none: as they are). If a rollout breaks off, its blocks stay held: begin again with a new BlockManager.
"""

from dataclasses import dataclass

from rlcourse.rollout.blocks import NOBODYS, BlockManager
from rlcourse.rollout.scheduler import halve

PREFILL_TOKENS = 16384  # of a plan at most: decoding waits for them


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` - 1 of a completion, to prefill."""

    completion: int
    begin: int
    end: int
    first_tokens: bool


@dataclass(frozen=True)
class PagedPlan:
    """What the device does before the host looks again: see above."""

    limit: int
    rows: dict[int, list[int]]
    pieces: list[Piece]
    copies: list[tuple[int, int]]
    size: int
    together: bool
    steps: int


class PagedScheduler:
    """Plans the decoding of `num_generations` completions of each prompt in `num_slots` slots and the manager's blocks.

    late: of the steps of a plan, how many the device does after it has said what is reported. prefill_tokens: of a plan
    at most.
    Raises ValueError when a completion of full length does not fit.
    """

    def __init__(
        self,
        blocks: BlockManager,
        prompts: list[list[int]],
        num_generations: int,
        max_new_tokens: int,
        num_slots: int,
        steps_between_looks: int = 1,
        late: int = 0,
        prefill_tokens: int = PREFILL_TOKENS,
    ):
        longest = max(map(len, prompts))
        needed = blocks.blocks_for(longest + max_new_tokens - 1)
        if needed > blocks.usable:
            raise ValueError(
                f"A prompt of {longest} tokens with {max_new_tokens} new ones needs {needed} blocks of "
                f"{blocks.block_tokens} tokens, and the cache has {blocks.usable}: give it a larger budget."
            )
        self.blocks, self.prompts, self.num_generations = blocks, prompts, num_generations
        self.max_new_tokens, self.prefill_tokens = max_new_tokens, prefill_tokens
        self.steps_between_looks, self.late = steps_between_looks, late
        self.num_completions = len(prompts) * num_generations
        self.num_slots = self.size = min(num_slots, self.num_completions)
        # A slot that is done stands at its next position, which is the end of the longest.
        self.table_width = blocks.blocks_for(longest + max_new_tokens)
        self.lengths, self.ended = [0] * self.num_completions, [False] * self.num_completions
        self.starts_with = [1] * self.num_completions  # tokens that it has when it starts, or starts again
        self.limit = 0
        self.tables: dict[int, list[int]] = {}  # of those below the limit that have not ended, the youngest last
        self.prefilling: list[int] | None = None  # table of completion `limit` while it is prefilled,
        self.prefilled = 0  # and so many of its tokens are
        self.prompt_blocks: list[int] | None = None  # of the prompt whose next completion, not its first, is `limit`
        self.leaving: list[int] = []  # blocks of prompts all of whose completions have started: the plan copies them
        self.unseen = 0  # steps that the device has done since what was reported

    def next_plan(self) -> PagedPlan | None:
        """What to do next; None when all completions have ended."""
        self.rows: dict[int, list[int]] = {}
        self.pieces: list[Piece] = []
        self.copies: list[tuple[int, int]] = []
        self._release()
        limit = self.limit
        self._grow()
        if self.limit == limit:  # nobody was sent back, of whom it is not known yet how far he is
            self._start()
        if self.limit == self.num_completions and not self.tables:
            self._release()
            return None
        size = halve(self.num_slots, min(len(self.tables), self.num_slots))
        left = self.max_new_tokens - min(map(self._at_least, self.tables), default=self.max_new_tokens)
        plan = PagedPlan(
            limit=self.limit,
            rows={i: table + [NOBODYS] * (self.table_width - len(table)) for i, table in self.rows.items()},
            pieces=self.pieces,
            copies=self.copies,
            size=size,
            together=size < self.size,
            steps=min(self.steps_between_looks, left),
        )
        self.size, self.unseen = size, min(self.late, plan.steps)
        return plan

    def report(self, lengths: list[int], ended: list[bool]) -> None:
        """Tokens that each completion has sampled, and whether it has ended, as the plan's end says."""
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

    def _blocks_needed(self, completion: int, unseen: int) -> int:
        """By a completion until the host acts again."""
        tokens = self._to_cache(completion) + unseen + self.steps_between_looks
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
        for completion, table in list(self.tables.items()):
            missing = self._blocks_needed(completion, self.unseen) - len(table)
            while completion < self.limit and missing > self.blocks.available:
                self._send_back()
            if completion < self.limit and missing > 0:
                table += self.blocks.allocate(missing)
                self.rows[completion] = table

    def _send_back(self) -> None:
        """Free blocks of the youngest that has some: what is prefilled, else a completion, never the last one."""
        if self.prefilling is not None:
            self.blocks.release(self.prefilling)
            self.prefilling, self.rows[self.limit] = None, []
        elif len(self.tables) > 1:
            first_of_prompt = self.limit // self.num_generations * self.num_generations
            self.limit, table = self.tables.popitem()
            self.blocks.release(table)
            self.rows[self.limit] = []
            if self.limit <= first_of_prompt:
                self._let_go_of_prompt()
        else:
            assert self.prompt_blocks is not None, "the oldest does not fit alone"
            self._let_go_of_prompt()

    def _let_go_of_prompt(self) -> None:
        if self.prompt_blocks is not None:
            self.blocks.release(self.prompt_blocks)
            self.prompt_blocks = None

    def _start(self) -> None:
        """Raise the limit while slots, blocks and tokens to prefill allow."""
        tokens = self.prefill_tokens
        while self.limit < self.num_completions and (self.ended[self.limit] or self._room_ahead()):
            if not self.ended[self.limit]:
                if self.prefilling is None and not self._begin():
                    if self.tables or self.prompt_blocks is None:
                        return
                    self._let_go_of_prompt()  # its partly filled block may be what is missing
                    continue
                tokens = self._prefill(tokens)
                if self.prefilled < self._to_cache(self.limit):
                    return
                self.tables[self.limit], self.prefilling = self.prefilling, None
                self.starts_with[self.limit] = self.lengths[self.limit]
            self.limit += 1
            if self.limit % self.num_generations == 0 and self.prompt_blocks is not None:
                self.leaving += self.prompt_blocks
                self.prompt_blocks = None

    def _room_ahead(self) -> bool:
        """Whether one more may have blocks: there is a slot for it, or it is one of those for which there may be one
        before the next look, and each that runs can still have a further block."""
        waiting, ahead = len(self.tables) - self.num_slots, max(self.num_slots, self.steps_between_looks)
        return waiting < 0 or (waiting < ahead and self.blocks.available > len(self.tables))

    def _begin(self) -> bool:
        """A table for completion `limit`, if there are blocks: shared ones, then its own."""
        completion, prompt = self.limit, self._prompt(self.limit)
        full, partly_filled = divmod(len(prompt), self.blocks.block_tokens)
        copies = self.prompt_blocks is not None and self.lengths[completion] == 1
        if copies:
            shared, self.prefilled = self.blocks.share(self.prompt_blocks[:full]), len(prompt)
        else:  # logits come from the last token, so a new prompt's last token is not found but computed
            fresh = self.lengths[completion] == 0
            shared = self.blocks.find(prompt, (len(prompt) - 1) // self.blocks.block_tokens if fresh else full)
            self.prefilled = len(shared) * self.blocks.block_tokens
        missing = self._blocks_needed(completion, 0) - len(shared)
        if missing > self.blocks.available:
            self.blocks.release(shared)
            return False
        self.prefilling = self.rows[completion] = shared + self.blocks.allocate(missing)
        if copies and partly_filled:
            self.copies.append((self.prompt_blocks[full], self.prefilling[full]))
        return True

    def _prefill(self, tokens: int) -> int:
        """The next piece, of so many tokens at most, of completion `limit`; how many tokens are left for others."""
        completion, prompt, begin = self.limit, self._prompt(self.limit), self.prefilled
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
