"""Requests that come one after the other, and the bookkeeping of who may start: no tensors here."""

from dataclasses import dataclass

from rlcourse.rollout.paged_scheduler import PagedScheduler


@dataclass(frozen=True)
class Request:
    """A prompt's token ids, tokens of its answer at most, and when it comes: seconds after the first may."""

    prompt: list[int]
    max_new_tokens: int
    arrival_s: float = 0.0


class ArrivalScheduler(PagedScheduler):
    """Plans for completions of which those from `arrived` on are not there yet. To be set before each plan."""

    arrived = 0

    @property
    def idle(self) -> bool:
        """Whether all that have arrived have ended."""
        return self.limit == self.arrived and not self.tables

    def _room_ahead(self) -> bool:
        return self.limit < self.arrived and super()._room_ahead()
