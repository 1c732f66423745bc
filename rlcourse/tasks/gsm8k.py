"""GSM8K: 8,792 grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168), from the hub or a local folder."""

import os
import re
from dataclasses import replace
from pathlib import Path

from rlcourse.hub import hub_or_cache
from rlcourse.tasks.jsonl import gold_of, read_problems
from rlcourse.tasks.task import MathTask, Problem

DIR_VARIABLE = "RLCOURSE_GSM8K_DIR"
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
    train, test = _from_folder(folder) if folder else _from_hub()
    if len(train) <= VALIDATION:
        raise ValueError(
            f"GSM8K needs more than {VALIDATION} train problems, not {len(train)}: "
            f"the last {VALIDATION} are held out for validation."
        )
    return MathTask("gsm8k", INSTRUCTION, train[:-VALIDATION], train[-VALIDATION:], test)


def _from_folder(folder: str) -> tuple[list[Problem], list[Problem]]:
    files = [Path(folder).expanduser() / name for name in ("train.jsonl", "test.jsonl")]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"There is no {' and no '.join(missing)}: name a folder with GSM8K's train.jsonl and test.jsonl "
            f"in --task gsm8k@FOLDER or {DIR_VARIABLE}, or leave both out to load it from the Hugging Face hub."
        )
    train, test = ([_without_annotations(problem) for problem in read_problems(file)] for file in files)
    return train, test


def _from_hub() -> tuple[list[Problem], list[Problem]]:
    import datasets

    try:
        with hub_or_cache():
            splits = datasets.load_dataset("openai/gsm8k", "main")
    except Exception as error:  # without a network it may be any of a dozen, from three libraries
        raise ConnectionError(
            f"GSM8K could not be loaded from the Hugging Face hub ({type(error).__name__}): check the network, or put "
            f"train.jsonl and test.jsonl in a folder and name it in --task gsm8k@FOLDER or {DIR_VARIABLE}."
        ) from error
    train, test = (
        [_without_annotations(Problem(row["question"], row["answer"], gold_of(row["answer"]))) for row in splits[name]]
        for name in ("train", "test")
    )
    return train, test


def _without_annotations(problem: Problem) -> Problem:
    return replace(problem, answer=re.sub(r"<<[^<>]*>>", "", problem.answer))
