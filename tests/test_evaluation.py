"""Evaluation: answers in the order of the problems, judged one by one, and no effect on what goes on after it."""

import pytest
import torch
from policies import DEVICE, rollout_of
from test_collect import NumberPolicy

from rlcourse import evaluation
from rlcourse.config import make_config
from rlcourse.distributed import check_launch
from rlcourse.evaluation import answer_problems, answer_test, evaluate, summarize, summarize_test
from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import Answer, MathTask, Problem, load_task
from rlcourse.tasks.verify import Readings

WIDTHS = [3, 9, 1, 7, 7, 2, 5]  # tokens of each problem's prompt
PROBLEMS = [Problem(f"question {number} {width}", "", str(number)) for number, width in enumerate(WIDTHS)]
TASK = MathTask("numbers", "Count.", [], [], PROBLEMS)


class NumberEngine:
    """Writes n, n + 1, n + 2, ... to problem n, in n + 1 tokens each; the answers to `unfinished` problems are cut."""

    def __init__(self, unfinished=()):
        self.unfinished, self.calls, self.drawn, self.limits = unfinished, [], [], []

    def generate(self, prompts, num_generations, max_new_tokens, sampling):
        self.calls.append((len(prompts), sampling))
        self.limits.append((num_generations, max_new_tokens))
        self.drawn.append((torch.rand(3), torch.rand(3, device=DEVICE)))
        numbers = [prompt[0] - 1 for prompt in prompts]
        rows = [
            (p, [50 + n + g] * (n + 1)) for p, n in zip(prompts, numbers, strict=True) for g in range(num_generations)
        ]
        return rollout_of(rows, finished=[n not in self.unfinished for n in numbers for _ in range(num_generations)])


def answer(level, strict=False, lenient=False, formatted=False, finished=True, tokens=10):
    return Answer(Problem("", "", "1", level), "", tokens, finished, Readings(strict, lenient, formatted, None))


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


@pytest.mark.parametrize(("batch_rows", "size", "batches"), [(6, 3, 3), (8, 4, 2), (10, 4, 2), (256, 7, 1)])
def test_every_batch_has_the_same_rows_and_few_are_filled_up(batch_rows, size, batches, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH_ROWS", batch_rows)
    engine = NumberEngine()
    answer_problems(NumberPolicy(), engine, TASK, PROBLEMS, 10, Sampling(), num_generations=2)
    assert engine.calls == [(size, Sampling())] * batches  # of 7 problems
    assert engine.limits == [(2, 10)] * batches


def test_probabilities_that_are_not_finite_are_no_answers(policy):
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.fill_(torch.nan)
    engine = TorchEngine(policy)
    with pytest.raises(RuntimeError, match="The model's probabilities are not finite"):
        answer_problems(policy, engine, TASK, [Problem("What?", "", "1")], 3)


def test_an_answer_that_may_exceed_the_positions_is_refused_before_anything_is_answered():
    engine = NumberEngine()
    with pytest.raises(ValueError, match=r"A prompt and its completion of \d+ tokens exceed the model's 256 positions"):
        answer_problems(NumberPolicy(), engine, TASK, PROBLEMS, 255)
    assert not engine.calls


def test_an_evaluation_does_not_change_the_random_state_and_is_the_same_each_time():
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(4), torch.rand(4, device=DEVICE)
        torch.manual_seed(seed)
        engine = NumberEngine()
        answer_problems(NumberPolicy(), engine, TASK, PROBLEMS, 10, Sampling())
        assert torch.equal(torch.rand(4), expected[0]) and torch.equal(torch.rand(4, device=DEVICE), expected[1])
        drawn.append(engine.drawn[0])
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)


def test_mean_pass_at_k_goes_up_in_powers_of_two_and_averages_over_problems():
    groups = [[answer(1, strict=i < right) for i in range(6)] for right in (0, 1, 6)]
    result = evaluation.mean_pass_at_k(groups)
    assert result == pytest.approx({"pass@1": (0 + 1 / 6 + 1) / 3, "pass@2": (0 + 1 / 3 + 1) / 3, "pass@4": 5 / 9})


def test_summarize_counts_all_answers_and_by_level():
    answers = [
        [answer(1, strict=True, lenient=True, formatted=True, tokens=4), answer(1, formatted=True, tokens=8)],
        [answer(3, lenient=True, tokens=6), answer(3, finished=False, tokens=20)],
        [answer(None, strict=True, lenient=True, formatted=True, tokens=2), answer(None, lenient=True, tokens=2)],
    ]
    expected = {"accuracy": 2 / 6, "accuracy_lenient": 4 / 6, "formatted": 3 / 6, "finished": 5 / 6, "tokens": 7}
    assert summarize(answers) == pytest.approx(expected | {"accuracy_level_1": 1 / 2, "accuracy_level_3": 0})


def evaluated(*arguments):
    return summarize_test(*answer_test(*arguments))


def test_the_test_evaluation_takes_the_problems_and_samples_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(evaluation, "PASS_K_PROBLEMS", 3)
    engine = NumberEngine(unfinished=[1])
    config = make_config(eval_problems=5, pass_k=2, temperature=0.5)
    result = evaluated(NumberPolicy(), engine, TASK, config)
    assert engine.calls == [(5, GREEDY), (3, Sampling(temperature=0.5))]
    assert engine.limits == [(1, 80), (2, 80)]
    assert result["problems"] == 5 and result["accuracy"] == 4 / 5
    assert result["pass@1"] == pytest.approx(1 / 3) and result["pass@2"] == pytest.approx(2 / 3)  # the second is wrong
    assert [s["right"] for s in result["samples"]] == [True, False, True, True, True]
    assert [s["gold"] for s in result["samples"]] == list("01234")
    assert result["samples"][2] == {"question": PROBLEMS[2].question, "gold": "2", "text": "#### 2", "right": True}


def test_processes_without_a_prompt_may_evaluate_but_not_train(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    config = make_config(device="cpu", num_prompts=2)
    check_launch(config, trains=False)
    with pytest.raises(ValueError, match="num_prompts 2 are fewer than 3 processes"):
        check_launch(config)


def test_the_model_and_the_task_of_the_config_are_evaluated():
    config = make_config(eval_problems=3, pass_k=0, engine="hf-dynamic", device="cpu", max_new_tokens=20)
    problems, samples = load_task("minigsm").test[:3], evaluate(config)["samples"]
    assert [sample["question"] for sample in samples] == [problem.question for problem in problems]
    assert all(sample["text"] for sample in samples)
