"""A task of one's own: found by its place, asked in its own form, judged by its own measures, in a whole run."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from policies import make_policy, rollout_of

from rlcourse.collect import judge
from rlcourse.config import make_config
from rlcourse.evaluation import summarize
from rlcourse.tasks import Answer, Attempt, Judgement, Problem, load_task, mean_metrics
from rlcourse.train import train

SOURCE = '''
from rlcourse.tasks import Judgement, Problem

class Short:
    """Short texts are good; their `ratio` is there if they are. An evaluation looks twice."""
    name, metrics = "short", {"short": ".1%", "ratio": ".2f", "closely": ".1%"}

    def problems(self, split):
        return [Problem(f"{split} {n}", "", "a short text", n % 2) for n in range(6)]

    def prompt(self, problem, policy):
        return policy.tokenizer(problem.question, add_special_tokens=False)["input_ids"]

    def judge(self, attempts, training):
        verdicts = []
        for a in attempts:
            right = a.tokens < 5
            metrics = {"short": right, "ratio": 10 / a.tokens if right else None, "closely": not training}
            verdicts.append(Judgement(right, metrics, 2.0 * right, "short" if right else "long"))
        return verdicts

def made(data_dir):
    task = Short()
    task.name = f"from {data_dir}"
    return task

def blind(data_dir):
    task = Short()
    task.metrics = {}
    return task

class box:
    task = Short()
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with a module of tasks that is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "shorttasks.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("shorttasks", None)


def test_a_task_is_found_at_its_place(here):
    assert load_task("shorttasks:box.task").name == "short"
    assert load_task("shorttasks:made@here").name == "from here"
    assert load_task("rlcourse.tasks.gsm8k:load_minigsm").test == load_task("minigsm").test


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("poetry", "Unknown task 'poetry': use minigsm, gsm8k, .*or module:object for one of your own."),
        ("nowhere:task", "There is no module 'nowhere': run in the folder that holds it, or install it."),
        ("shorttasks:Judgement.__doc__", "shorttasks:Judgement.__doc__ is not a task: it has no name and no metrics"),
        ("shorttasks:blind", "shorttasks:blind measures nothing: name one of its metrics at least"),
    ],
)
def test_a_place_without_a_task_is_one_sentence(name, sentence, here):
    with pytest.raises(ValueError, match=sentence):
        load_task(name)


def verdict(**metrics) -> Judgement:
    return Judgement(True, metrics, 1.0, "right")


def answers(*verdicts, levels=(1, 1, 2)) -> list[Answer]:
    pairs = zip(verdicts, levels, strict=False)
    return [Answer(Problem("", "", "", level), "", 1, True, verdict) for verdict, level in pairs]


def test_means_are_over_what_could_be_measured():
    found = answers(verdict(a=1, b=None), verdict(a=0, b=None), verdict(a=1, b=None))
    assert mean_metrics(found) == {"a": 2 / 3, "b": None}
    found = answers(verdict(a=1, b=4.0), verdict(a=None, b=2.0), verdict(a=0, b=None))
    assert mean_metrics(found) == {"a": 1 / 2, "b": 3.0}
    assert summarize([found]) == {"a": 0.5, "b": 3, "finished": 1, "tokens": 1, "a_level_1": 1, "a_level_2": 0}


def test_the_readmes_task_runs(here):
    readme = (Path(__file__).parents[2] / "docs" / "your-own-task.md").read_text(encoding="utf-8")
    [source] = [code for code in re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S) if "class Reverse" in code]
    (here / "reverse.py").write_text(source)
    task = load_task("reverse:task")
    problem = task.problems("train")[23]
    assert (problem.question, problem.gold) == ("Write 123 backwards.", "321")
    verdicts = task.judge([Attempt(problem, text, 3, True) for text in ("321", "3210", "123", "")], training=True)
    assert [v.right for v in verdicts] == [True, False, False, False]
    assert [v.reward for v in verdicts] == pytest.approx([1, 3 / 4, 1 / 3, 0])
    assert all(list(v.metrics) == list(task.metrics) for v in verdicts)
    assert not {p.gold for p in task.problems("train")} & {p.gold for p in task.problems("test")}
    summary = train(make_config(task="reverse:task", steps=1, eval_problems=4, eval_every=0, pass_k=0, device="cpu"))
    assert summary["right_before"] == summary["before"]["right"] and "in place" in summary["after"]


def test_a_run_measures_and_logs_what_its_task_says(here, monkeypatch):
    policy = make_policy()
    monkeypatch.setattr("rlcourse.chat.is_special", lambda *_: True)
    policy.model.generation_config.eos_token_id = list(range(0, 300, 3))
    policy.tokenizer.chat_template = None
    policy.model.save_pretrained(here / "model")
    policy.tokenizer.save_pretrained(here / "model")
    settings = {"num_prompts": 3, "num_generations": 2, "max_new_tokens": 9, "steps": 2, "eval_every": 1, "pass_k": 2}
    settings |= {"eval_problems": 4, "device": "cpu", "name": "run", "output": str(here)}
    torch.manual_seed(0)
    summary = train(make_config(task="shorttasks:box.task", model=str(here / "model"), **settings))
    for when in ("before", "after"):
        assert summary[f"short_{when}"] == summary[when]["short"]
        assert {"ratio", "pass@2", "short_level_0", "short_level_1"} <= summary[when].keys()
        assert summary[when]["closely"] == 1  # an evaluation
        assert [s["question"] for s in summary[when]["samples"]] == [f"test {n}" for n in range(4)]
    assert summary["metrics"] == {"short": ".1%", "ratio": ".2f", "closely": ".1%"}
    lines = {n: [json.loads(x) for x in (here / "run" / n).open()] for n in ("metrics.jsonl", "evals.jsonl")}
    for line in lines["metrics.jsonl"]:
        assert line["closely"] == 0 and "accuracy" not in line  # training
        assert line["reward"] == 2 * line["short"] and (line["ratio"] is None) == (line["short"] == 0)
    assert 0 < sum(line["short"] for line in lines["metrics.jsonl"]) < 2
    assert [line["step"] for line in lines["evals.jsonl"]] == [0, 1, 2]
    assert all(line.keys() == lines["evals.jsonl"][0].keys() for line in lines["evals.jsonl"])


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        ([verdict(short=1)], "Task odd gave 1 verdicts on 2 attempts."),
        ([verdict(short=1), verdict()], "A verdict of task odd measures nothing; its metrics are short."),
        ([verdict(short=1), verdict(short=1, b=2)], "A verdict of task odd measures short, b; its metrics are short."),
        ([Judgement("no", {"short": 1}, 1.0, "right")] * 2, "The judge of task odd gave Judgement(right='no', "),
    ],
)
def test_a_task_that_judges_other_than_it_says_is_refused(verdicts, sentence):
    class Odd:
        name, metrics = "odd", {"short": ".1%"}

        def judge(self, attempts, training):
            assert attempts == [Attempt("p", "x", 1, True), Attempt("q", "y", 2, False)]
            return verdicts

    policy = SimpleNamespace(texts=lambda ids, mask: ["x", "y"])
    rollout = rollout_of([([5], [3]), ([6], [3, 4])], finished=[True, False])
    with pytest.raises(ValueError) as caught:
        judge(policy, Odd(), ["p", "q"], rollout, training=True)
    assert str(caught.value).startswith(sentence)
