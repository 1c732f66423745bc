"""Requests that come one after the other, by a device that checks each entry that it reads."""

import itertools
import random

import pytest
from paged_device import PagedDevice
from paged_device import Request as Groups

from rlcourse.rollout.arrivals import ArrivalScheduler
from rlcourse.rollout.blocks import BlockManager


def simulate(seed: int) -> tuple[list[int], list[int]]:
    """Random requests over the device that checks each entry that it reads: how many had arrived, and the limit, at
    each plan."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(1, 12))]
    new, every = rng.randint(1, 20), rng.randint(1, 6)
    limits = [rng.randint(1, new) for _ in prompts]
    arrivals = sorted(rng.choice([0, 0, rng.randint(0, 25)]) for _ in prompts)
    usable = -(-(max(map(len, prompts)) + new - 1) // 4) + rng.choice([0, 2, 30])
    blocks, device = BlockManager(usable + 1, 4), PagedDevice(usable + 1, 4, seed)
    scheduler = ArrivalScheduler(
        blocks, prompts, 1, new, rng.randint(1, 6), every, late := rng.randint(0, every), rng.choice([3, 1000])
    )
    request = Groups(prompts, 1, new, limits)  # it ends after lengths[i] tokens: at its own limit
    device.begin(request, 0, scheduler.num_slots, scheduler.table_width, late)
    there, reached = [], []
    for turn in itertools.count():
        assert turn < 2000, "it does not end"
        scheduler.arrived = sum(arrival <= turn for arrival in arrivals)
        if scheduler.idle and scheduler.arrived < len(prompts):
            assert all(device.ended[: scheduler.arrived]) and set(blocks.holders) == {0}
            continue
        plan = scheduler.next_plan()
        if plan is None:
            break
        there.append(scheduler.arrived)
        reached.append(plan.limit)
        assert all(piece.completion < scheduler.arrived for piece in plan.pieces)
        scheduler.report(*device.run(plan))
    assert device.tokens == [request.answer(i) for i in range(len(prompts))]
    assert set(blocks.holders) == {0}
    return there, reached


@pytest.mark.parametrize("seed", range(30))
def test_nobody_starts_before_he_comes_and_all_end_with_their_tokens(seed):
    there, reached = simulate(seed)
    assert all(limit <= arrived for limit, arrived in zip(reached, there, strict=True))


def test_who_comes_while_another_decodes_joins_at_the_next_look():
    blocks, device = BlockManager(40, 4), PagedDevice(40, 4)
    scheduler = ArrivalScheduler(blocks, [[1], [2]], 1, 40, 8, 4)
    device.begin(Groups([[1], [2]], 1, 40, [40, 5]), 0, 8, scheduler.table_width, 0)
    for arrived in (1, 1, 2, 2, 2):
        scheduler.arrived = arrived
        scheduler.report(*device.run(scheduler.next_plan()))
    assert device.live[:8] == [1] * 8 and device.live[8:12] == [2] * 4 and device.live[12:16] == [1] * 4
