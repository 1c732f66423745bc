"""A run as a whole: what it leaves behind, how it stops and how it goes on."""
# ruff: noqa: F811 (fixtures of toy.py)

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
import toy
from policies import BruteForce, make_policy
from toy import TINY, TOY, assert_same_run, at_step, end_of, folder, fork, lines, tiny, use_the_toy, whole_run  # noqa: F401

from rlcourse import train as trainer
from rlcourse.checkpoint import latest_checkpoint, load_state
from rlcourse.config import make_config
from rlcourse.runs import RunFolder, read_lines
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.train import resume, train


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_the_toy(monkeypatch)


def test_a_run_killed_and_resumed_equals_an_uninterrupted_one_to_the_last_bit(whole_run, tiny, tmp_path):
    def work():
        RunFolder.log_step = at_step(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
        train(make_config(**tiny))

    assert end_of(fork(work)) == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 5  # more than the checkpoint has seen
    torch.manual_seed(12345)
    resume(name="run", output=str(tmp_path))
    assert_same_run(tmp_path / "run", whole_run)
    assert sum(line["grad_norm"] > 0 for line in lines(whole_run)["metrics"][3:]) >= 2  # there was something to learn


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_a_run_killed_at_random_moments_and_resumed_equals_an_uninterrupted_one(seed, whole_run, tiny, tmp_path):
    """Twice or more each, whatever it is doing; killed before its first checkpoint it starts anew. There is a
    checkpoint after each step, so that many are killed while they are saved."""
    tiny = tiny | {"save_every": 1}
    chance, run, kills = random.Random(seed), tmp_path / "run", 0
    seconds = json.loads((whole_run / "summary.json").read_text())["wall_seconds"]
    for _ in range(2 + seed % 2):
        begun = (run / "config.json").is_file() and any((run / "checkpoints").glob("step-??????"))
        if not begun:
            shutil.rmtree(run, ignore_errors=True)
        pid = fork(
            lambda begun=begun: resume(name="run", output=str(tmp_path)) if begun else train(make_config(**tiny))
        )
        time.sleep(chance.uniform(0.3, 1.1) * seconds)
        os.kill(pid, signal.SIGKILL)
        kills += end_of(pid) == -signal.SIGKILL
    begun = (run / "config.json").is_file() and any((run / "checkpoints").glob("step-??????"))
    print(f"seed {seed}: killed {kills} times, resumed from {latest_checkpoint(run).name if begun else 'the start'}")
    if begun:
        resume(name="run", output=str(tmp_path))
    else:
        shutil.rmtree(run, ignore_errors=True)
        train(make_config(**tiny))
    assert_same_run(run, whole_run)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("ppo", {"inner_epochs": 2, "minibatches": 2, "schedule": "cosine"}),  # value head, optimizer, random states
        ("dapo", {"kl_coef": 0.1}),  # uneven draws of problems; the reference is the first policy
        ("grpo", {"kl_coef": 0.1, "lora_rank": 2, "gradient_checkpointing": True}),  # an adapter; its base as reference
    ],
)
def test_a_run_that_dies_and_is_resumed_equals_an_uninterrupted_one(algorithm, options, tiny, tmp_path, monkeypatch):
    options = tiny | options | {"algorithm": algorithm, "steps": 4, "save_every": 2, "pass_k": 0, "lr": 1e-2}
    train(make_config(**options | {"output": str(tmp_path / "whole")}))
    with monkeypatch.context() as patch, pytest.raises(toy.PowerCut):
        patch.setattr(RunFolder, "log_step", at_step(3, toy.power_cut))
        train(make_config(**options))
    torch.manual_seed(12345)
    resume(name="run", output=str(tmp_path))
    assert_same_run(tmp_path / "run", tmp_path / "whole" / "run")
    if algorithm == "ppo":
        ours, theirs = (load_state(latest_checkpoint(tmp_path / x / "run"))["value_head"] for x in ("", "whole"))
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
        assert ours["output.weight"].any()


def test_a_finished_run_can_be_given_more_steps(whole_run, tiny, tmp_path):
    shutil.copytree(whole_run, tmp_path / "run")
    before = json.loads((whole_run / "summary.json").read_text())
    saved = tmp_path / "run" / "checkpoints" / "step-000007" / "trainer.pt"
    torch.save(torch.load(saved) | {"seconds": 5000.0}, saved)
    summary = resume(name="run", output=tiny["output"], steps=8)
    assert summary["steps"] == 8 and summary["before"] == before["before"]
    assert 5000 < summary["wall_seconds"] < 6000  # of both parts together
    assert lines(tmp_path / "run")["metrics"][:7] == lines(whole_run)["metrics"]
    assert [line["step"] for line in lines(tmp_path / "run")["evals"]] == [0, 2, 4, 6, 8]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 8


def test_a_second_ctrl_c_stops_at_once_and_saves_no_half_step(tiny, tmp_path, monkeypatch, capsys):
    original, steps = trainer.train_step, []

    def interrupted(*arguments):
        steps.append(arguments[-1])
        if arguments[-1] == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(make_config(**tiny))
    assert steps == [0, 1, 2, 3, 4]
    assert latest_checkpoint(tmp_path / "run").name == "step-000003"
    said = capsys.readouterr().out
    assert "Finishing this step" in said and "Stopped within step 5" in said


def test_ctrl_c_before_the_first_step_can_be_resumed(whole_run, tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "summarize", lambda answers: signal.raise_signal(signal.SIGINT))
        train(make_config(**tiny))
    assert latest_checkpoint(tmp_path / "run").name == "step-000000"
    resume(name="run", output=tiny["output"])
    assert_same_run(tmp_path / "run", whole_run)


