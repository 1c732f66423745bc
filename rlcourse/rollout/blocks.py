"""The memory of a paged cache as bookkeeping: which block of tokens is whose, and which one is found again. No tensors.
The cache is [layers, 2, num_blocks, K, BLOCK_TOKENS, D]. A table is a list of blocks: its j-th holds keys and values of
the tokens from BLOCK_TOKENS * j on, a tile of attention. Full blocks of prompts, which all completions of the prompt
share, stay findable by their tokens after the last table has let go of them (a prefix cache), until their room is
needed, the longest unused first, or the weights change. Block 0, the null block, is nobody's: slots without work write
there."""

from itertools import count

from rlcourse.exact import KEYS

BLOCK_TOKENS = KEYS
NULL_BLOCK = 0


def blocks_in(budget_gb: float, layers: int, kv_heads: int, head_dim: int, number_bytes: int) -> int:
    """How many blocks, block 0 among them, a cache of so many GB (10^9 bytes) has; number_bytes: of one number."""
    return int(budget_gb * 1e9) // (layers * 2 * kv_heads * BLOCK_TOKENS * head_dim * number_bytes)


class BlockManager:
    """Counts for each of `num_blocks` blocks how many tables hold it, and finds those of known prefixes."""

    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS):
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.holders = [0] * num_blocks  # tables that hold a block
        self.free_blocks = list(range(num_blocks - 1, NULL_BLOCK, -1))  # neither held nor findable
        self.version: int | None = None
        self._forget()

    @property
    def usable(self) -> int:
        """Blocks that there are to give away."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self.free_blocks) + len(self.unused)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def use_weights(self, version: int) -> None:
        """Say which weights compute what is written from now on. After others, nothing older is found."""
        if version != self.version:
            self.free_blocks += self.unused
            self._forget()
            self.version = version

    def allocate(self, number: int) -> list[int]:
        """Blocks for one table, with anything in them. Raises ValueError when there are fewer `available`."""
        if number > self.available:
            raise ValueError(f"{number} blocks are wanted and {self.available} available.")
        while len(self.free_blocks) < number:
            self._drop_longest_unused()
        blocks = [self.free_blocks.pop() for _ in range(number)]
        for block in blocks:
            self.holders[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """The same blocks for one more table."""
        for block in blocks:
            self.holders[block] += 1
            self.unused.pop(block, None)
        return list(blocks)

    def release(self, table: list[int]) -> None:
        """A table lets go of its blocks."""
        for block in reversed(table):  # so that a prefix is longer in use than what follows it, and is dropped later
            assert self.holders[block] > 0, f"block {block} is free already"
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.key_of:
                    self.unused[block] = None
                else:
                    self.free_blocks.append(block)

    def keep(self, tokens: list[int], table: list[int]) -> None:
        """The first blocks of a table hold keys and values of `tokens`: the full ones will be found by them."""
        before = 0
        for block, key_tokens in zip(table, self._full(tokens), strict=False):
            found = self.block_of.setdefault((before, key_tokens), block)
            if found == block and block not in self.key_of:
                self.key_of[block], self.serial[block] = (before, key_tokens), next(self.serials)
            before = self.serial[found]  # if another block holds the same, what follows is found after that one

    def find(self, tokens: list[int], most: int) -> list[int]:
        """The first blocks, at most so many, of a table for a sequence that begins with `tokens`: now held by it."""
        found, before = [], 0
        for key_tokens in self._full(tokens)[:most]:
            block = self.block_of.get((before, key_tokens))
            if block is None:
                break
            found.append(block)
            before = self.serial[block]
        return self.share(found)

    def _full(self, tokens: list[int]) -> list[tuple[int, ...]]:
        size = self.block_tokens
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def _forget(self) -> None:
        # A key is the serial number of the block before and the tokens of this one. They are compared, not their hash
        # alone; and a serial number names one content for ever, unlike a block.
        self.block_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.serial: dict[int, int] = {}
        self.serials = count(1)
        self.unused: dict[int, None] = {}  # findable blocks that no table holds, the longest unused first

    def _drop_longest_unused(self) -> None:
        block = next(iter(self.unused))
        del self.unused[block], self.block_of[self.key_of.pop(block)], self.serial[block]
        self.free_blocks.append(block)
