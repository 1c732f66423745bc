"""What `rlcourse publish` writes, loaded as its readers would load it; the card's numbers; what is refused."""

import json
import re
import shlex
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from rlcourse import cli, model_card, publish
from rlcourse import train as trainer
from rlcourse.paths import model_folder
from rlcourse.sft.config import SFTConfig
from rlcourse.tasks.verify import Readings

EMBEDDED = model_folder("embedded")
IDS = torch.tensor([[1, 5, 9, 40, 7, 12]])
TINY = "--lr 1e-2 --warmup-steps 0 --save-every 1 --eval-every 0 --eval-problems 4 --max-new-tokens 8 --device cpu"
TINY += " --algorithm reinforce --num-prompts 2 --num-generations 2 --pass-k 2"


def command(*arguments) -> str:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments) -> str:
    done = CliRunner().invoke(cli.app, ["publish", *map(str, arguments)])
    assert done.exit_code in (1, 2), (done.output, done.exception)
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.output
    return done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs: `model`, of two steps with a worked example; `adapter`, of one step on a copy of the embedded model."""
    place = tmp_path_factory.mktemp("somebody")
    shutil.copytree(EMBEDDED, place / "my-base")
    train = ["train", *TINY.split(), "--output", place]
    with patch.object(Readings, "reward", property(lambda self: float(self.right) - 1)):  # so that wrong ones teach
        command(*train, "--name", "model", "--steps", 2, "--examples", 1, "--max-prompt-tokens", 150)
        command(*train, "--name", "adapter", "--steps", 1, "--lora-rank", 2, "--model", place / "my-base")
    return place


@pytest.fixture
def copied(runs, tmp_path):
    """A function that copies the run `model` and changes its settings and summary."""

    def copy(name: str, summary: dict | None = None, **settings) -> Path:
        folder = shutil.copytree(runs / "model", tmp_path / name)
        for file, values in (("config.json", settings), ("summary.json", summary or {})):
            (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
        return folder

    return copy


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits.float()


def published(run: Path, to: Path) -> Path:
    command("publish", run, "--to", to)
    return to


def block(folder: Path, language: str) -> str:
    return re.search(rf"\n```{language}\n(.*?)\n```\n", (folder / "README.md").read_text(), re.S)[1]


def test_a_model_is_its_last_checkpoint(runs, tmp_path):
    folder = published(runs / "model", tmp_path / "new" / "mine")
    model = AutoModelForCausalLM.from_pretrained(folder)
    steps = [AutoModelForCausalLM.from_pretrained(runs / f"model/checkpoints/step-00000{n}") for n in (1, 2)]
    assert torch.equal(logits(model), logits(steps[1])) and not torch.equal(logits(model), logits(steps[0]))
    assert model.generation_config.eos_token_id == [2, 0] and model.dtype == torch.float32
    assert (folder / "curve.png").read_bytes() == (runs / "model/curve.png").read_bytes()
    assert not (folder / "trainer.pt").exists() and [path.name for path in folder.parent.iterdir()] == ["mine"]


def test_a_bfloat16_run_is_rounded_as_its_sampler_was(copied, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(published(copied("run", dtype="bfloat16"), tmp_path / "mine"))
    master = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-000002", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and torch.equal(logits(model), logits(master))


def test_an_adapter_loads_through_peft_and_names_its_base(runs, tmp_path):
    folder = published(runs / "adapter", tmp_path / "mine")
    bases = [AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32) for _ in range(3)]
    model = PeftModel.from_pretrained(bases[0], folder)
    checkpoint = PeftModel.from_pretrained(bases[1], runs / "adapter/checkpoints/step-000001")
    assert torch.equal(logits(model), logits(checkpoint)) and not torch.equal(logits(model), logits(bases[2]))
    assert model.peft_config["default"].base_model_name_or_path == "my-base"
    card = (folder / "README.md").read_text()
    assert "A LoRA adapter of rank 2 for `my-base`, trained" in card and "--model my-base" in card
    assert not any(str(runs) in file.read_text() for pattern in ("*.md", "*.json") for file in folder.glob(pattern))
    assert ModelCard.load(folder / "README.md").data.base_model is None  # the hub knows no such name


@pytest.mark.parametrize("name", ["model", "adapter"])
def test_the_card_repeats_the_first_answer_and_the_settings(name, runs, tmp_path, monkeypatch):
    folder, given = published(runs / name, tmp_path / "mine"), []
    config, summary = (json.loads((runs / name / f"{file}.json").read_text()) for file in ("config", "summary"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED, "my-base")  # where this reader has it
    with redirect_stdout(StringIO()) as printed:
        exec(block(folder, "python"), seen := {})
    assert seen["text"] == summary["prompt"] and seen["text"].count("<|im_start|>user") == 1 + (name == "model")
    assert printed.getvalue().rstrip("\n") == summary["after"]["samples"][0]["text"]
    monkeypatch.setattr(trainer, "train", lambda config, began: given.append(config.to_dict()))
    CliRunner().invoke(cli.app, shlex.split(block(folder, "bash"))[1:])
    of_reader = {"output": "runs", "name": None, "model": "my-base" if name == "adapter" else "embedded"}
    assert given == [config | of_reader]


def test_a_fine_tuned_model_is_asked_in_its_chat_template(runs, copied, tmp_path):
    run = copied("run", {"before": {"loss": 2.5}, "after": {"loss": 1.25}, "metrics": {}, "prompt": None})
    (run / "config.json").write_text(json.dumps(SFTConfig(steps=2, data="mine/sums.jsonl").to_dict()))
    card = (published(run, tmp_path / "mine") / "README.md").read_text()
    question = f"    '<|im_start|>user\\n'\n    '{publish.QUESTION}<|im_end|>\\n'\n    '<|im_start|>assistant\\n'"
    assert question in card and "was trained with this prompt" not in card
    assert "| loss | 2.500 | 1.250 |" in card and "rlcourse sft --data mine/sums.jsonl --steps 2\n" in card
    assert "supervised fine-tuning on `mine/sums.jsonl`, a file that isn't included: step 2 of 2." in card


def test_a_card_shows_a_task_of_ones_own_without_its_path(copied, tmp_path):
    card = (published(copied("run", task=f"minigsm@{tmp_path}/sums"), tmp_path / "mine") / "README.md").read_text()
    assert "on `minigsm@sums`, which isn't included: step 2" in card and str(tmp_path) not in card


def test_the_numbers_of_the_card_are_those_of_the_run(copied, tmp_path):
    before = {"problems": 400, "accuracy_lenient": 0.5, "accuracy": 0.25, "formatted": 1.0, "pass@2": 0.5}
    after = before | {"accuracy_lenient": 0.64, "accuracy": 0.36, "pass@2": 0.75}
    after |= {"samples": [{"question": "1+```?\n\nx", "gold": "2", "text": "3", "right": False}]}
    metrics = dict.fromkeys(("accuracy_lenient", "accuracy", "formatted"), ".1%")
    summary = {"before": before, "after": after, "metrics": metrics, "warnings": {"cut_off": "Too\nlong."}}
    run = copied("run", summary | {"seconds": {"steps": 90.0}, "wall_seconds": 120})
    card = ModelCard.load(published(run, tmp_path / "mine") / "README.md")
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("mit", "transformers", None)
    assert "\nMinutes: steps 1.5, total 2.0.\n\n**Warning:** Too long.\n" in card.text
    assert "| accuracy | 25.0% ± 2.2 | 36.0% ± 2.4 |\n| formatted | 100.0% | 100.0% |\n| pass@2 | 50.0% |" in card.text
    assert "\n    1+```?\n    \n    x\n\n**Wrong:**\n\n    3\n" in card.text


def test_seeds_are_averaged_and_only_seeds_may_differ(runs, copied, tmp_path):
    after = json.loads((runs / "model/summary.json").read_text())["after"]
    values = enumerate((0.5, 0.25, 0.3))
    places = [copied(f"s{n}", {"after": after | {"accuracy": value}}, seed=n) for n, value in values]
    command("publish", *places, "--to", tmp_path / "mine")
    card = (tmp_path / "mine/README.md").read_text()
    assert "after, mean of seeds 0, 1, 2 (min–max)" in card and "| 35.0% (25.0%–50.0%) |" in card
    to = "--to", tmp_path / "another"
    assert "differ in lr:" in refused(places[0], copied("lr", lr=0.5, seed=7), *to)
    assert "same seed" in refused(places[0], places[0], *to)
    assert "finished" in refused(places[0], copied("cut", {"steps": 1}, seed=8), *to)


def test_an_adapter_whose_base_nobody_else_has_comes_with_advice(runs, tmp_path):
    said = command("publish", runs / "adapter", "--to", tmp_path / "mine")
    assert f"base is only on this machine, in {runs / 'my-base'}: `rlcourse merge {runs / 'adapter'}" in said
    assert "only on this machine" not in command("publish", runs / "model", "--to", tmp_path / "other")


def test_a_run_that_went_on_and_stopped_says_so_and_has_no_numbers(copied, tmp_path):
    run = copied("run", {"steps": 1}, steps=30)
    assert "isn't finished: `rlcourse train --resume`" in command("publish", run, "--to", tmp_path / "mine")
    card = (tmp_path / "mine/README.md").read_text()
    assert "step 2 of 30. **The run stopped" in card and "## Results" not in card and publish.QUESTION in card
    assert not (tmp_path / "mine/curve.png").exists()


def test_what_does_not_load_as_the_checkpoint_is_not_published(runs, tmp_path, monkeypatch):
    def nudged(self, folder, save=PreTrainedModel.save_pretrained):
        self.get_input_embeddings().weight[:, 0] += 1e-3
        save(self, folder)
        self.get_input_embeddings().weight[:, 0] -= 1e-3

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", nudged)
    assert "nothing was published" in refused(runs / "model", "--to", tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def test_the_hub_gets_the_folder_and_the_card_its_name(runs, tmp_path, monkeypatch):
    hub, files = Mock(), set()
    hub.whoami.return_value = {"name": "me"}
    hub.upload_folder = lambda repo_id, folder_path, **_: files.update({path.name for path in folder_path.iterdir()})
    monkeypatch.setattr(publish, "HfApi", lambda: hub)
    assert "me/small" in command("publish", runs / "model", "--hub", "small", "--to", tmp_path / "mine")
    hub.create_repo.assert_called_once_with("me/small", exist_ok=True)
    assert files == {path.name for path in (tmp_path / "mine").iterdir()} > {"README.md", "model.safetensors"}
    assert 'from_pretrained("me/small")' in (tmp_path / "mine/README.md").read_text()
    hub.whoami.side_effect = OSError("no route")
    assert "hf auth login" in refused(runs / "model", "--hub", "small", "--to", tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_refusals(runs, copied, tmp_path):
    to = "--to", tmp_path / "mine"
    assert "There is no file" in refused(tmp_path / "nothing", *to)
    assert "isn't the folder of a run" in refused(runs / "model/checkpoints/step-000002", *to)
    shutil.rmtree(copied("empty") / "checkpoints")
    assert "before its first checkpoint" in refused(tmp_path / "empty", *to)
    assert "not an empty folder" in refused(runs / "model", "--to", runs)
    assert not (tmp_path / "mine").exists()


def test_the_license_is_that_of_the_bases_card_or_file(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "snapshot_download", lambda model, allow_patterns: tmp_path)
    assert model_card.license_of("maker/base") == model_card.license_of(str(tmp_path)) == ({}, None)
    (tmp_path / "LICENSE").write_text("Terms")
    assert model_card.license_of("maker/base")[0]["license"] == "other"
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: llama\n---\nA model.")
    assert model_card.license_of(str(tmp_path))[0] == {"license": "other", "license_name": "llama"}
    card = ModelCard.load(published(copied("run", model="maker/base"), tmp_path / "mine") / "README.md")
    assert (card.data.base_model, card.data.license_name) == ("maker/base", "llama")
    assert (tmp_path / "mine/LICENSE").read_text() == "Terms"
