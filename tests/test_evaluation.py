"""Evaluation: answers in the order of the problems, judged one by one, and no effect on what goes on after it."""

from itertools import combinations
from statistics import mean

import pytest
import torch
from conftest import DEVICE, make_policy

from rlcourse import evaluation
from rlcourse.config import make_config
from rlcourse.evaluation import Answer, answer_problems, evaluate_test, mean_pass_at_k, pass_at_k, sample, summarize
from rlcourse.rollout import Rollout, make_engine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import MathTask, Problem

WIDTHS = [3, 9, 1, 7, 7, 2, 5]  # tokens of each problem's prompt
PROBLEMS = [Problem(f"{number} {width}", "", str(number)) for number, width in enumerate(WIDTHS)]
TASK = MathTask("numbers", "", [], [], PROBLEMS)


class NumberPolicy:
    """The prompt of problem n is n, some times over; token n reads `#### n`."""

    device = torch.device("cpu")

    def prompt(self, question, instruction=""):
        number, width = question.split()
        return [int(number)] * int(width)

    def texts(self, completion_ids, completion_mask):
        return [f"#### {row[0]}" for row in completion_ids.tolist()]


class NumberEngine:
    """Writes n, n + 1, n + 2, ... to problem n, in n + 1 tokens each; the answers to `unfinished` problems are cut."""

    def __init__(self, unfinished=()):
        self.unfinished, self.calls, self.drawn = unfinished, [], []

    def generate(self, prompts, num_generations, max_new_tokens, sampling):
        self.calls.append((len(prompts), sampling))
        self.drawn.append(torch.rand(3))
        number = torch.tensor([prompt[0] for prompt in prompts]).repeat_interleave(num_generations)
        written = number + torch.arange(num_generations).repeat(len(prompts))
        mask = torch.arange(10) <= number[:, None]
        finished = ~torch.isin(number, torch.tensor(self.unfinished, dtype=torch.long))
        return Rollout(mask, mask, written[:, None].expand(-1, 10), mask, mask.float(), finished)


def answer(level, strict=False, lenient=False, formatted=False, finished=True, tokens=10):
    return Answer(Problem("", "", "1", level), "", tokens, finished, strict, lenient, formatted)


