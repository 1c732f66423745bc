"""GSM8K from small folders made here, from a stand-in for the hub, and the real data where a folder is named."""

import json
import os
from pathlib import Path

import datasets
import pytest

from rlcourse.tasks import load_task, overlaps
from rlcourse.tasks.gsm8k import load
from rlcourse.tasks.verify import Readings, extract_lenient, extract_strict, to_number, verify

REAL = os.environ.get("RLCOURSE_GSM8K_DIR")  # read before the fixture below unsets it


@pytest.fixture(autouse=True)
def no_folder_is_named(monkeypatch):
    monkeypatch.delenv("RLCOURSE_GSM8K_DIR", raising=False)


def rows(count: int, start: int = 0) -> list[dict]:
    return [
        {
            "question": f"Ann has {n} apples and buys {n} more. How many has she?",
            "answer": f"{n}+0=<<{n}+0={n}>>{n}, {n}+{n} = <<{n}+{n}={2 * n}>>{2 * n} apples.\n#### {2 * n:,}",
        }
        for n in range(start, start + count)
    ]


def write(folder: Path, train: list[dict], test: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, records in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "gsm8k", rows(20), rows(4, start=1000))


def check_small_task(task):
    """What `folder` holds: questions about n = 0 ... 19 to train on and about n = 1000 ... 1003 to test."""
    assert task.name == "gsm8k"
    assert [p.gold for p in task.train] == [str(2 * n) for n in range(18)]
    assert [p.gold for p in task.validation] == ["36", "38"]
    assert [p.gold for p in task.test] == ["2000", "2002", "2004", "2006"]
    assert task.test[0].question == "Ann has 1000 apples and buys 1000 more. How many has she?"
    assert task.test[0].answer == "1000+0=1000, 1000+1000 = 2000 apples.\n#### 2,000"


def test_a_folder_is_split_with_the_last_train_problems_for_validation(folder, monkeypatch):
    check_small_task(load_task(f"gsm8k@{folder}"))
    monkeypatch.setenv("RLCOURSE_GSM8K_DIR", str(folder))
    check_small_task(load())


def test_the_task_judges_worked_answers_and_asks_for_the_strict_form(folder):
    task = load(str(folder))
    assert all(task.verify(p.answer, p.gold).strict for p in task.test)
    assert task.verify(task.instruction.replace("NUMBER", "2000"), "2000").strict
    assert not task.verify(task.instruction, "2000").formatted


def test_problems_that_are_both_trained_on_and_tested_are_named(tmp_path):
    train = [*rows(18), *rows(2), *rows(1, start=2000)]  # the last two are for validation
    folder = write(tmp_path / "gsm8k", train, rows(4, start=17))
    of_validation, of_test = overlaps(load(str(folder))).values()
    assert of_validation.startswith("1 of 2 validation problems") and of_test.startswith("1 of 4 test prob")


def test_the_hub_is_asked_when_no_folder_is_named(folder, monkeypatch):
    real_load = datasets.load_dataset
    asked = []

    def from_local_files(*args):
        asked.append(args)
        files = {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
        return real_load("json", data_files=files, cache_dir=str(folder / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", from_local_files)
    check_small_task(load())
    assert asked == [("openai/gsm8k", "main")]


@pytest.mark.skipif(not REAL, reason="RLCOURSE_GSM8K_DIR does not name a folder of GSM8K")
class TestRealData:
    @pytest.fixture(scope="class")
    def task(self):
        return load(REAL)

    @pytest.fixture(scope="class")
    def raw(self):
        """Question to worked answer as the files have them, read without the package."""
        files = [Path(REAL) / name for name in ("train.jsonl", "test.jsonl")]
        records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        return {record["question"]: record["answer"] for record in records}

    def test_splits_are_whole_and_disjoint(self, task, raw):
        splits = [task.train, task.validation, task.test]
        assert [len(split) for split in splits] == [6961, 512, 1319]
        questions = [{problem.question for problem in split} for split in splits]
        assert set.union(*questions) == raw.keys()
        assert sum(map(len, questions)) == len(raw) == 8792

    def test_every_gold_answer_extracts_to_itself_strictly_and_leniently(self, task, raw):
        with_commas = 0
        for problem in task.train + task.validation + task.test:
            written = raw[problem.question].split("#### ")[1]
            with_commas += "," in written
            gold = written.replace(",", "")
            assert problem.gold == gold and to_number(written) == int(gold)
            for answer in (problem.answer, raw[problem.question]):
                assert extract_strict(answer) == extract_lenient(answer) == gold
            assert verify(problem.answer, written) == Readings(True, True, True, gold)
        assert with_commas == 93
