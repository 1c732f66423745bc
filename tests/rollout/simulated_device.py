"""A device of plain lists that does what `scheduler.py` says a device does, and trusts nobody. What it keeps for a
token is the weights' version and a number for all tokens up to this one, as keys and values depend on nothing else.
Before it samples it looks whether every entry that it reads is the right one."""

import random
from dataclasses import dataclass

from rlcourse.rollout.blocks import BlockManager
from rlcourse.rollout.scheduler import Plan, Scheduler

prefixes: dict[tuple[int, int], int] = {}  # (number of all tokens before, token) → number of all with this one


def entries_of(version: int, tokens: list[int]) -> list[tuple[int, int]]:
    """What the cache must have for these tokens."""
    entries, number = [], 0
    for token in tokens:
        number = prefixes.setdefault((number, token), len(prefixes) + 1)
        entries.append((version, number))
    return entries


@dataclass
class Request:
    """Completion i of the prompts' groups ends after lengths[i] tokens, or after `max_new_tokens`."""

    prompts: list[list[int]]
    num_generations: int
    max_new_tokens: int
    lengths: list[int]

    def prompt(self, completion: int) -> list[int]:
        return self.prompts[completion // self.num_generations]

    def token(self, completion: int, number: int) -> int:
        """That a completion samples: one that no other samples anywhere."""
        return 1000 + completion * self.max_new_tokens + number

    def answer(self, completion: int) -> list[int]:
        length = min(self.lengths[completion], self.max_new_tokens)
        return [self.token(completion, number) for number in range(length)]


class Device:
    """Memory of `num_blocks`, and, from `begin` on, a request and slots."""

    def __init__(self, num_blocks: int, block_tokens: int, seed: int = 0):
        self.block_tokens, self.rng = block_tokens, random.Random(seed)
        self.memory = [["never written"] * block_tokens for _ in range(num_blocks)]

    def begin(self, request: Request, version: int, slots: int, table_width: int, late: int) -> None:
        self.request, self.version, self.late = request, version, late
        self.nobody = len(request.lengths)
        self.table = [[0] * table_width for _ in range(self.nobody + 1)]
        self.tokens: list[list[int]] = [[] for _ in range(self.nobody)]
        self.lengths, self.ended = [0] * (self.nobody + 1), [False] * (self.nobody + 1)
        self.completion, self.position, self.num_tokens = [self.nobody] * slots, [0] * slots, [0] * slots
        self.done = [True] * slots
        self.next_completion = 0
        self.live: list[int] = []  # slots that were live, at each step
        self.pieces: list[tuple] = []
        self.sent_back: list[int] = []  # completions that were in a slot

    def run(self, plan: Plan) -> tuple[list[int], list[bool]]:
        """What the plan says, in its order; what is reported."""
        self.admitted, self.writers = plan.admitted, {}
        for slot in range(len(self.done)):
            if self.completion[slot] >= plan.admitted:
                if not self.done[slot]:
                    self.sent_back.append(self.completion[slot])
                self.completion[slot], self.done[slot] = self.nobody, True
        self.next_completion = min(self.next_completion, plan.admitted)
        for completion, row in plan.rows.items():
            assert len(row) == len(self.table[0])
            self.table[completion] = list(row)
        for piece in plan.pieces:
            self.prefill(piece)
        sources, targets = [s for s, _ in plan.copies], [t for _, t in plan.copies]
        assert not set(sources) & set(targets) and len(set(targets)) == len(targets), "the order of copies matters"
        for source, target in plan.copies:
            (owner,) = [i for i in range(self.nobody) if target in self.table[i]]
            self.writes(owner, target)
            self.memory[target] = list(self.memory[source])
        if plan.compact:
            order = sorted(range(len(self.done)), key=lambda slot: self.done[slot])
            for name in ("completion", "position", "num_tokens", "done"):
                setattr(self, name, [getattr(self, name)[slot] for slot in order])
        assert all(self.done[plan.size :]), "a live one was left behind"
        self.refill(plan.size)
        said = self.lengths[:-1], self.ended[:-1]
        for step in range(plan.steps):
            self.step(plan.size)
            self.refill(plan.size)
            if step < plan.steps - self.late:
                said = self.lengths[:-1], self.ended[:-1]
        return said

    def sequence(self, completion: int) -> list[int]:
        return self.request.prompt(completion) + self.tokens[completion]

    def place(self, completion: int, position: int) -> tuple[int, int]:
        return self.table[completion][position // self.block_tokens], position % self.block_tokens

    def writes(self, completion: int, block: int) -> None:
        assert block != 0, "a completion writes where it has no block"
        assert self.writers.setdefault(block, completion) == completion, "a block is written by two"

    def write(self, completion: int, position: int) -> None:
        """The entry of the token there."""
        block, offset = self.place(completion, position)
        self.writes(completion, block)
        self.memory[block][offset] = entries_of(self.version, self.sequence(completion)[: position + 1])[-1]

    def read(self, completion: int, tokens: int) -> None:
        """The first entries of its table, in several parts, which may be more than it has blocks."""
        splits, width = self.rng.choice([1, 2, 3, 8]), len(self.table[0])
        share = -(-width // splits)
        found = []
        for split in range(splits):
            for j in range(split * share, min((split + 1) * share, width)):
                inside = max(0, min(self.block_tokens, tokens - j * self.block_tokens))
                found += self.memory[self.table[completion][j]][:inside]
        assert found == entries_of(self.version, self.sequence(completion)[:tokens]), "a wrong entry is read"

    def prefill(self, piece) -> None:
        assert 0 <= piece.begin < piece.end <= len(self.sequence(piece.completion))
        self.pieces.append((piece.completion, piece.begin, piece.end))
        for position in range(piece.begin, piece.end):
            self.write(piece.completion, position)
        self.read(piece.completion, piece.end)
        if piece.first_tokens:
            assert piece.end == len(self.request.prompt(piece.completion))
            for completion in range(piece.completion, piece.completion + self.request.num_generations):
                assert self.lengths[completion] == 0, "a first token is sampled twice"
                self.sample(completion)

    def sample(self, completion: int) -> None:
        self.tokens[completion].append(self.request.token(completion, self.lengths[completion]))
        self.lengths[completion] += 1
        self.ended[completion] = self.tokens[completion] == self.request.answer(completion)

    def refill(self, size: int) -> None:
        for slot in range(size):
            if self.done[slot] and self.next_completion < self.admitted:
                completion = self.next_completion
                self.next_completion += 1
                length = self.lengths[completion]
                assert length > 0, "started before its prompt was prefilled"
                self.completion[slot], self.num_tokens[slot] = completion, length
                self.position[slot] = len(self.request.prompt(completion)) + length - 1
                self.done[slot] = self.ended[completion]

    def step(self, size: int) -> None:
        running = [self.completion[slot] for slot in range(size) if not self.done[slot]]
        assert len(set(running)) == len(running), "one completion in two slots"
        self.live.append(len(running))
        for slot in self.rng.sample(range(size), size):
            completion, position = self.completion[slot], self.position[slot]
            if self.done[slot]:  # it writes too, whatever it likes
                block, offset = self.place(completion, position)
                self.memory[block][offset] = "rubbish"
                continue
            assert self.lengths[completion] == self.num_tokens[slot]
            self.write(completion, position)
            self.read(completion, position + 1)
            self.sample(completion)
            self.position[slot] += 1
            self.num_tokens[slot] += 1
            self.done[slot] = self.ended[completion]


def check_blocks(blocks: BlockManager, scheduler: Scheduler, device: Device) -> None:
    """Who holds what is counted; nothing is lost, or given away twice; what can be found is what it is found by."""
    tables = [*scheduler.tables.values(), scheduler.prefilling or [], scheduler.prompt_blocks or []]
    tables.append(scheduler.leaving)
    held = [block for table in tables for block in table]
    assert blocks.holders == [held.count(block) for block in range(blocks.num_blocks)]
    everything = [*blocks.free_blocks, *blocks.unused, *set(held)]
    assert sorted(everything) == list(range(1, blocks.num_blocks)), "a block is lost, or free and held"
    by_serial = {blocks.serial[block]: key for block, key in blocks.key_of.items()}
    for block, (before, tokens) in blocks.key_of.items():
        prefix = list(tokens)
        while before in by_serial:
            before, tokens = by_serial[before]
            prefix = [*tokens, *prefix]
        if before == 0:
            expected = entries_of(device.version, prefix)[-blocks.block_tokens :]
            assert device.memory[block] == expected, "what is found by its tokens is something else"


def check_rows(blocks: BlockManager, scheduler: Scheduler, device: Device, before: int, tokens: int) -> None:
    """As many run as the blocks allow: the next one did not fit, unless something was just sent back, slots are full
    or there were enough tokens to prefill."""
    request, following = device.request, scheduler.admitted
    if following < max(before, 1) or following == device.nobody or tokens == scheduler.prefill_tokens:
        return
    if len(scheduler.tables) >= scheduler.num_slots:
        return
    prompt = len(request.prompt(following))
    length = prompt + max(scheduler.lengths[following], 1) - 1 + scheduler.steps_between_looks
    assert blocks.blocks_for(min(length, prompt + request.max_new_tokens - 1)) > blocks.available


def run(
    blocks: BlockManager,
    device: Device,
    request: Request,
    version: int = 0,
    slots: int = 8,
    every: int = 4,
    late: int = 1,
    prefill_tokens: int = 10**6,
) -> Scheduler:
    """A rollout. Every completion has its tokens in the end, and nobody holds a block."""
    blocks.use_weights(version)
    scheduler = Scheduler(
        blocks, request.prompts, request.num_generations, request.max_new_tokens, slots, every, late, prefill_tokens
    )
    device.begin(request, version, scheduler.num_slots, scheduler.table_width, late)
    admitted, plans, ended = 0, 0, []
    while plan := scheduler.schedule():
        assert plan.admitted >= admitted or not all(ended[: plan.admitted]), "the oldest was sent back"
        assert plan.steps > 0 or plan.pieces or plan.admitted > admitted, "nothing is done"
        report = device.run(plan)
        check_blocks(blocks, scheduler, device)
        check_rows(blocks, scheduler, device, admitted, sum(p.end - p.begin for p in plan.pieces))
        scheduler.report(*report)
        ended = report[1]
        admitted, plans = plan.admitted, plans + 1
        assert plans < 100 + 10 * sum(map(len, request.prompts)) + 10 * sum(request.lengths), "it does not end"
    assert device.tokens == [request.answer(i) for i in range(device.nobody)]
    assert set(blocks.holders) == {0}, "a block is still held"
    return scheduler
