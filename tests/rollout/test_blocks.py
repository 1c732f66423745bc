"""Blocks by hand; test_scheduler.py counts who holds them, and looks what is found, in random rollouts."""

import pytest

from rlcourse.rollout.blocks import BlockManager


def filled(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """A table for a prompt that is prefilled, with what is there."""
    table = blocks.find(tokens, len(tokens))
    table += blocks.allocate(blocks.blocks_for(len(tokens)) - len(table))
    blocks.keep(tokens, table)
    return table


def test_a_block_is_free_when_its_last_table_lets_go_and_that_once():
    blocks = BlockManager(4)
    table = blocks.allocate(3)
    assert sorted(table) == [1, 2, 3] and blocks.available == 0, "block 0 is nobody's"
    other = blocks.share(table[:2])
    blocks.release(table)
    assert blocks.available == 1
    assert blocks.allocate(1) == table[2:]
    blocks.release(other)
    assert blocks.available == 2
    with pytest.raises(ValueError, match="3 blocks are wanted and 2 available"):
        blocks.allocate(3)
    assert blocks.available == 2
    with pytest.raises(AssertionError, match="free already"):
        blocks.release(other)


def test_prompts_of_one_hash_are_two_prompts():
    """Python's hash of 0 is that of 2^61 - 1."""
    ours, theirs = [0, 0, 0], [2**61 - 1, 0, 0]
    assert hash(tuple(ours[:2])) == hash(tuple(theirs[:2]))
    blocks = BlockManager(9, 2)
    table = filled(blocks, ours)
    assert blocks.find(theirs, 9) == []
    assert blocks.find(ours, 9) == table[:1]


def test_what_is_longest_unused_is_dropped_first_and_the_end_of_a_prompt_before_its_beginning():
    blocks = BlockManager(7, 1)
    first, second = filled(blocks, [1, 2, 3]), filled(blocks, [4, 5])
    blocks.release(first)
    blocks.release(second)
    blocks.release(blocks.find([1, 2, 3], 2))  # used once more
    assert set(blocks.allocate(2)) == {6, first[2]}, "the free one, then that which nobody has used since"
    assert blocks.allocate(1) == [second[1]]
    assert blocks.find([4, 5], 2) == second[:1] and blocks.find([1, 2, 3], 3) == first[:2]
