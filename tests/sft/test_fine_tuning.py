"""A run of fine-tuning as a whole, on a tiny model: what it computes, what it leaves, how it stops and goes on."""

import copy
import json
from pathlib import Path

import pytest
import torch
import toy
from policies import DEVICE, BruteForce
from toy import assert_same_run, lines, power_cut, without_picture
from transformers import AutoModelForCausalLM

from rlcourse.checkpoint import latest_checkpoint
from rlcourse.files import read_lines
from rlcourse.policy import load_policy
from rlcourse.runs import new_run
from rlcourse.sft import trainer
from rlcourse.sft.config import make_config
from rlcourse.sft.trainer import FineTuning, fine_tune, resume
from rlcourse.tasks import MathTask, Problem

TINY = {"batch_size": 5, "micro_batch_tokens": 60, "max_length": 60, "logprob_chunk": 16, "steps": 7, "lr": 1e-2}
TINY |= {"warmup_steps": 2, "eval_every": 3, "eval_examples": 3, "save_every": 3}
TINY |= {"name": "run", "device": "cpu"}  # what a resumed run repeats to the last digit
LORA = {"lora_rank": 2, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Answers of very different lengths, so that packs, rows and micro-batches differ from step to step."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    records = [{"prompt": f"What is {n}?", "answer": "+".join("1" * (1 + n % 9)) + f"={n}"} for n in range(33)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def tiny(model_folder, data, tmp_path, monkeypatch):
    without_picture(monkeypatch)
    return TINY | {"model": model_folder, "data": data, "output": str(tmp_path)}


# What a step computes


def loss_alone(model, examples) -> torch.Tensor:
    """The mean of -log p over all answer tokens, each example by itself, all logits at once."""
    losses = []
    for example in examples:
        ids = example.ids.long().to(DEVICE)
        distribution = model(ids[None]).logits[0].log_softmax(-1)
        losses += [-distribution[t - 1, ids[t]] for t in range(1, len(ids)) if example.learned[t]]
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": False}, {"batch_size": 30, "micro_batch_tokens": 1}, LORA],
    ids=str,
)
def test_a_step_is_adamws_with_the_gradient_of_the_mean_loss(options, tiny):
    """Two steps, written out with plain transformers in float64."""
    config = make_config(**tiny | {"device": DEVICE, "warmup_steps": 0, "schedule": "constant", "lr": 1e-3} | options)
    training = FineTuning(new_run(config), torch.device(DEVICE))
    exact = copy.deepcopy(training.policy.model).double()
    learning = [p for p in exact.parameters() if p.requires_grad]
    assert len(learning) < len(list(exact.parameters())) or not config.lora_rank
    optimizer = torch.optim.AdamW(learning, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    order = copy.deepcopy(training.data_sampler)
    for _ in range(2):
        examples = order.sample(config.batch_size)
        expected = loss_alone(exact, examples)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        metrics, _ = training.train_step()
        training.step += 1
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert metrics["tokens"] == sum(len(e.ids) for e in examples)
        assert metrics["learned_tokens"] == sum(int(e.learned.sum()) for e in examples)
    for (name, ours), theirs in zip(training.policy.model.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4, msg=name)


def test_an_epoch_is_every_example_once(tiny, tmp_path):
    """30 of the 33 are learned."""
    config = make_config(**tiny | {"epochs": 2, "steps": None, "eval_every": 0, "save_every": 0, "lr": 0.0})
    assert fine_tune(config)["steps"] == 12
    epoch = [line["epoch"] for line in lines(tmp_path / "run")["metrics"]]
    assert epoch == pytest.approx([(i + 1) * 5 / 30 for i in range(12)])


def test_the_held_out_loss_is_that_of_the_examples_held_out(tiny):
    training = FineTuning(new_run(make_config(**tiny)), torch.device("cpu"))
    assert len(training.data.held_out) == 3
    with torch.no_grad():
        expected = loss_alone(copy.deepcopy(training.policy.model).double(), training.data.held_out)
    assert training.validate() == {"loss": pytest.approx(expected.item(), rel=1e-5)}


def test_the_task_is_answered_by_the_policy_as_it_is_then(tiny, tmp_path, monkeypatch):
    problems = [Problem(f"What is {n}?", "#### 1", "1") for n in range(4)]
    engines = []

    class Engine(BruteForce):
        def __init__(self, policy):
            super().__init__(policy)
            self.asked = set()

        def generate(self, prompts, *others):
            texts = map(self.policy.tokenizer.decode, prompts)
            self.asked |= {text.split("user\n")[1].split("<|im_end|>")[0] for text in texts}
            return super().generate(prompts, *others)

    monkeypatch.setattr(trainer, "load_task", lambda name: MathTask("toy", "", [], problems, []))
    monkeypatch.setattr(trainer, "make_engine", lambda *a, **_: engines.append(Engine(a[0])) or engines[0])
    lenient = make_config(**tiny | {"task": "gsm8k", "eval_problems": 3, "max_new_tokens": 3, "steps": 2})
    summary = fine_tune(lenient)
    (engine,) = engines
    assert engine.asked == {f"What is {n}?" for n in range(3)}
    assert engine.slept == 2 and {"loss", "accuracy", "accuracy_lenient"} <= summary["before"].keys()
    evals = lines(tmp_path / "run")["evals"]
    assert [line["step"] for line in evals] == [0, 2] and evals[1] == {"step": 2} | summary["after"]


# How a run ends and goes on


@pytest.fixture(scope="module", params=[{}, LORA], ids=["all weights", "lora"])
def whole(request, model_folder, data, tmp_path_factory):
    """The options and the folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        without_picture(patch)
        fine_tune(make_config(**TINY | request.param | {"model": model_folder, "data": data, "output": str(output)}))
    return request.param, output / "run"


def test_a_run_that_dies_between_two_micro_batches_and_is_resumed_equals_an_uninterrupted_one(
    whole, tiny, tmp_path, monkeypatch
):
    options, folder = whole
    calls, original = [], trainer.summed_loss

    def dies(*arguments):
        if torch.is_grad_enabled():
            calls.append(len(read_lines(tmp_path / "run" / "metrics.jsonl")))
            if calls[-2:] == [4, 4]:  # the second micro-batch of step 5, the gradient of the first being there
                power_cut()
        return original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(toy.PowerCut):
        patch.setattr(trainer, "summed_loss", dies)
        fine_tune(make_config(**tiny | options))
    assert latest_checkpoint(tmp_path / "run").name == "step-000003" and len(lines(tmp_path / "run")["metrics"]) == 4
    torch.manual_seed(12345)
    resume(name="run", output=str(tmp_path))
    assert_same_run(tmp_path / "run", folder)


def test_a_finished_run_can_be_given_more_steps(tiny, tmp_path):
    assert fine_tune(make_config(**tiny | {"steps": 2}))["learned"] == 10
    resumed = resume(name="run", output=str(tmp_path), steps=4)
    assert (resumed["steps"], resumed["learned"]) == (4, 20)
    assert [line["step"] for line in lines(tmp_path / "run")["evals"]] == [0, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 4


def test_other_settings_and_other_data_are_refused_on_resuming(tiny, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(Path(tiny["data"]).read_text())
    fine_tune(make_config(**tiny | {"steps": 1, "data": str(path)}))
    with pytest.raises(ValueError, match=r"other settings \(lora_rank was 0, is 2\): resume with the same ones"):
        resume(name="run", output=str(tmp_path), lora_rank=2)
    path.write_text(path.read_text().replace("What is 7?", "What is 8?"))
    with pytest.raises(ValueError, match=r"^The data is not what .*/run had: bring that back, or start a new run\."):
        resume(name="run", output=str(tmp_path), steps=3)


def test_the_folder_holds_what_a_run_leaves(whole, model_folder):
    options, folder = whole
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step-00000{step}" for step in (6, 7)}
    assert [line["step"] for line in lines(folder)["evals"]] == [0, 3, 6, 7]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["examples"], summary["held_out"], summary["too_long"]) == (7, 30, 3, 0)
    assert summary["learned"] == 30  # 7 steps are more than an epoch
    assert summary["before"] != summary["after"] and summary["folder"] == str(folder)
    trained = AutoModelForCausalLM.from_pretrained(latest_checkpoint(folder), dtype=torch.float32)
    ours = load_policy(str(latest_checkpoint(folder))).model
    ids = torch.tensor([[5, 9, 40]])
    torch.testing.assert_close(trained(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)
    adapter = latest_checkpoint(folder) / "adapter_config.json"
    assert adapter.exists() == bool(options)
    if options:
        saved = json.loads(adapter.read_text())
        assert (saved["r"], saved["lora_alpha"], len(saved["target_modules"])) == (2, 32.0, 7)
