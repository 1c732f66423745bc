"""The scheduler, by brute force: a device of plain lists does what the plans say, and every completion is run once."""

import random

import pytest

from rlcourse.rollout.scheduler import SMALLEST, Scheduler, drop_ended, halve


class Device:
    """Slots as the engine has them. Completion i needs lengths[i] decode steps. `stale`: flags as before the last step
    of a plan, as on a GPU."""

    def __init__(self, lengths: list[int], slots: int, stale: bool):
        self.lengths, self.stale = lengths, stale
        self.slots: list[int | None] = [None] * slots  # the completion in each
        self.steps = [0] * len(lengths)  # that it has had
        self.started: list[int] = []
        self.sizes: list[int] = []

    def is_done(self, slot: int) -> bool:
        completion = self.slots[slot]
        return completion is None or self.steps[completion] >= self.lengths[completion]

    def start(self, slot: int, completion: int) -> None:
        assert self.is_done(slot)
        self.slots[slot] = completion
        self.started.append(completion)

    def step(self, size: int, refill: bool) -> None:
        assert all(self.is_done(slot) for slot in range(size, len(self.slots))), "a live one was left behind"
        for slot in range(size):
            if not self.is_done(slot):
                self.steps[self.slots[slot]] += 1
        for slot in range(size):
            if refill and self.is_done(slot) and len(self.started) < len(self.lengths):
                self.start(slot, len(self.started))

    def run(self, plan) -> tuple[list[bool], int]:
        for slot, completion in plan.starts:
            assert completion == len(self.started), "not in order"
            self.start(slot, completion)
        for source, target in plan.moves:
            assert source >= plan.size > target and self.is_done(target)
            self.slots[target], self.slots[source] = self.slots[source], None
        live = [self.slots[slot] for slot in range(plan.size) if not self.is_done(slot)]
        assert len(set(live)) == len(live), "one completion in two slots"
        assert all(self.steps[completion] <= plan.longest for completion in live)
        assert plan.steps >= 1
        self.sizes.append(plan.size)
        for _ in range(plan.steps - 1):
            self.step(plan.size, plan.refill)
        flags = [self.is_done(slot) for slot in range(plan.size)], len(self.started)
        self.step(plan.size, plan.refill)
        return flags if self.stale else ([self.is_done(slot) for slot in range(plan.size)], len(self.started))


def simulate(lengths, slots, max_steps, every=1, resize=drop_ended, refills=False, stale=False) -> tuple[Device, int]:
    """The device after all, and how many steps it did."""
    scheduler = Scheduler(len(lengths), slots, max_steps, every, resize, refills)
    device, steps = Device(lengths, slots, stale), 0
    while plan := scheduler.next_plan():
        scheduler.report(*device.run(plan))
        steps += plan.steps
        assert steps <= (max_steps + every) * len(lengths) + every, "it does not end"
    return device, steps


@pytest.mark.parametrize(
    ("refills", "stale", "resize"), [(False, False, drop_ended), (True, False, halve), (True, True, halve)]
)
@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize(("completions", "slots"), [(1, 64), (65, 64), (300, 7)])
def test_every_completion_runs_once_and_in_order(completions, slots, every, refills, stale, resize):
    for seed in range(5):
        rng = random.Random(seed)
        lengths = [rng.choice([0, 1, rng.randint(0, 40), 40]) for _ in range(completions)]
        device, steps = simulate(lengths, slots, 40, every, resize, refills, stale)
        assert device.started == list(range(completions))
        assert device.steps == lengths
        assert steps >= max(lengths)
        assert device.sizes == sorted(device.sizes, reverse=True) and device.sizes[0] == min(slots, completions)


@pytest.mark.parametrize(("every", "stale"), [(1, False), (4, True), (16, True)])
def test_no_step_is_done_after_the_longest_that_can_be(every, stale):
    """All take the whole limit: the host knows without looking when they end."""
    assert simulate([21] * 8, 8, max_steps=21, every=every, stale=stale)[1] == 21
    assert simulate([21] * 16, 8, max_steps=21, every=every, stale=stale)[1] == 42
    assert simulate([0] * 5, 3, max_steps=0, every=every, stale=stale)[1] == 0


@pytest.mark.parametrize("refills", [False, True])
def test_a_free_slot_does_not_wait_for_the_longest(refills):
    """One long completion and 30 short ones in two slots: the short ones pass by the long one."""
    _, steps = simulate([60, *[2] * 30], 2, max_steps=60, refills=refills)
    assert steps <= 61


def test_the_device_alone_refills_after_the_first_starts():
    scheduler = Scheduler(10, 4, 5, steps_between_looks=2, resize=halve, device_refills=True)
    plan = scheduler.next_plan()
    assert plan.starts == [(0, 0), (1, 1), (2, 2), (3, 3)] and plan.refill
    scheduler.report([True, False, False, False], 9)
    plan = scheduler.next_plan()
    assert not plan.starts and not plan.moves and plan.refill
    scheduler.report([True, False, True, True], 10)
    plan = scheduler.next_plan()
    assert not plan.starts and not plan.refill


def test_the_host_refills_when_it_looks_and_then_the_live_ones_move_together():
    scheduler = Scheduler(18, 16, 100, resize=drop_ended)
    scheduler.next_plan()
    scheduler.report([True] * 3 + [False] * 13, 16)
    plan = scheduler.next_plan()
    assert plan.starts == [(0, 16), (1, 17)] and plan.size == 16 and plan.longest == 1
    scheduler.report([False] + [True] * 9 + [False] * 6, 18)
    plan = scheduler.next_plan()
    assert not plan.starts and plan.size == 7 and plan.longest == 2
    assert plan.moves == [(10, 1), (11, 2), (12, 3), (13, 4), (14, 5), (15, 6)]
    scheduler.report([True] * 7, 18)
    assert scheduler.next_plan() is None


def test_sizes_are_halved_on_a_gpu_and_exact_on_a_cpu():
    assert [halve(256, live) for live in (256, 129, 128, 65, 20, 3, 1)] == [256, 256, 128, 128, 32, 8, 8]
    assert [halve(5, live) for live in (5, 1)] == [5, 5] and halve(9, 1) == 4 < SMALLEST
    assert [drop_ended(64, live) for live in (64, 49, 48, 47, 1)] == [64, 64, 48, 47, 1]
    assert [drop_ended(8, live) for live in (7, 1)] == [8, 8]
