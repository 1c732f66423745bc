"""GSM8K: 8,792 grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168), from the hub or a local folder; and
`minigsm`, the embedded task in its format, with nothing to download."""

import os
import re
from dataclasses import replace
from pathlib import Path

from rlcourse.paths import data_folder
from rlcourse.tasks.jsonl import hold_out, problem_of, read_problems, read_train_and_test
from rlcourse.tasks.task import MathTask, Problem

DIR_VARIABLE = "RLCOURSE_GSM8K_DIR"
NAMED = f"--task gsm8k@FOLDER or {DIR_VARIABLE}"
VALIDATION = 512  # the last problems of the train file, held out from training

INSTRUCTION = (
    "Solve the problem step by step. End your answer with a line that holds four hash signs, a space and the final "
    "number alone, without a unit:\n#### NUMBER"
)


def load(data_dir: str | None = None) -> MathTask:
    """The task: 6,961 problems to train on, 512 for validation (the last of the train file) and 1,319 to test.

    Reads train.jsonl and test.jsonl from `data_dir`, else from the folder that RLCOURSE_GSM8K_DIR names, else loads
    `openai/gsm8k` through `datasets`. The calculator annotations of worked answers, as in `48/2 = <<48/2=24>>24`, are
    removed: a model should not write them.

    Raises FileNotFoundError if the folder or a file is missing, ValueError for a line that cannot be used or a train
    file too small to leave any problem for training, ConnectionError if the hub cannot be read.
    """
    folder = data_dir or os.environ.get(DIR_VARIABLE)
    if folder:
        train, test = read_train_and_test(folder, f"in {NAMED}, or leave both out to use the hub")
    else:
        from rlcourse.hub import load_rows

        remedy = f"put train.jsonl and test.jsonl in a folder and name it in {NAMED}"
        splits = load_rows("openai/gsm8k", remedy, "main")
        train, test = ([problem_of(row) for row in splits[name]] for name in ("train", "test"))
    train, validation = hold_out([without_annotations(problem) for problem in train], VALIDATION)
    return MathTask("gsm8k", INSTRUCTION, train, validation, [without_annotations(problem) for problem in test])


def load_minigsm(data_dir: str | None = None) -> MathTask:
    """The problems that ship, which `minigsm.py` made, or those in `data_dir`: train, validation and test.jsonl.

    Raises FileNotFoundError if the folder or a file is missing, ValueError for a line that cannot be used.
    """
    folder = data_folder() / "minigsm" if data_dir is None else Path(data_dir).expanduser()
    splits = (read_problems(folder / f"{split}.jsonl") for split in ("train", "validation", "test"))
    return MathTask("minigsm", "", *splits)


def without_annotations(problem: Problem) -> Problem:
    return replace(problem, answer=re.sub(r"<<[^<>]*>>", "", problem.answer))
