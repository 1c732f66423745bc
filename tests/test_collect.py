"""The first half of a step: whose reward reaches which row, and what is sampled anew."""

from dataclasses import replace

import pytest
import torch
from policies import DEVICE, FixedEngine, make_policy

from rlcourse.collect import collect
from rlcourse.config import make_config
from rlcourse.sampling import Sampling
from rlcourse.tasks import Answer, Attempt, MathTask, Problem

NUMBERS = [Problem(f"question {n}", "", str(n)) for n in range(12)]
TASK = MathTask("numbers", "Reason.", NUMBERS, [], [])


class NumberPolicy:
    """The prompt of `question n` is n + 1, of `question n width` so many times; token 50 + n reads `#### n`, token
    200 + n only `n`."""

    device, model = torch.device(DEVICE), make_policy().model

    def __init__(self):
        self.asked = []

    def prompts(self, questions, instruction="", examples=()):
        self.asked += [(question, instruction) for question in questions]
        return [[int(n) + 1] * int(width) for _, n, width in (f"{q} 1".split()[:3] for q in questions)]

    def prompt(self, question, instruction="", examples=()):
        return self.prompts([question], instruction)[0]

    def texts(self, completion_ids, completion_mask):
        assert completion_mask[:, 0].all() and completion_mask.shape == completion_ids.shape
        return [f"#### {row[0] - 50}" if row[0] < 200 else f"{row[0] - 200}" for row in completion_ids.tolist()]


class InOrder:
    """Problems one after the other."""

    def __init__(self):
        self.position = 0

    def sample(self, count):
        self.position += count
        return NUMBERS[self.position - count : self.position]


def engine(right: dict[int, list[int]], unfinished=()) -> FixedEngine:
    """Problem n is answered rightly in the rows `right[n]` of its group; -(4n + row) / 10 is the first log-prob; the
    row that is k-th in its group has k + 1 tokens."""
    completions = {}
    for n in range(12):
        rows = []
        for row in range(4):
            first = 50 + (n if row in right.get(n, ()) else 11 - n + 40)
            logprobs = [-(4 * n + row) / 10] + [-1.0] * row
            rows.append(([first] + [3] * row, logprobs, (n, row) not in unfinished))
        completions[n + 1,] = rows
    return FixedEngine(completions)


def collected(right, unfinished=(), **overrides):
    """(those that train, all that were sampled, the engine, the policy)."""
    config = make_config(num_prompts=3, num_generations=4, max_new_tokens=9, **overrides)
    policy, source = NumberPolicy(), engine(right, unfinished)
    return *collect(policy, source, TASK, InOrder(), config), source, policy


def test_each_reward_reaches_the_row_that_earned_it():
    completions, sampled, _, _ = collected({0: [1], 1: [0, 3], 2: []})
    assert completions is sampled
    assert completions.rewards.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert completions.rewards.dtype == torch.float32 and completions.rewards.device.type == DEVICE
    assert [a.problem.gold for a in completions.answers] == list("000011112222")
    assert [a.strict for a in completions.answers] == [r == 1 for r in completions.rewards.tolist()]
    assert completions.answers[1].text == "#### 0" and completions.answers[7].text == "#### 1"
    assert [a.tokens for a in completions.answers] == [1, 2, 3, 4] * 3
    assert completions.rollout.logprobs[:, 0].tolist() == pytest.approx([-i / 10 for i in range(12)])


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ([0.0] * 11 + [float("nan")], "The reward function gave an answer a reward of nan, which is no finite number"),
        ([0.0] * 11 + ["1"], "The reward function gave an answer a reward of '1', which is no finite number"),
        ([0.0] * 11, "The reward function gave 11 rewards for 12 answers: return one for each."),
    ],
)
def test_a_reward_function_that_gives_no_rewards_is_blamed_itself(rewards, sentence):
    config = make_config(num_prompts=3, num_generations=4, max_new_tokens=9)
    with pytest.raises(ValueError, match=sentence):
        collect(NumberPolicy(), engine({}), TASK, InOrder(), config, lambda answers, config: rewards)


def test_the_engine_is_asked_for_what_the_config_says_and_the_policy_gets_the_instruction():
    _, _, source, policy = collected({}, temperature=0.7, top_k=5, top_p=0.9)
    assert source.calls == [(3, 4, 9, Sampling(0.7, 5, 0.9))]
    assert policy.asked == [(f"question {n}", "Reason.") for n in range(3)]


def test_the_reward_scheme_of_the_config_is_used():
    texts = {"#### 7": True, "the answer is 7": True, "#### 8": True, "no idea": True, "#### 7 ": False}
    attempts = [Attempt(NUMBERS[7], text, 1, finished) for text, finished in texts.items()]
    for parser, second in (("strict", 0.0), ("lenient", 1.0)):
        task = replace(TASK, train=[]).with_settings(make_config(reward_format=0.25, reward_parser=parser))
        assert [verdict.reward for verdict in task.judge(attempts, training=True)] == [1.0, second, 0.25, 0.0, 0.0]


SIGNAL = {0: [0, 1, 2, 3], 1: [2], 2: [], 3: [], 4: [0, 1], 5: [1, 2, 3]}


def test_dynamic_sampling_trains_on_groups_with_signal_when_there_are_enough():
    completions, sampled, source, _ = collected(SIGNAL, leave_out="groups")
    assert len(source.calls) == 2
    assert [a.problem.gold for a in completions.answers] == list("111144445555")
    assert completions.rewards.tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    expected = [-(4 * n + row) / 10 for n in (1, 4, 5) for row in range(4)]
    assert completions.rollout.logprobs[:, 0].tolist() == pytest.approx(expected)
    assert [a.problem.gold for a in sampled.answers] == [str(n) for n in range(6) for _ in range(4)]
    assert len(sampled.rewards) == len(sampled.rollout.finished) == 24


def test_dynamic_sampling_gives_up_after_four_rounds_and_fills_up_with_what_it_found():
    completions, sampled, source, _ = collected({7: [3]}, leave_out="groups")
    assert len(source.calls) == 4 and len(sampled.answers) == 48
    assert [a.problem.gold for a in completions.answers] == list("777700001111")


def answer(text: str, tokens: int, finished: bool = True) -> Answer:
    attempt = Attempt(Problem("", "", "7"), text, tokens, finished)
    return Answer(**vars(attempt), verdict=TASK.judge([attempt], training=True)[0])
