"""What `rlcourse publish` writes, loaded as its readers would load it; the card's numbers; what is refused."""

import json
import re
import shlex
import shutil
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner

from rlcourse import cli, model_card, origins, publish, trainer
from rlcourse.config import make_config
from rlcourse.paths import model_folder
from rlcourse.sft import trainer as fine_tuning

EMBEDDED = model_folder("embedded")
SHORT = "--lr 1e-2 --warmup-steps 0 --steps 2 --save-every 1 --eval-every 0 --eval-problems 4 --max-new-tokens 8"
LEARNS = "--algorithm reinforce --reward-neither -1 --reward-format -1"  # from whatever it samples
TINY = f"{SHORT} {LEARNS} --num-prompts 2 --num-generations 2 --pass-k 2 --pass-k-problems 2"
IDS = torch.tensor([[1, 5, 9, 40, 7, 12]])


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
    """Runs of two steps: `model`; `adapter`, over a copy of the embedded model in a folder of the user's; `tuned`."""
    place = tmp_path_factory.mktemp("somebody")
    shutil.copytree(EMBEDDED, place / "my-base")
    output = ["--output", place, "--device", "cpu", "--name"]
    command("train", *TINY.split(), *output, "model")
    command("train", *TINY.split(), *output, "adapter", "--lora-rank", 2, "--model", place / "my-base")
    command("sft", *SHORT.split(), *output, "tuned", "--batch-size", 2, "--eval-examples", 4)
    return place


@pytest.fixture
def copied(runs, tmp_path):
    """A function that copies a run, and changes settings and the summary."""

    def copy(run: str, new: str, summary: dict | None = None, **settings) -> Path:
        shutil.copytree(runs / run, tmp_path / new)
        for file, values in (("config.json", settings), ("summary.json", summary or {})):
            path = tmp_path / new / file
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return tmp_path / new

    return copy


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits.float()


def published(runs, name: str, to: Path) -> Path:
    command("publish", runs / name, "--to", to)
    return to


def block(folder: Path, language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]


def test_a_model_is_its_last_checkpoint(runs, tmp_path):
    folder = published(runs, "model", tmp_path / "new" / "mine")
    model = AutoModelForCausalLM.from_pretrained(folder)
    steps = [AutoModelForCausalLM.from_pretrained(runs / f"model/checkpoints/step-00000{n}") for n in (1, 2)]
    assert torch.equal(logits(model), logits(steps[1])) and not torch.equal(logits(model), logits(steps[0]))
    assert model.generation_config.eos_token_id == [2, 0] and model.dtype == torch.float32
    ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (folder, EMBEDDED))
    assert ours.chat_template == theirs.chat_template and ours.get_vocab() == theirs.get_vocab()
    assert (folder / "curve.png").read_bytes() == (runs / "model/curve.png").read_bytes()
    assert not (folder / "trainer.pt").exists() and [path.name for path in folder.parent.iterdir()] == ["mine"]


def test_a_model_of_a_bfloat16_run_is_rounded_as_its_sampler_was(copied, tmp_path):
    run = copied("model", "run", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(published(tmp_path, "run", tmp_path / "mine"))
    master = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step-000002", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and torch.equal(logits(model), logits(master))
    assert "The weights are in bfloat16" in (tmp_path / "mine/README.md").read_text()


def test_an_adapter_loads_through_peft_and_names_its_base(runs, tmp_path):
    folder = published(runs, "adapter", tmp_path / "mine")
    model, expected, other = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32), place)
        for place in (folder, *(runs / f"adapter/checkpoints/step-00000{n}" for n in (2, 1)))
    )
    assert torch.equal(logits(model), logits(expected)) and not torch.equal(logits(model), logits(other))
    assert model.peft_config["default"].base_model_name_or_path == "my-base"
    card = (folder / "README.md").read_text()
    assert "a LoRA adapter of rank 2 for `my-base`, a local folder" in card and "--model my-base" in card
    assert not any(str(runs) in file.read_text() for pattern in ("*.md", "*.json") for file in folder.glob(pattern))
    assert ModelCard.load(folder / "README.md").data.base_model is None  # the hub knows no such name


@pytest.mark.parametrize("name", ["model", "adapter", "tuned"])
def test_the_code_of_the_card_answers_its_question(name, runs, tmp_path, monkeypatch):
    folder = published(runs, name, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED, "my-base")  # where this reader has it
    seen = {}
    with redirect_stdout(StringIO()):
        exec(block(folder, "python"), seen)
    assert seen["text"] == "<|im_start|>user\n" + publish.QUESTION + "<|im_end|>\n<|im_start|>assistant\n"
    assert torch.equal(seen["ids"][: seen["prompt"]["input_ids"].shape[1]], seen["prompt"]["input_ids"][0])


