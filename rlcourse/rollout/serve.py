"""Requests that arrive one by one, each with a limit of its own, on the paged engine.

What training does not need is here alone: its rollouts begin together and have one limit. A request's random numbers
belong to its number, its place in the list, so its tokens depend neither on who else is there nor on when it came.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor

from rlcourse.policy import Policy
from rlcourse.rollout.arrivals import ArrivalScheduler, Request
from rlcourse.rollout.paged import PagedEngine, as_lists
from rlcourse.rollout.slots import Slots
from rlcourse.rollout.triton_step import TritonStep
from rlcourse.sampling import Sampling


class LimitedStep(TritonStep):
    """A decode step in which each completion ends at a limit of its own, too: limits [completions + 1] int64."""

    def __init__(self, decoder, slots: Slots, *arguments, **options):
        super().__init__(decoder, slots, *arguments, **options)
        self.limits = torch.zeros_like(slots.lengths)

    def _sample(self, slots: Slots, *arguments) -> None:
        super()._sample(slots, *arguments)
        slots.done |= slots.num_tokens >= self.limits[slots.completion]
        slots.ended[slots.completion] = slots.done


class ServingEngine(PagedEngine):
    """A paged engine that also serves requests as they come. See `PagedEngine`.

    steps_between_looks: decode steps between two looks of the host. It hands out tokens, and lets requests in, at a
    look: with fewer, both happen sooner, and the GPU waits more often.
    """

    step_kind = LimitedStep

    def __init__(
        self, policy: Policy, dtype: torch.dtype, cache_gb: float, max_slots: int = 256, steps_between_looks: int = 16
    ):
        super().__init__(policy, dtype, cache_gb, max_slots)
        self.steps_between_looks = steps_between_looks

    @torch.no_grad()
    def serve(self, requests: list[Request], sampling: Sampling) -> Iterator[tuple[int, list[int], bool]]:
        """(number, new tokens, whether its answer has ended) of a request, as soon as the host has them: a request's
        tokens come in several parts. The clock starts when one asks for the first.

        An answer ends at its limit or with a token that ends answers. Raises ValueError for requests that are not in
        the order in which they come or lack a token, and when the longest prompt with the largest limit does not fit
        the model's positions or the cache.
        """
        start = time.perf_counter()
        prompts, arrivals = [request.prompt for request in requests], [request.arrival_s for request in requests]
        limits = [request.max_new_tokens for request in requests]
        if arrivals != sorted(arrivals):
            raise ValueError("Requests are served in their order: sort them by arrival_s.")
        if not all(prompts) or min(limits, default=0) < 1:
            raise ValueError("Every request has a token and asks for one, and there is one request at least.")
        scheduler = self._plans(ArrivalScheduler, prompts, 1, max(limits))
        self.step.limits[: len(limits)] = torch.tensor(limits)
        given = [0] * len(requests)
        while True:
            scheduler.arrived = bisect_right(arrivals, time.perf_counter() - start)
            if scheduler.idle and scheduler.arrived < len(requests):
                time.sleep(max(0.0, start + arrivals[scheduler.arrived] - time.perf_counter()))
                continue
            plan = scheduler.next_plan()
            if plan is None:  # the last steps of the plan before have not been looked at
                lengths, ended = self._look(len(requests))
            else:
                self._prepare(plan, 1, sampling)
                lengths, ended = self._run(plan, len(requests), sampling)
                scheduler.report(lengths, ended)
            tokens = self.said_tokens.numpy()
            for number, length in enumerate(lengths):
                if length > given[number]:
                    yield number, tokens[number, given[number] : length].tolist(), ended[number]
                    given[number] = length
            if plan is None:
                break
        self.blocks = scheduler.blocks

    def _begin(self, prompts: list[list[int]], width: int, num_generations: int, max_new_tokens: int) -> None:
        super()._begin(prompts, width, num_generations, max_new_tokens)
        self.step.limits.fill_(max_new_tokens)

    def _look(self, completions: int) -> tuple[list[int], list[bool]]:
        """Lengths of all completions and whether they have ended, when the device has done all its steps."""
        said = self._say(completions)
        if self.on_gpu:
            torch.cuda.synchronize()
        return as_lists(said)

    def _say(self, completions: int) -> Tensor:
        """And all tokens, which are there when the rest is."""
        self.said_tokens = self.slots.tokens[:completions].to("cpu", non_blocking=True)
        return super()._say(completions)
