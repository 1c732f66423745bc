"""Runs that can't learn say so. Each case runs the real command, on the embedded model and a tiny task."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy import without_picture
from typer.testing import CliRunner

from rlcourse import cli, preview, watch
from rlcourse.config import make_config
from rlcourse.files import read_lines
from rlcourse.paths import data_folder
from rlcourse.sft import trainer as fine_tuning
from rlcourse.tasks import Answer, Judgement, MathTask, Problem, load_task

TASKS = """
import re
from dataclasses import dataclass
from rlcourse.tasks import Judgement, Problem, load_task
from rlcourse.tasks.task import MathTask

base = load_task("minigsm@few")

@dataclass(frozen=True)
class Own(MathTask):
    earned: object = None

    def judge(self, attempts, training):
        earned = [self.earned(a) for a in attempts]
        return [Judgement(e == 1, {"right": float(e == 1)}, e, "right" if e == 1 else "wrong") for e in earned]

    metrics = {"right": ".1%"}

def task(earned):
    return lambda data_dir: Own("own", "", base.train, base.validation, base.test, earned=earned)

always = task(lambda a: 1.0)
never = task(lambda a: 0.0)
half = task(lambda a: 0.5)
broken = task(lambda a: float("nan"))

def words(data_dir):  # what the model writes is right, in a form that the strict reading does not take
    class Words(MathTask):
        def verify(self, text, gold):
            return super().verify(text.replace("####", "so"), gold)
    return Words("words", "", base.train, base.validation, base.test)