def test_the_numbers_of_the_card_are_those_of_the_run(copied, tmp_path):
    before = {
        "problems": 400,
        "accuracy": 0.25,
        "accuracy_lenient": 0.5,
        "formatted": 1.0,
        "tokens": 9.0,
        "pass@2": 0.5,
    }
    after = before | {"accuracy": 0.36, "accuracy_lenient": 0.64, "pass@2": 0.75}
    after |= {"samples": [{"question": "1+```?", "gold": "2", "text": "3", "right": False}]}
    copied("model", "run", {"before": before, "after": after}, pass_k_problems=100)
    card = ModelCard.load(published(tmp_path, "run", tmp_path / "mine") / "README.md")
    names = ("accuracy", "accuracy_lenient", "formatted", "pass@2")
    assert {r.metric_type: r.metric_value for r in card.data.eval_results} == {name: after[name] for name in names}
    assert {(r.dataset_name, r.dataset_split) for r in card.data.eval_results} == {("minigsm", "test")}
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("mit", "transformers", None)
    assert "| 400 test problems | before | after |" in card.text
    assert "| accuracy, strict reading | 25.0% ± 2.2 | 36.0% ± 2.4 |" in card.text
    assert "| accuracy, lenient reading | 50.0% ± 2.5 | 64.0% ± 2.4 |" in card.text
    assert "| formatted | 100.0% | 100.0% |" in card.text and "| pass@2 | 50.0% ± 5.0 | 75.0% ± 4.3 |" in card.text
    assert "````text\n1+```?\n````\n\n**Answer 1: wrong, 2 is right**\n\n```text\n3\n```" in card.text


def test_seeds_are_averaged_and_only_seeds_may_differ(runs, copied, tmp_path):
    after = json.loads((runs / "model/summary.json").read_text())["after"]
    places = [
        copied("model", f"s{n}", {"after": after | {"accuracy": x}}, seed=n) for n, x in enumerate((0.5, 0.25, 0.3))
    ]
    command("publish", *places, "--to", tmp_path / "mine")
    card = ModelCard.load(tmp_path / "mine/README.md")
    assert "after, mean of seeds 0, 1, 2 (min–max)" in card.text and "| 35.0% (25.0%–50.0%) |" in card.text
    assert card.data.eval_results[0].metric_value == 0.5
    to = "--to", tmp_path / "another"
    assert "differs from" in (said := refused(places[0], copied("model", "lr", lr=0.5, seed=7), *to)) and " lr" in said
    assert "same seed" in refused(places[0], places[0], *to)
    assert "isn't finished" in refused(places[0], copied("model", "cut", {"steps": 1}, seed=8), *to)


@pytest.mark.parametrize("name", ["model", "adapter", "tuned"])
def test_the_command_of_the_card_gives_the_settings(name, runs, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(trainer, "train", given.append)
    monkeypatch.setattr(fine_tuning, "fine_tune", given.append)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED, "my-base")
    CliRunner().invoke(cli.app, shlex.split(block(published(runs, name, tmp_path / "mine"), "bash"))[1:])
    saved = json.loads((runs / name / "config.json").read_text())
    for of_run in ("output", "name", "model"):
        saved.pop(of_run)
    assert len(given) == 1 and given[0].to_dict().items() >= saved.items()
    assert (given[0].output, given[0].name) == ("runs", None)


def test_the_command_names_preset_and_algorithm_once_and_quotes(copied):
    own = {"lora_targets": "a b", "compile": True, "judge": "http://box/v1", "judge_model": "judge"}
    run = publish.read_run(copied("model", "run", **make_config("kernels", algorithm="dapo", **own).to_dict()))
    words = "--lora-targets 'a b' --judge http://HOST:PORT --judge-model judge --compile"
    assert model_card.repeat_command(run) == f"rlcourse train --preset kernels --algorithm dapo {words}"


def test_a_run_that_went_on_and_stopped_says_so_and_has_no_numbers(copied, tmp_path):
    run = copied("model", "run", {"steps": 1}, steps=30)
    said = command("publish", run, "--to", tmp_path / "mine")
    assert f"`rlcourse train --resume --output {tmp_path} --name run` goes on" in said
    card = ModelCard.load(tmp_path / "mine/README.md")
    assert "**The run stopped at step 2 of 30" in card.text and "## Results" not in card.text
    assert card.data.eval_results is None and not (tmp_path / "mine/curve.png").exists()


def without_template(self, folder, save=PreTrainedTokenizerBase.save_pretrained, **options):
    save(self, folder, **options)
    (Path(folder) / "chat_template.jinja").unlink()