# What a run leaves


def test_the_folder_holds_what_a_run_leaves_and_logs(whole_run, folder):
    assert sorted(path.name for path in (whole_run / "checkpoints").iterdir()) == ["step-000006", "step-000007"]
    expected = make_config(**TINY | {"model": folder, "output": str(whole_run.parent)}).to_dict()
    assert json.loads((whole_run / "config.json").read_text()) == expected
    assert (whole_run / "curve.png").read_text() == "7"
    logged = lines(whole_run)
    assert [line["step"] for line in logged["metrics"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["lr"] for line in logged["metrics"]] == pytest.approx([5e-4] + [1e-3] * 6)
    assert [line["step"] for line in logged["evals"]] == [0, 2, 4, 6]
    assert [line["step"] for line in logged["samples"]] == [step for step in range(1, 8) for _ in range(4)]


def test_the_summary_says_how_it_went(whole_run):
    summary = json.loads((whole_run / "summary.json").read_text())
    assert summary["eval_problems"] == 3 and summary["seed"] == 0 and summary["steps"] == 7
    assert 0 < summary["wall_seconds"] < 120 and summary["peak_memory_bytes"] > 10**8
    for when in ("before", "after"):
        samples = summary[when]["samples"]
        assert summary[f"accuracy_{when}"] == sum(sample["right"] for sample in samples) / 3
        assert {"pass@1", "pass@2", "accuracy_lenient"} <= summary[when].keys()
    assert summary["before"] != summary["after"]


def test_the_validation_is_on_the_validation_problems_and_the_test_on_those_of_the_test(tiny, monkeypatch):
    asked, original = [], BruteForce.generate

    def generate(self, prompts, *others):
        asked.append(sorted({self.policy.tokenizer.decode(prompt) for prompt in prompts}))
        return original(self, prompts, *others)

    monkeypatch.setattr(BruteForce, "generate", generate)
    train(make_config(**tiny | {"steps": 1, "eval_every": 1, "pass_k": 0}))
    test, validation = [p.question for p in TOY.test[:3]], [p.question for p in TOY.validation[:2]]
    training = [p.question for p in TOY.train]
    for texts, expected in zip(asked, [test, validation, None, validation, test], strict=True):
        questions = [text.split("user\n")[1].split("<|im_end|>")[0] for text in texts]
        assert sorted(questions) == sorted(expected) if expected else set(questions) <= set(training)


def test_the_engine_and_the_model_are_made_as_the_config_says(tiny, monkeypatch):
    made = []
    monkeypatch.setattr(trainer, "make_engine", lambda policy, *rest: made.append(rest) or BruteForce(policy))
    monkeypatch.setattr("rlcourse.trial.checkpoint_activations", lambda model: made.append("checkpointing"))
    monkeypatch.setattr(trainer, "compile_layers", lambda model: made.append("compiled"))
    monkeypatch.setattr(trainer, "collect", toy.power_cut)  # before anything is compiled
    monkeypatch.setattr("rlcourse.distributed.find_device", lambda config: torch.device("cpu"))
    options = {"compile": True, "gradient_checkpointing": True, "device": "auto", "dtype": "bfloat16"}
    with pytest.raises((toy.PowerCut, TypeError)):
        train(make_config(**tiny | options | {"engine": "fast", "cache_gb": 2.0, "sleep": True}))
    assert made[1:] == [("fast", torch.bfloat16, True, 64 + 4, 2.0, True), "checkpointing", "compiled"]


# What cannot work


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_prompt_tokens": 5}, r"Only 0 of 9 training problems have at most 5 prompt tokens, .*: raise"),
        ({"num_prompts": 10}, "There are 9 training problems, fewer than num_prompts 10: lower it"),
        ({"device": "auto", "dtype": "bfloat16"}, "bfloat16 needs: `rlcourse doctor`"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_cannot_work_leaves_no_run(settings, sentence, tiny, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        train(make_config(**tiny | settings))
    assert not (tmp_path / "run").exists()


def test_long_prompts_are_left_out(tiny, tmp_path):
    policy = make_policy()
    lengths = [len(policy.prompt(p.question)) for p in TOY.train]
    limit = min(lengths)
    assert lengths.count(limit) == 3
    train(make_config(**tiny | {"max_prompt_tokens": limit, "steps": 4, "eval_every": 0, "pass_k": 0}))
    asked = {line["question"] for line in lines(tmp_path / "run")["samples"]}
    assert asked == {p.question for p, n in zip(TOY.train, lengths, strict=True) if n <= limit}
    why = f"Left out 6 of 9 training problems, whose prompts have more than {limit} tokens: raise --max-prompt-tokens."
    assert read_lines(tmp_path / "run" / "warnings.jsonl")[0] == {"step": 0, "kind": "left_out", "text": why}


def test_the_seed_chooses_the_problems_and_the_samples(whole_run, tiny, tmp_path):
    for seed in (0, 1):
        torch.manual_seed(99 + seed)
        options = {"steps": 1, "eval_every": 0, "pass_k": 0, "save_every": 0, "seed": seed, "name": f"seed{seed}"}
        train(make_config(**tiny | options))
        asked = {line["question"] for line in lines(tmp_path / f"seed{seed}")["samples"]}
        assert asked == {p.question for p in PromptSampler(TOY.train, seed).sample(2)}
    first = lines(whole_run)["metrics"][:1]
    assert lines(tmp_path / "seed0")["metrics"] == first != lines(tmp_path / "seed1")["metrics"]
    assert lines(tmp_path / "seed0")["evals"] == []
    assert [path.name for path in (tmp_path / "seed0" / "checkpoints").iterdir()] == ["step-000001"]