"""
FEW = 64  # problems of a split: a run reads them all
SMALL = "--task minigsm@few --num-prompts 2 --num-generations 4 --eval-problems 12 --pass-k 4 --eval-every 0 "
SMALL += "--max-new-tokens 40"
WARNINGS = Path("runs/run/warnings.jsonl")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path, request):
    (tmp_path / "ours.py").write_text(TASKS)
    (tmp_path / "few").mkdir()
    for file in (data_folder() / "minigsm").glob("*.jsonl"):
        (tmp_path / "few" / file.name).write_text("\n".join(file.read_text().splitlines()[:FEW]))
    if "fine_tuning" not in request.node.name:
        without_picture(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    sys.modules.pop("ours", None)


def train(options: str, steps: int = 4):
    command = f"train {SMALL} --steps {steps} --name run {options}"
    result = CliRunner().invoke(cli.app, command.split(), env={"COLUMNS": "4000"})
    return result, {line["kind"]: line for line in read_lines(WARNINGS)}


def summary() -> dict:
    return json.loads(Path("runs/run/summary.json").read_text())


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("never", "no answer is right: try easier problems, a stronger model, or `rlcourse sft` first"),
        ("always", "every answer is right: there is nothing left to learn"),
        ("half", "every answer earns 0.5, whatever it says: check the task's judge"),
    ],
)
def test_a_run_without_signal_says_so_before_its_first_step(task, why):
    result, warnings = train(f"--task ours:{task}")
    assert result.exit_code == 0 and warnings["no_signal"]["step"] == 0
    assert why in warnings["no_signal"]["text"] and "asked: “" in warnings["no_signal"]["text"]  # a real answer
    said = " ".join(result.output.split())
    assert said.count("so there is no gradient") == 1 and "1 warning is above and in warnings.jsonl" in said
    assert summary()["steps_that_changed_weights"] == 0 and "changed in 0 of 4 steps" in result.output


def test_a_run_that_loses_its_signal_says_so_after_three_steps():
    # The evaluation has no groups to look at.
    result, warnings = train("--task ours:never --pass-k 0 --num-prompts 8 --num-generations 2")
    assert result.exit_code == 0 and warnings["no_signal"]["step"] == 3


def test_right_answers_in_a_form_that_is_not_rewarded_are_named_before_the_first_step():
    _, warnings = train("--task ours:words")
    text = warnings["unreadable"]["text"]
    assert warnings["unreadable"]["step"] == 0 and "but only 0.0% write it in the form" in text
    assert "--reward-parser lenient" in text and "--examples 2" in text


def test_most_answers_cut_off_is_named_before_the_first_step():
    _, warnings = train("--max-new-tokens 3")
    assert warnings["cut_off"]["step"] == 0 and "after 3 tokens" in warnings["cut_off"]["text"]


def test_a_reward_that_is_not_finite_ends_the_run_before_it_learns_and_does_not_blame_the_learning_rate():
    result, _ = train("--task ours:broken")
    assert result.exit_code == 2 and "The judge of task" in result.stderr
    assert "fix it" in result.stderr and "--lr" not in result.stderr
    assert not Path("runs/run").exists()


def test_a_reward_for_form_alone_is_named_within_five_steps():
    """A bonus for any `#### NUMBER`, where next to nothing is right: a real model collapsed onto `#### 104`."""
    _, warnings = train("--reward-format 0.5", steps=1)
    assert warnings["form"]["step"] <= 1 and "of the reward goes to wrong answers" in warnings["form"]["text"]


@pytest.mark.parametrize(("right", "kinds"), [(False, {"form"}), (True, set())])
def test_a_reward_for_form_alone_is_named_after_a_step_too(right, kinds):
    assert set(watch.after_step([STEP], [answer("#### 104", right)], [0.5], make_config(reward_format=0.5))) == kinds


@pytest.mark.parametrize("preset", ["laptop", "a10g", "h200"])
def test_no_preset_pays_for_form_alone(preset):
    task = load_task("minigsm").with_settings(make_config(preset))
    assert [task.verify(text, "12").reward for text in ("#### 104", "I guess", "#### 12")] == [0, 0, 1]


def test_a_learning_rate_of_zero_is_named():
    result, warnings = train("--lr 0 --num-prompts 16")
    assert warnings["no_update"]["step"] == 3 and "changed in 0 of 4 steps" in result.output


def test_a_healthy_run_warns_of_nothing_and_counts_its_steps():
    result, warnings = train("--num-prompts 8 --eval-every 2 --eval-validation 4", steps=4)
    assert result.exit_code == 0 and not warnings and "changed in all 4 steps" in result.output
    assert "\nStep 4 of 4: validation accuracy " in result.stdout and result.stderr == ""  # no bar for a log file
    assert summary()["warnings"] == {} and set(summary()["seconds"]) == {"starting", "evaluation", "steps", "saving"}


STEP = {"groups_without_signal": 0.5, "truncated": 0.0, "grad_norm": 1.0, "lr": 1e-6, "reward": 0.1, "length": 9}
STEP |= {"entropy": 1.0, "mismatch_mean": 0.0, "mismatch_max": 6.6}


@pytest.mark.parametrize(
    ("metrics", "correction", "kinds"),
    [
        ({"groups_without_signal": 0.97}, "off", {"little_signal"}),
        ({"groups_without_signal": 0.72}, "off", set()),
        ({"mismatch_mean": 0.03}, "off", {"mismatch"}),
        ({"mismatch_mean": 0.03}, "token", set()),  # it is corrected for
        ({"mismatch_mean": 0.007}, "off", set()),
    ],
)
def test_groups_that_mostly_agree_and_a_sampler_that_is_another_policy_are_named(metrics, correction, kinds):
    config = make_config(num_prompts=32, sampler_correction=correction)
    assert set(watch.after_step([STEP | metrics] * 3, [answer("7")], [0.0], config)) == kinds


def answer(text: str, right: bool = False) -> Answer:
    return Answer(Problem("1+1?", "", "2"), text, 5, True, Judgement(right, {"right": float(right)}, 0.2, "wrong"))


@pytest.mark.parametrize(("shown", "lenient"), itertools.product((0, 2), (0.0, 1.0)))
def test_examples_are_advised_to_runs_that_show_none(shown, lenient):
    wrong = answer("4")
    wrong = replace(
        wrong, verdict=replace(wrong.verdict, metrics={"accuracy": 0.0, "accuracy_lenient": lenient}, reward=0.0)
    )
    text = watch.no_signal("None", [wrong], [[0.0]], make_config(examples=shown))["no_signal"]
    assert ("--examples 2" in text) == (not shown) and ("--reward-parser lenient" in text) == bool(shown and lenient)


@pytest.mark.parametrize("reward", [float("nan"), 1e30, "1.0", None, torch.ones(2)], ids=str)
def test_a_reward_that_is_no_finite_number_is_refused(reward):
    one = answer("2")
    watch.check_rewards([torch.ones(())], [one], "judge")
    with pytest.raises(ValueError, match="The judge gave an answer a reward of "):
        watch.check_rewards([reward], [one], "judge")
    if reward is not None:  # a metric may be missing
        with pytest.raises(ValueError, match="a right of "):
            watch.check_rewards([1.0], [replace(one, verdict=replace(one.verdict, metrics={"right": reward}))], "judge")


@pytest.mark.parametrize(
    ("length", "entropy", "reward", "kinds"),
    [
        (5, 0.3, 0.2, {"length_collapse"}),
        (120, 0.01, 0.2, {"entropy_collapse"}),
        (5, 0.01, 0.01, set()),  # the reward does not rise
        (49, 0.03, 0.2, set()),  # shorter and surer, as runs that learn are
    ],
)
def test_a_collapse_is_answers_that_shrink_or_stop_varying_while_the_reward_rises(length, entropy, reward, kinds):
    begin = STEP | {"length": 120, "entropy": 0.4, "reward": 0.02}
    steps = [begin] * 5 + [begin | {"length": length, "entropy": entropy, "reward": reward}] * 3
    found = watch.after_step(steps, [answer("#### 104")] * 8, [0.2, 0.0] * 4, make_config())
    assert set(found) == kinds


def sft(options: str):
    lines = [json.dumps({"prompt": p.question, "answer": p.answer}) for p in load_task("minigsm").train[:24]]
    Path("data.jsonl").write_text("\n".join(lines))
    command = "sft --data data.jsonl --task minigsm@few --steps 4 --batch-size 4 --eval-every 0 --eval-problems 12 "
    result = CliRunner().invoke(cli.app, (command + f"--name run {options}").split(), env={"COLUMNS": "4000"})
    return result, [line["kind"] for line in read_lines(WARNINGS)]


@pytest.mark.parametrize(
    ("options", "kind"),
    [("--lr 0", "no_update"), ("--max-new-tokens 3", "cut_off"), ("--lr 0.5 --warmup-steps 0", "diverging")],
)
def test_fine_tuning_that_does_nothing_or_harm_says_so(options, kind):
    result, kinds = sft(options)
    assert Path("runs/run/curve.png").stat().st_size > 1000
    assert kind in kinds and f"changed in {'0 of' if kind == 'no_update' else 'all'} 4 steps" in result.output


def test_fine_tuning_warns_of_data_that_is_known_and_of_data_that_is_memorized():
    steps = [{"loss": 0.001, "grad_norm": 1.0, "lr": 1e-3}] * 3
    assert set(fine_tuning.after_step(steps, make_config())) == {"known"}
    assert set(fine_tuning.after_evaluation([0.5, 0.3, 0.4], [], make_config())) == {"overfit"}
    assert fine_tuning.after_evaluation([0.5, 0.3, 0.31], [], make_config()) == {}


def test_worked_examples_come_before_the_question_and_do_not_train():
    task = load_task("minigsm")
    shown = task.with_settings(make_config(examples=2))
    assert shown.examples == tuple(task.train[:2]) and shown.train == task.train[2:] and shown.test == task.test

    class Recorder:
        def prompt(self, question, instruction, examples):
            return question, instruction, examples

    asked, _, examples = shown.prompt(shown.test[0], Recorder())
    assert asked == shown.test[0].question and examples == [(p.question, p.answer) for p in task.train[:2]]
    with pytest.raises(ValueError, match="no 2 worked answers"):
        MathTask("bare", "", [Problem("?", "", "1")] * 4, [], []).with_settings(make_config(examples=2))


def test_a_dry_run_counts_every_evaluation_of_the_run(monkeypatch):
    """At one second per batch of 256 greedy answers, and two for what compiles first."""
    took = iter([2.0, 1.0, 1.0])
    monkeypatch.setattr(preview, "answer_problems", lambda *_: [[answer("7")]])
    monkeypatch.setattr(preview, "seconds", lambda call, _: call() or next(took))
    config = make_config(eval_problems=1000, pass_k=8, eval_every=50, eval_validation=256, steps=350)
    trainer = SimpleNamespace(config=config, task=load_task("minigsm"), policy=None, engine=None, device=None)
    _, total = preview.evaluation_seconds(trainer)
    assert total == pytest.approx(1 + 2 * 1000 / 256 + 2 * 64 / 32 + 8)  # compilation, tests, pass@8, 8 validations


OF_ALL = "reward", "groups with signal", "12 steps of", "minutes in all", "An answer ends at '<|im_end|>'"


@pytest.mark.parametrize(
    ("task", "measures"),
    [("minigsm@few", ("accuracy (rewarded)", "accuracy lenient")), ("backwards:task", ("right", "in place"))],
)
def test_a_dry_run_shows_what_answers_earn_and_how_long_the_run_takes(task, measures, tmp_path):
    page = (Path(__file__).parents[1] / "docs/your-own-task.md").read_text()
    (tmp_path / "backwards.py").write_text(page.split("```python\n")[1].split("```")[0])
    command = f"train {SMALL} --task {task} --steps 12 --dry-run"
    result = CliRunner().invoke(cli.app, command.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 0 and not result.stderr and not Path("runs").exists(), result.output
    assert all(text in result.output for text in (*OF_ALL, *(f"│ {name} " for name in measures)))


@pytest.mark.parametrize(
    ("dtype", "engine", "exact", "says"),
    [("float32", "fast", False, False), ("bfloat16", "fast", True, False), ("bfloat16", "fast", False, True),
     ("float32", "vllm", False, True)],
)  # fmt: skip
def test_a_run_says_where_engine_and_trainer_round_differently(dtype, engine, exact, says, capsys):
    watch.warn_of_mismatch(make_config(dtype=dtype, engine=engine), exact, torch.device("cpu"))
    said = "Engine and trainer round differently on cpu: `mismatch_mean` in metrics.jsonl says by how much"
    assert (said in capsys.readouterr().out) == says
