"""What the paged scheduler must not do for nothing: no answer would change, so the simulated device cannot notice."""

from itertools import pairwise

import paged_device
from paged_device import PagedDevice, Request

from rlcourse.rollout.blocks import BlockManager
from rlcourse.rollout.paged_scheduler import PagedScheduler


def test_slots_move_together_only_when_fewer_are_decoded(monkeypatch):
    """Sorting them for nothing changes no answer, and costs a pass over every slot."""
    plans, next_plan = [], PagedScheduler.next_plan
    monkeypatch.setattr(PagedScheduler, "next_plan", lambda self: plans.append(next_plan(self)) or plans[-1])
    request = Request([[1, 2, 3], [4, 5]], 16, 30, [30, *range(2, 30), 3, 3, 3])
    paged_device.run(BlockManager(400, block_tokens=4), PagedDevice(400, 4), request, slots=32)
    sizes = [32, *(plan.size for plan in plans[:-1])]
    assert [plan.together for plan in plans[:-1]] == [after < before for before, after in pairwise(sizes)]
    assert sizes[-1] < sizes[1] == 32
