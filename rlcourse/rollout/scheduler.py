"""Continuous batching as bookkeeping: which completion is decoded in which slot, and when. No tensors here.

A slot is a row of the decoding batch with its part of the cache. Completions start in their order. When one ends, the
next one that waits takes its slot; when none waits, the live ones move together and the batch becomes smaller. So
nobody waits for the longest. The engine does what a `Plan` says and reports which slots are done.
"""

from collections.abc import Callable
from dataclasses import dataclass

SMALLEST = 8  # slots of the smallest batch that `halve` makes


def halve(size: int, live: int) -> int:
    """The smallest half, quarter, ... of `size` that holds the live slots: few sizes, where each costs a graph."""
    while size > SMALLEST and live <= size // 2:
        size //= 2
    return size


def drop_ended(size: int, live: int) -> int:
    """As many as live once 8 slots and a quarter of all have ended: moving a cache costs about one step."""
    ended = size - live
    return live if ended >= 8 and ended >= size / 4 else size


@dataclass(frozen=True)
class Plan:
    """What the engine does before it looks at the flags again, in this order.

    starts: (slot, completion) pairs; moves: (source, target) slots; then `steps` decode steps of the first `size`
    slots. longest: no live completion has had more decode steps. refill: the device itself gives slots that become free
    to the completions that wait.
    """

    starts: list[tuple[int, int]]
    moves: list[tuple[int, int]]
    size: int
    steps: int
    longest: int
    refill: bool


class Scheduler:
    """Plans the decoding of `num_completions` in `num_slots` slots, each for `max_steps` steps at most.

    resize: (slots, live ones) → slots to go on with, `halve` or `drop_ended`. device_refills: after the first starts
    the device gives free slots away, in its own time; `report` tells how many have started. Use:

        while plan := scheduler.next_plan():
            ...
            scheduler.report(done, next_completion)
    """

    def __init__(
        self,
        num_completions: int,
        num_slots: int,
        max_steps: int,
        steps_between_looks: int = 1,
        resize: Callable[[int, int], int] = drop_ended,
        device_refills: bool = False,
    ):
        self.num_completions, self.max_steps = num_completions, max_steps
        self.steps_between_looks, self.resize, self.device_refills = steps_between_looks, resize, device_refills
        self.next_completion = 0  # the first that has not started
        # Decode steps that the completion in a slot has had (at least so many, where the device refills); None: free.
        self.ages: list[int | None] = [None] * (min(num_slots, num_completions) if max_steps > 0 else 0)
        self.plan: Plan | None = None

    def next_plan(self) -> Plan | None:
        """What to do next; None when all completions have ended."""
        host_starts = self.next_completion == 0 or not self.device_refills
        starts = self._start() if host_starts and self.next_completion < self.num_completions else []
        moves = self._move_together() if self.next_completion == self.num_completions else []
        live = [age for age in self.ages if age is not None]
        self.plan = Plan(
            starts,
            moves,
            size=len(self.ages),
            steps=min(self.steps_between_looks, self.max_steps - min(live, default=0)),
            longest=self.max_steps if self.device_refills else max(live, default=0),
            refill=self.device_refills and self.next_completion < self.num_completions,
        )
        return self.plan if self.ages else None

    def report(self, done: list[bool], next_completion: int) -> None:
        """What the device says after the plan: which of its slots are done, and which completion starts next."""
        steps, last = self.plan.steps, self.max_steps - self.plan.steps  # from age `last` on, all its steps are done
        if self.plan.refill:  # whoever is in a slot may have started just now
            self.ages = [None if is_done else 0 for is_done in done]
        else:
            pairs = zip(self.ages, done, strict=True)
            self.ages = [None if is_done or age is None or age >= last else age + steps for age, is_done in pairs]
        self.next_completion = next_completion

    def _start(self) -> list[tuple[int, int]]:
        """The next completions into the free slots."""
        free = [slot for slot, age in enumerate(self.ages) if age is None]
        starts = list(zip(free, range(self.next_completion, self.num_completions), strict=False))
        for slot, _ in starts:
            self.ages[slot] = 0
        self.next_completion += len(starts)
        return starts

    def _move_together(self) -> list[tuple[int, int]]:
        """A smaller batch, if `resize` wants one: the live slots behind its end go into free ones before it."""
        live = len(self.ages) - self.ages.count(None)
        size = self.resize(len(self.ages), live) if live else 0
        if size == len(self.ages):
            return []
        sources = [slot for slot in range(size, len(self.ages)) if self.ages[slot] is not None]
        targets = [slot for slot in range(size) if self.ages[slot] is None]
        moves = list(zip(sources, targets, strict=False))
        for source, target in moves:
            self.ages[target] = self.ages[source]
        del self.ages[size:]
        return moves