@pytest.mark.parametrize("batch_rows", [1, 2, 5, 6, 256])
@pytest.mark.parametrize("num_generations", [1, 3])
def test_answers_come_in_the_order_of_the_problems_whatever_the_batches(batch_rows, num_generations, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH_ROWS", batch_rows)
    engine = NumberEngine()
    answers = answer_problems(NumberPolicy(), engine, TASK, PROBLEMS, 10, GREEDY, num_generations)
    for number, (problem, group) in enumerate(zip(PROBLEMS, answers, strict=True)):
        assert [a.text for a in group] == [f"#### {number + g}" for g in range(num_generations)]
        assert [a.strict for a in group] == [True] + [False] * (num_generations - 1)
        assert all(a.problem is problem and a.tokens == number + 1 for a in group)


def test_every_batch_has_the_same_rows(monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH_ROWS", 6)
    engine = NumberEngine()
    answer_problems(NumberPolicy(), engine, TASK, PROBLEMS, 10, Sampling(), num_generations=2)
    assert engine.calls == [(3, Sampling())] * 3  # 7 problems, 3 at a time


def test_greedy_answers_of_a_model_do_not_depend_on_the_batches(policy, monkeypatch):
    engine = make_engine(policy, "graph", torch.float32)
    texts = []
    for batch_rows in (1, 3, 256):
        monkeypatch.setattr(evaluation, "BATCH_ROWS", batch_rows)
        answers = answer_problems(policy, engine, TASK, PROBLEMS, 12)
        texts.append([(a.text, a.tokens, a.finished) for (a,) in answers])
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) > 3


def test_an_unfinished_answer_is_never_right_and_never_formatted():
    answers = answer_problems(NumberPolicy(), NumberEngine(unfinished=[2, 5]), TASK, PROBLEMS, 10)
    for number, (a,) in enumerate(answers):
        whole = number not in (2, 5)
        assert (a.finished, a.strict, a.lenient, a.formatted) == (whole,) * 4


def test_an_evaluation_does_not_change_the_random_state_and_is_the_same_each_time():
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(4)
        torch.manual_seed(seed)
        engine = NumberEngine()
        answer_problems(NumberPolicy(), engine, TASK, PROBLEMS, 10, Sampling())
        assert torch.equal(torch.rand(4), expected)
        drawn.append(engine.drawn[0])
    assert torch.equal(*drawn)


def test_a_sampled_evaluation_on_the_device_leaves_its_random_state():
    policy = make_policy()
    engine = make_engine(policy, "graph", torch.float32)
    torch.manual_seed(7)
    expected = torch.rand(4, device=DEVICE)
    torch.manual_seed(7)
    answer_problems(policy, engine, TASK, PROBLEMS, 4, Sampling(), num_generations=3)
    assert torch.equal(torch.rand(4, device=DEVICE), expected)


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(samples):
    for right in range(samples + 1):
        answers = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            expected = mean(any(subset) for subset in combinations(answers, k))
            assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_samples(k):
    with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples of each problem, there are 4"):
        pass_at_k(4, 2, k)


def test_mean_pass_at_k_goes_up_in_powers_of_two_and_averages_over_problems():
    groups = [[answer(1, strict=i < right) for i in range(6)] for right in (0, 1, 6)]
    result = mean_pass_at_k(groups)
    assert result == pytest.approx({"pass@1": (0 + 1 / 6 + 1) / 3, "pass@2": (0 + 1 / 3 + 1) / 3, "pass@4": 5 / 9})


def test_summarize_counts_all_answers_and_by_level():
    answers = [
        [answer(1, strict=True, lenient=True, formatted=True, tokens=4), answer(1, formatted=True, tokens=8)],
        [answer(3, lenient=True, tokens=6), answer(3, finished=False, tokens=20)],
        [answer(None, strict=True, lenient=True, formatted=True, tokens=2), answer(None, tokens=2)],
    ]
    assert summarize(answers) == pytest.approx(
        {
            "accuracy": 2 / 6,
            "accuracy_lenient": 3 / 6,
            "formatted": 3 / 6,
            "finished": 5 / 6,
            "tokens": 7,
            "accuracy_level_1": 1 / 2,
            "accuracy_level_3": 0,
        }
    )


def test_the_test_evaluation_takes_the_problems_and_samples_that_were_asked_for():
    engine = NumberEngine(unfinished=[1])
    config = make_config(eval_problems=5, pass_k=2, pass_k_problems=3, temperature=0.5)
    result = evaluate_test(NumberPolicy(), engine, TASK, config)
    assert engine.calls == [(5, GREEDY), (3, Sampling(temperature=0.5))]
    assert result["problems"] == 5 and result["accuracy"] == 4 / 5
    assert result["pass@1"] == pytest.approx(1 / 3) and result["pass@2"] == pytest.approx(2 / 3)  # the second is wrong
    assert [s["right"] for s in result["samples"]] == [True, False, True, True, True]
    assert [s["gold"] for s in result["samples"]] == list("01234")


def test_pass_k_of_zero_samples_nothing():
    engine = NumberEngine()
    result = evaluate_test(NumberPolicy(), engine, TASK, make_config(eval_problems=5, pass_k=0))
    assert len(engine.calls) == 1 and not any(key.startswith("pass@") for key in result)


def test_the_embedded_model_answers_some_problems_and_the_verdicts_agree_with_the_verifier():
    config = make_config(device="cpu")
    answers = sample(config, 12, greedy=True)
    assert [a.problem for a in answers] == evaluation.load_task("minigsm").test[:12]
    assert 0 < sum(a.strict for a in answers) < 12
    for a in answers:
        assert a.strict == (a.finished and f"#### {a.problem.gold}" in a.text.splitlines())
