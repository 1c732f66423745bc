"""Requests that arrive on the paged engine: their tokens are those of the unpaged engine, cut at each one's limit.

On a CPU in Triton's interpreter, with small blocks, as in `test_paged.py`; the clock is one that the test turns.
"""

import itertools
import random
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from paged_device import PagedDevice
from paged_device import Request as Groups
from reference import answers
from test_paged import BLOCK, DTYPE, policy_that_ends, small, unpaged  # noqa: F401
from thorough import thorough

from rlcourse.rollout import serve
from rlcourse.rollout.blocks import BlockManager
from rlcourse.rollout.serve import ArrivalScheduler, Request, ServingEngine
from rlcourse.sampling import GREEDY, Sampling

NEW = 6 * BLOCK // 8
PROMPTS = [[5, 9, 40], [(3 * i) % 80 + 4 for i in range(2 * BLOCK)], [60], [5, 9, 40]]
LIMITS = [NEW, 1, NEW // 2 + 1, 2]


class Clock:
    """A second each time that somebody looks; who sleeps wakes when he wanted."""

    def __init__(self):
        self.now, self.slept = 0.0, 0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(serve, "time", Clock())
    return serve.time


class Watched(ServingEngine):
    """With so many blocks besides nobody's, slots and steps between looks. Keeps its plans."""

    def __init__(self, policy, usable: int, slots: int, every: int = BLOCK // 4, late: int = 0):
        super().__init__(policy, DTYPE, 1.0, slots, every)
        self.num_blocks, self.late, self.plans = usable + 1, late, []

    def _prepare(self, plan, *arguments):
        self.plans.append(plan)
        assert len(self.plans) < 200, "it does not end"
        super()._prepare(plan, *arguments)


def serve_all(engine, requests: list[Request], sampling: Sampling) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Each request's tokens; and (number, tokens in it) of each part, in the order in which they came."""
    torch.manual_seed(1)
    tokens, parts, ends = [[] for _ in requests], [], []
    for number, new, ended in engine.serve(requests, sampling):
        assert new and number not in ends
        tokens[number] += new
        parts.append((number, len(new)))
        ends += [number] if ended else []
    assert sorted(ends) == list(range(len(requests)))
    return tokens, parts


@cache
def expected(sampling: Sampling) -> list[list[int]]:
    """What the engine with room for all says to the same prompts."""
    return answers(unpaged(policy_that_ends(), PROMPTS, 1, NEW, sampling))


def requests_at(*arrivals: float) -> list[Request]:
    return [Request(*three) for three in zip(PROMPTS, LIMITS, arrivals, strict=True)]


@pytest.mark.parametrize(
    ("arrivals", "usable", "slots", "late"),
    [
        ((0, 0, 4, 1000), 5, 2, 1),
        thorough(((0, 0, 0, 0), 4, 1, 0)),
        thorough(((0, 3, 6, 6), 40, 4, 0)),
        thorough(((0, 3, 5, 7), 4, 4, 2)),
    ],
)
def test_tokens_depend_neither_on_the_others_nor_on_when_a_request_came(small, clock, arrivals, usable, slots, late):  # noqa: F811
    engine = Watched(policy_that_ends(), usable, slots, late=late)
    found, parts = serve_all(engine, requests_at(*arrivals), Sampling(0.8))
    alone = expected(Sampling(0.8))
    assert found == [answer[:limit] for answer, limit in zip(alone, LIMITS, strict=True)]
    assert any(len(answer) > limit for answer, limit in zip(alone, LIMITS, strict=True)), "no limit was of use"
    assert len(parts) > len(PROMPTS), "tokens come in parts"
    assert engine.plans[0].limit <= sum(arrival <= 3 for arrival in arrivals)
    if arrivals[-1] == 1000:
        assert clock.slept >= 1 and clock.now > 1000
        assert {number for number, _ in parts[:-1]} == {0, 1, 2} and parts[-1][0] == 3, "the last came to nobody"


@pytest.mark.thorough
def test_training_rollouts_on_the_same_engine_have_one_limit_again(small, clock):  # noqa: F811
    engine = Watched(policy_that_ends(), 40, 8)
    serve_all(engine, requests_at(0, 0, 0, 0), Sampling(0.8))
    torch.manual_seed(1)
    assert answers(engine.generate(PROMPTS, 1, NEW, Sampling(0.8))) == expected(Sampling(0.8))


def test_a_request_that_cannot_be_served_is_refused_in_a_sentence(small):  # noqa: F811
    engine = Watched(policy_that_ends(), 7, 4)
    for requests, sentence in (
        ([Request([1], 2, 5.0), Request([1], 2, 4.0)], "sort them by arrival_s"),
        ([Request([1], 0)], "has a token and asks for one"),
        ([Request([], 3)], "has a token and asks for one"),
        ([], "there is one request at least"),
        ([Request([1], 100 * BLOCK)], "give it a larger budget"),
    ):
        with pytest.raises(ValueError, match=sentence):
            list(engine.serve(requests, GREEDY))


def simulate(seed: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Arrivals by plan over the device that checks each entry that it reads: arrivals, and of each request the plan in
    which it was first below the limit; what had arrived, and the limit, at each plan."""
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
    return arrivals, limits, there, reached


@pytest.mark.parametrize("seed", range(60))
def test_nobody_starts_before_he_comes_and_all_end_with_their_tokens(seed):
    *_, there, reached = simulate(seed)
    assert all(limit <= arrived for limit, arrived in zip(reached, there, strict=True))


def test_who_comes_while_another_decodes_joins_at_the_next_look():
    blocks, device = BlockManager(40, 4), PagedDevice(40, 4)
    scheduler = ArrivalScheduler(blocks, [[1], [2]], 1, 40, 8, 4)
    device.begin(Groups([[1], [2]], 1, 40, [40, 5]), 0, 8, scheduler.table_width, 0)
    for arrived in (1, 1, 2, 2, 2):
        scheduler.arrived = arrived
        scheduler.report(*device.run(scheduler.next_plan()))
    assert device.live[:8] == [1] * 8 and device.live[8:12] == [2] * 4 and device.live[12:16] == [1] * 4
