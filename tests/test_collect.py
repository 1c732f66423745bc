"""The first half of a step: whose reward reaches which row, what is sampled anew, and what a step measures."""

import math
from dataclasses import replace

import pytest
import torch
from policies import DEVICE, FixedEngine, make_policy, rollout_of

from rlcourse.collect import Completions, collect
from rlcourse.config import make_config
from rlcourse.metrics import Means, rollout_metrics
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


def engine(right: dict[int, list[int]]) -> FixedEngine:
    """Problem n is answered rightly in the rows `right[n]` of its group; -(4n + row) / 10 is the first log-prob; the
    row that is k-th in its group has k + 1 tokens."""
    completions = {}
    for n in range(12):
        rows = []
        for row in range(4):
            first = 50 + (n if row in right.get(n, ()) else 11 - n + 40)
            logprobs = [-(4 * n + row) / 10] + [-1.0] * row
            rows.append(([first] + [3] * row, logprobs, True))
        completions[n + 1,] = rows
    return FixedEngine(completions)


def collected(right, **overrides):
    """(those that train, all that were sampled, the engine, the policy)."""
    config = make_config(num_prompts=3, num_generations=4, max_new_tokens=9, **overrides)
    policy, source = NumberPolicy(), engine(right)
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


def test_a_mean_over_parts_is_that_of_all_their_tokens():
    means, mask = Means(), torch.tensor([[True, True], [True, False]])
    means.add("a", torch.tensor([[1.0, 2.0], [6.0, math.nan]]), mask)
    means.add("a", torch.tensor([[11.0]]), torch.tensor([[True]]))
    means.add("b", torch.tensor([[-3.0]]), torch.tensor([[True]]))
    means.add("c", torch.tensor([[5.0]]), torch.tensor([[False]]))
    means.add("d", torch.tensor([[True, False]]), torch.tensor([[True, True]]))
    assert means.together() == {"a": (5.0, 11.0), "b": (-3.0, 0.0), "d": (0.5, 1.0)}


def sampled(answers, rewards, logprobs) -> Completions:
    rollout = rollout_of([([5], [3] * len(x)) for x in logprobs], logprobs, [a.finished for a in answers])
    return Completions(rollout, answers, torch.tensor(rewards, device=DEVICE))


def test_metrics_are_means_over_all_that_was_sampled():
    texts = ["#### 7", "is 7", "#### 8", "#### 7", "#### 7", "is it 7"]
    answers = [answer(text, tokens, tokens < 10) for text, tokens in zip(texts, [3, 5, 4, 10, 1, 7], strict=True)]
    logprobs = [[-1.0, -2.0, -4.0], [-8.0], [-0.5], [-0.25, -16.0], [0.0], [-32.0]]
    rewards = [1.0, 0.0, 0.5, 0.5, 0.25, 0.25]
    std = (sum(r * r for r in rewards) / 6 - (2.5 / 6) ** 2) ** 0.5
    expected = {"reward": 2.5 / 6, "reward_std": std, "groups_without_signal": 2 / 3, "entropy": 63.75 / 9}
    expected |= {"accuracy": 2 / 6, "accuracy_lenient": 4 / 6, "formatted": 3 / 6, "truncated": 1 / 6}
    expected |= {"length": 30 / 6, "length_right": (3 + 1) / 2, "length_wrong": (5 + 4 + 10 + 7) / 4}
    metrics = rollout_metrics(sampled(answers, rewards, logprobs), make_config(num_generations=2))
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize(("text", "missing"), [("#### 7", "length_wrong"), ("#### 8", "length_right")])
def test_the_length_of_nothing_is_none(text, missing):
    answers = [answer(text, 3), answer(text, 4)]
    metrics = rollout_metrics(sampled(answers, [1.0, 1.0], [[-1.0], [-2.0]]), make_config(num_generations=2))
    assert metrics[missing] is None and metrics["length"] == 3.5
    assert sum(value is None for value in metrics.values()) == 1
