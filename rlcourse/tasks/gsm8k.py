"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168), from the hub or a local folder; and `minigsm`, which is embedded."""

import os
import re
from dataclasses import replace
from pathlib import Path

from rlcourse.hub import load_rows
from rlcourse.paths import data_folder
from rlcourse.tasks.jsonl import hold_out, problem_of, read_problems, read_train_and_test
from rlcourse.tasks.task import MathTask

DIR_VARIABLE = "RLCOURSE_GSM8K_DIR"
NAMED = f"--task gsm8k@FOLDER or {DIR_VARIABLE}"

INSTRUCTION = (
    "Solve the problem step by step. End your answer with a line that holds four hash signs, a space and the final "
    "number alone, without a unit:\n#### NUMBER"
)


def load(data_dir: str | None = None) -> MathTask:
    """The task: 6,961 problems to train on, 512 for validation (the last of the train file) and 1,319 to test, without
    the calculator annotations of worked answers (`48/2 = <<48/2=24>>24`).

    Reads train.jsonl and test.jsonl from `data_dir`, else from RLCOURSE_GSM8K_DIR, else loads `openai/gsm8k` through
    `datasets`. Raises FileNotFoundError for a missing file, ValueError for a line that cannot be used or too small a
    train file, ConnectionError if the hub cannot be read.
    """
    folder = data_dir or os.environ.get(DIR_VARIABLE)
    if folder:
        train, test = read_train_and_test(folder, f"in {NAMED}, or leave both out to use the hub")
    else:
        remedy = f"put train.jsonl and test.jsonl in a folder and name it in {NAMED}"
        splits = load_rows("openai/gsm8k", remedy, "main")
        train, test = ([problem_of(row) for row in splits[name]] for name in ("train", "test"))
    train, test = (
        [replace(p, answer=re.sub(r"<<[^<>]*>>", "", p.answer)) for p in problems] for problems in (train, test)
    )
    return MathTask("gsm8k", INSTRUCTION, *hold_out(train), test)


def load_minigsm(data_dir: str | None = None) -> MathTask:
    """The problems that ship, which `minigsm.py` made, or those of train, validation and test.jsonl in `data_dir`.
    Raises what `read_problems` does."""
    folder = data_folder() / "minigsm" if data_dir is None else Path(data_dir).expanduser()
    splits = (read_problems(folder / f"{split}.jsonl") for split in ("train", "validation", "test"))
    return MathTask("minigsm", "", *splits)
