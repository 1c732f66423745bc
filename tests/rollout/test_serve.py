"""Requests that arrive on the paged engine: their tokens are those of the unpaged engine, cut at each one's limit.

On a CPU in Triton's interpreter, with small blocks, as in `test_paged.py`; the clock is one that the test turns.
"""

import dataclasses
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from reference import answers
from test_paged import BLOCK, DTYPE, policy_that_ends, small, unpaged  # noqa: F401
from thorough import thorough

from rlcourse.rollout import serve
from rlcourse.rollout.arrivals import Request
from rlcourse.rollout.serve import ServingEngine
from rlcourse.sampling import GREEDY, Sampling

NEW = BLOCK // 2
PROMPTS = [[5, 9, 40], [(3 * i) % 80 + 4 for i in range(BLOCK)], [60]]
LIMITS = [NEW, NEW // 2 + 1, 1]


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
        assert len(self.plans) < 30, "it does not end"
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
        ((0, 2, 1000), 3, 2, 1),
        thorough(((0, 0, 0), 2, 1, 0)),
        thorough(((0, 3, 5), 40, 4, 2)),
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
        assert {number for number, _ in parts[:-1]} == {0, 1} and parts[-1] == (2, 1), "the last came to nobody"


@pytest.mark.thorough
def test_the_last_token_of_the_longest_answer_comes_though_nobody_is_left_to_decode(small):  # noqa: F811
    policy = policy_that_ends()
    policy = dataclasses.replace(policy, eos_ids=[policy.model.config.vocab_size])
    found, _ = serve_all(Watched(policy, 40, 4, late=1), requests_at(0, 0, 0), Sampling(0.8))
    assert [len(tokens) for tokens in found] == LIMITS
    alone = answers(unpaged(policy, PROMPTS, 1, NEW, Sampling(0.8)))
    assert found == [answer[:limit] for answer, limit in zip(alone, LIMITS, strict=True)]


def test_a_request_that_cannot_be_served_is_refused_in_a_sentence(small):  # noqa: F811
    engine = Watched(policy_that_ends(), 7, 4)
    for requests, sentence in (
        ([Request([1], 2, 5.0), Request([1], 2, 4.0)], "sort them by arrival_s"),
        ([Request([1], 0)], "has a token and asks for one"),
        ([Request([], 3)], "has a token and asks for one"),
        ([], "there is one request at least"),
        ([Request([1], 1000)], "give it a larger budget"),
    ):
        with pytest.raises(ValueError, match=sentence):
            list(engine.serve(requests, GREEDY))
