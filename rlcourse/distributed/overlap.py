"""One rank samples while the other trains: `torchrun --nproc-per-node 2 -m rlcourse train --overlap`.

    first rank     train on rollout k               train on rollout k + 1
    second rank    sample k + 1 with weights k      sample k + 2 with weights k + 1

Weights k have k steps behind them. So every answer but those of the first rollout comes from weights that are a step
older than those that train on it: what the two make of a token differs by more than rounding, and `sampler_correction`
is needed. The first rank is a run of one process but for its engine, `Ahead`: it has the problems, judges, trains,
evaluates and saves. The second has a copy of the policy and keeps nothing: each request brings it prompts, weights and
the seed to sample with.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcourse.batch import Rollout
from rlcourse.device import without_cudnn_attention
from rlcourse.distributed.shared import moved
from rlcourse.distributed.world import Alone, World, lost_ranks
from rlcourse.interrupts import StopAfterStep
from rlcourse.measure.timing import now
from rlcourse.policy import Policy
from rlcourse.rollout import RolloutEngine
from rlcourse.sampling import Sampling

Arguments = tuple[list[list[int]], int, int, Sampling]  # of `RolloutEngine.generate`


@dataclass(frozen=True)
class Request:
    """What the second rank samples next, with which seed. The weights follow."""

    arguments: Arguments
    seed: int


@dataclass(frozen=True)
class Reply:
    """What it has sampled, in so many seconds, and the stop that it has been asked for."""

    rollout: Rollout
    seconds: float
    stop: type[KeyboardInterrupt] | None


@dataclass(frozen=True)
class End:
    """The run's summary, or what stopped it."""

    summary: Any = None
    stop: type[KeyboardInterrupt] | None = None


class Line:
    """What one rank sends the other: objects by gloo, weights on a GPU by NCCL. Raises `RankLost` if that has ended."""

    def __init__(self, world: World):
        self.other, self.gpus = 1 - world.rank, world.gpus
        with lost_ranks():  # the second rank waits for as long as the first evaluates
            self.group = dist.new_group(backend="gloo", timeout=timedelta(days=7))

    def send(self, value: Any) -> None:
        with lost_ranks():
            dist.send_object_list([value], self.other, group=self.group)

    def receive(self) -> Any:
        values = [None]
        with lost_ranks():
            dist.recv_object_list(values, self.other, group=self.group)
        return values[0]

    @torch.no_grad()
    def hand_over(self, policy: Policy) -> None:
        """Called by both ranks: the weights that learn become those of the first."""
        with lost_ranks():
            for weight in policy.model.parameters():
                if weight.requires_grad:
                    dist.broadcast(weight.detach(), 0, group=self.gpus if weight.is_cuda else self.group)


class Ahead:
    """The first rank's engine for training: `generate` hands out what the second rank has sampled meanwhile, and lets
    it begin with what `next_prompts` says, by the weights as they are now.

    engine: the rank's own, which evaluates. steps_done: the version of the weights.
    """

    exact = False  # the weights that train are not those that sampled

    def __init__(
        self,
        line: Line,
        engine: RolloutEngine,
        next_prompts: Callable[[], list[list[int]]],
        steps_done: Callable[[], int],
    ):
        self.line, self.engine, self.next_prompts, self.steps_done = line, engine, next_prompts, steps_done
        self.policy, self.sleep = engine.policy, engine.sleep
        self.under_way: int | None = None  # the version of the weights that the second rank samples with
        self.waiting: Reply | None = None  # sampled, not yet handed out
        self.seconds, self.tokens = 0.0, 0  # of what was handed out since `timing`
        self.stop: type[KeyboardInterrupt] | None = None  # what the second rank has been asked for

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """See `RolloutEngine`. The rollout says with which weights it was sampled."""
        if self.waiting is None and self.under_way is None:
            self._begin((prompts, num_generations, max_new_tokens, sampling))
        self._wait()
        reply, self.waiting = self.waiting, None
        self.seconds += reply.seconds
        self.tokens += int(reply.rollout.completion_lengths.sum())
        self._begin((self.next_prompts(), num_generations, max_new_tokens, sampling))
        return moved(reply.rollout, self.policy.device)

    def _begin(self, arguments: Arguments) -> None:
        self.line.send(Request(arguments, int(torch.randint(2**62, ()))))
        self.line.hand_over(self.policy)
        self.under_way = self.steps_done()

    def _wait(self) -> None:
        """Until nothing is under way."""
        if self.under_way is None:
            return
        reply = self.line.receive()
        versions = torch.full_like(reply.rollout.logprobs, self.under_way, dtype=torch.int64)
        self.waiting = replace(reply, rollout=replace(reply.rollout, versions=versions))
        self.stop, self.under_way = reply.stop, None

    def timing(self) -> dict[str, float]:
        """Of a step, where `rollout_s` is what it waited: the seconds that the second rank sampled."""
        seconds, tokens, self.seconds, self.tokens = self.seconds, self.tokens, 0.0, 0
        return {"sampling_s": seconds, "tokens_per_s": tokens / seconds}

    def state(self) -> dict[str, Any] | None:
        """What has been sampled for the next step, for `load`: waits for it."""
        self._wait()
        return self.waiting and {"rollout": self.waiting.rollout.tensors, "seconds": self.waiting.seconds}

    def load(self, state: dict[str, Any] | None) -> None:
        """Raises ValueError for a rollout of other prompts than the next."""
        if state is None:
            return
        rollout, prompts = Rollout(**state["rollout"]), self.next_prompts()
        group = len(rollout.ids) // len(prompts)
        rows = zip(rollout.ids.tolist()[::group], rollout.prompt_lengths.tolist()[::group], strict=True)
        if [ids[:length] for ids, length in rows] != prompts:
            raise ValueError("a rollout of other prompts")
        self.waiting = Reply(rollout, state["seconds"], None)


class Pair(Alone, AbstractContextManager):
    """The first rank's world: one process, whose training samples elsewhere. `end` says that the run is over."""

    def __init__(self, world: World):
        self.line, self.ahead = Line(world), None

    def sampler(self, engine: Any, next_prompts: Callable[[], Any], steps_done: Callable[[], int]) -> Ahead:
        self.ahead = Ahead(self.line, engine, next_prompts, steps_done)
        return self.ahead

    def agree(self, stop: Any) -> Any:
        return stop or self.ahead.stop

    def end(self, summary: Any) -> Any:
        """Let the other rank end as this one does, with the same summary."""
        self.line.send(End(summary))
        return summary

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        # One that stops within a step leaves at once, and the other finds that it is gone.
        if isinstance(error, KeyboardInterrupt) and self.ahead is not None and self.ahead.under_way is None:
            self.line.send(End(stop=kind))


def sample_ahead(world: World, policy: Policy, engine: RolloutEngine) -> Any:
    """The second rank: sample what the first asks for until it says that the run is over. Returns the run's summary.

    A stop that this rank is asked for is the first's to make.
    """
    line = Line(world)
    with StopAfterStep(follows=True) as stop:
        while isinstance(request := line.receive(), Request):
            line.hand_over(policy)
            torch.manual_seed(request.seed)
            begin = now(policy.device)
            with without_cudnn_attention():
                rollout = moved(engine.generate(*request.arguments), "cpu")
            line.send(Reply(rollout, now(policy.device) - begin, stop.asked))
    if request.stop is not None:
        raise request.stop
    return request.summary
