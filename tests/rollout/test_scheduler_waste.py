"""What the scheduler must not do for nothing: no answer would change, so the simulated device cannot notice."""

from itertools import pairwise

import pytest
import simulated_device
from simulated_device import Device, Request

from rlcourse.rollout.blocks import BlockManager
from rlcourse.rollout.scheduler import Scheduler

LENGTHS = [30, *range(2, 30), 3, 3, 3]


@pytest.fixture
def plans(monkeypatch) -> list:
    """Those of a rollout with blocks for all."""
    found, next_plan = [], Scheduler.next_plan
    monkeypatch.setattr(Scheduler, "next_plan", lambda self: found.append(next_plan(self)) or found[-1])
    request = Request([[1, 2, 3], [4, 5]], 16, 30, LENGTHS)
    simulated_device.run(BlockManager(400, block_tokens=4), Device(400, 4), request, slots=32)
    return found[:-1]


def test_slots_are_sorted_only_when_fewer_are_decoded(plans):
    sizes = [32, *(plan.size for plan in plans)]
    assert [plan.compact for plan in plans] == [after < before for before, after in pairwise(sizes)]
    assert sizes[-1] < sizes[1] == 32


def test_a_row_is_sent_only_when_it_has_changed(plans):
    sent: dict[int, list[int]] = {}
    for plan in plans:
        assert all(row != sent.get(completion) for completion, row in plan.rows.items())
        sent |= plan.rows


@pytest.mark.parametrize(
    ("running", "available", "room"),
    [(3, 0, True), (4, 8, False), (4, 9, True), (7, 8, False), (7, 9, True), (8, 100, False)],
)
def test_a_completion_may_wait_with_blocks_that_none_in_a_slot_needs(running, available, room):
    """Of four slots, and as many completions ahead of them. Each has one block of the three of its full length."""
    scheduler = Scheduler(BlockManager(401, block_tokens=4), [[1]] * 40, 1, 9, num_slots=4, steps_between_looks=2)
    scheduler.tables = {completion: [completion + 1] for completion in range(running)}
    del scheduler.blocks.free_blocks[available:]
    assert scheduler._room_ahead() == room


def test_a_prompts_blocks_stay_while_one_of_its_completions_has_room():
    blocks = BlockManager(21, block_tokens=4)
    scheduler = Scheduler(blocks, [[1, 2, 3], [4, 5, 6]], 3, 9, num_slots=6)
    scheduler.rows, scheduler.limit = {}, 5  # the second of the second prompt
    scheduler.tables = {completion: blocks.allocate(1) for completion in range(5)}
    scheduler.prompt_blocks = kept = blocks.allocate(1)
    scheduler._preempt()
    assert scheduler.limit == 4 and scheduler.prompt_blocks == kept
    scheduler._preempt()
    assert scheduler.limit == 3 and scheduler.prompt_blocks is None


@pytest.mark.parametrize(("sampled", "found"), [(0, 4), (3, 8)])
def test_only_a_new_prompt_of_whole_blocks_computes_its_last_one_again(sampled, found):
    """A completion that was sent back needs no logits of the prompt."""
    blocks, prompt = BlockManager(11, block_tokens=4), [1, 2, 3, 4, 5, 6, 7, 8]
    scheduler = Scheduler(blocks, [prompt], 1, 9, num_slots=1)
    table = blocks.allocate(2)
    blocks.keep(prompt, table)
    blocks.release(table)
    scheduler.rows, scheduler.lengths[0] = {}, sampled
    assert scheduler._begin() and scheduler.prefilled == found