def without_end(self, folder, save=GenerationConfig.save_pretrained, **options):
    save(GenerationConfig(eos_token_id=5), folder, **options)


def nudged(self, folder, save=PreTrainedModel.save_pretrained, **options):
    self.get_input_embeddings().weight[5, 0] += 1e-3
    save(self, folder, **options)
    self.get_input_embeddings().weight[5, 0] -= 1e-3


@pytest.mark.parametrize(
    ("kind", "save", "what"),
    [
        (PreTrainedTokenizerBase, without_template, "chat template"),
        (GenerationConfig, without_end, "end tokens"),
        (PreTrainedModel, nudged, "logits"),
    ],
)
def test_what_does_not_load_as_the_checkpoint_is_not_published(kind, save, what, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "QUESTION", "".join(map(chr, range(33, 127))))  # so that each token counts
    monkeypatch.setattr(kind, "save_pretrained", save)
    assert f"{what}): nothing was published" in refused(runs / "model", "--to", tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


class Hub:
    """Keeps what it is asked to."""

    def __init__(self):
        self.made, self.files, self.error = [], {}, None

    def whoami(self):
        if self.error:
            raise self.error
        return {"name": "me"}

    def create_repo(self, name, exist_ok):
        self.made.append((name, exist_ok))

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.files[repo_id] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


def test_the_hub_gets_the_folder_and_the_card_its_name(runs, tmp_path, monkeypatch):
    hub = Hub()
    monkeypatch.setattr(publish, "HfApi", lambda: hub)
    assert "me/small" in command("publish", runs / "model", "--hub", "small", "--to", tmp_path / "mine")
    assert hub.made == [("me/small", True)]
    assert hub.files == {"me/small": {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}}
    assert b'from_pretrained("me/small")' in hub.files["me/small"]["README.md"]
    hub.error = LocalTokenNotFoundError("none")
    assert "hf auth login" in refused(runs / "model", "--hub", "small")
    hub.error = OSError("no route")
    assert "check the network" in refused(runs / "model", "--hub", "small", "--to", tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_refusals(runs, copied, tmp_path):
    to = "--to", tmp_path / "mine"
    assert "--to FOLDER, --hub NAME" in refused(runs / "model")
    assert "There is no file" in refused(tmp_path / "nothing", *to)
    assert "isn't the folder of a run" in refused(runs / "model/checkpoints/step-000002", *to)
    shutil.rmtree(copied("model", "empty") / "checkpoints")
    assert "has no checkpoint" in refused(tmp_path / "empty", *to)
    assert "not an empty folder" in refused(runs / "model", "--to", runs)
    assert "USER/NAME" in refused(runs / "model", "--hub", "a//b")
    assert not (tmp_path / "mine").exists()


def test_the_license_is_that_of_the_base_and_of_what_it_came_from(runs, tmp_path, monkeypatch):
    assert origins.license_of(str(runs / "model/checkpoints/step-000002"))[0] == {"license": "mit"}  # of embedded
    assert origins.license_of(str(runs / "my-base")) == ({}, None)
    (tmp_path / "LICENSE").write_text("\n   Apache License\n")
    assert origins.license_of(str(tmp_path)) == ({"license": "apache-2.0"}, tmp_path / "LICENSE")
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: llama\n---\nA model.")
    monkeypatch.setattr(origins, "hub_or_cache", nullcontext)
    monkeypatch.setattr(origins, "hf_hub_download", lambda model, name: tmp_path / name)
    for base in (str(tmp_path), "meta/llama"):
        assert origins.license_of(base) == ({"license": "other", "license_name": "llama"}, tmp_path / "LICENSE")
    assert origins.lineage("meta/llama") == ["meta/llama"] and origins.is_on_hub("meta/llama")


def test_the_base_on_the_hub_is_in_the_metadata_but_of_an_adapter_only_its_own(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(origins, "find_file", lambda model, name: None)
    copied("model", "run", model="maker/base")
    card = ModelCard.load(published(tmp_path, "run", tmp_path / "mine") / "README.md")
    assert card.data.base_model == "maker/base" and card.data.license is None
    assert "[`maker/base`](https://huggingface.co/maker/base), after 2 steps" in card.text and "unknown" in card.text
    adapter = copied("adapter", "adapter") / "checkpoints/step-000002/adapter_config.json"
    own = {"base_model_name_or_path": str(tmp_path / "run/checkpoints/step-000002")}
    adapter.write_text(json.dumps(json.loads(adapter.read_text()) | own))
    card = ModelCard.load(published(tmp_path, "adapter", tmp_path / "another") / "README.md")
    assert card.data.base_model is None and "`step-000002` was itself trained from [`maker/base`]" in card.text
