r"""Mathematics with answers in `\boxed{}`, from the hub or a local folder. DeepMath-103K to train on (He et al. 2025,
arXiv:2504.11456), MATH-500 to test (Hendrycks et al. 2021, arXiv:2103.03874, in the choice of Lightman et al. 2023,
arXiv:2305.20050)."""

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from rlcourse.hub import load_rows
from rlcourse.settings import MANY
from rlcourse.tasks.boxed import as_written, last_box
from rlcourse.tasks.jsonl import check_columns, hold_out, read_train_and_test, texts_of
from rlcourse.tasks.pool import Failed, JudgePool
from rlcourse.tasks.task import Attempt, MathTask, Problem
from rlcourse.tasks.verify import Readings, to_number

SECONDS, MEMORY_GB, PROCESSES = 5.0, 4.0, 8  # for one answer; processes at most
TAIL = 500  # characters in which an answer without a box is looked for
INSTRUCTION = r"Solve the problem step by step. Put your final answer within \boxed{}."
SOLUTIONS = {"solution", *(f"r1_solution_{n}" for n in (1, 2, 3))}  # worked answers, which nothing reads
EXAMPLE = '{"question": "...", "final_answer": "..."}'
HUB = (
    ("zwhe99/DeepMath-103K", "train", ["question", "final_answer", "difficulty"]),
    ("HuggingFaceH4/MATH-500", "test", ["problem", "answer", "level"]),
)


@dataclass(frozen=True)
class BoxedTask(MathTask):
    r"""The strict reading is the last `\boxed{}`; without one, the lenient one looks in the last `TAIL` characters.
    Answers are compared by `rlcourse.tasks.boxed.compare`, for at most `SECONDS`."""

    def verify(self, text: str, gold: str) -> Readings:
        [readings] = self.judge([Attempt(Problem("", "", gold), text, 0, finished=True)], training=True)
        return readings

    def judge(self, attempts: list[Attempt], training: bool) -> list[Readings]:
        """An unfinished attempt is never right, nor one that cannot be compared in time."""
        boxes = [last_box(a.text) if a.finished else None for a in attempts]
        items = {
            i: (a.problem.gold, box or a.text[-TAIL:], box is not None)
            for i, (a, box) in enumerate(zip(attempts, boxes, strict=True))
            if a.finished and not (box and is_copied(box, a.problem))
        }
        different = list(dict.fromkeys(items.values()))  # answers of a group are often the same
        found = dict(zip(different, compare_all(different), strict=True))
        verdicts = []
        for i, box in enumerate(boxes):
            right, answer = found[items[i]] if i in items else (False, box)
            boxed = box is not None
            verdicts.append(Readings(right and boxed, right, boxed, answer, self.rewarded, self.reward_format))
        return verdicts


def is_copied(box: str, problem: Problem) -> bool:
    """Whether the answer is an expression copied from the question, which asks for its value. A number may be."""
    written = as_written(box)
    if written == as_written(problem.gold) or to_number(written) is not None:
        return False
    return any(sign in written for sign in "+-*/^\\") and written in as_written(problem.question)


def compare_all(items: list[tuple[str, str, bool]]) -> list[tuple[bool, str | None]]:
    """(right, answer) for each (gold, written, boxed). A process compares those not written like the gold answer."""
    hard = [item for item in items if not (item[2] and as_written(item[0]) == as_written(item[1]))]
    results = dict(zip(hard, pool().map(hard), strict=True)) if hard else {}
    compared = [results.get(item, (True, item[1])) for item in items]
    return [
        (False, written if boxed else None) if isinstance(result, Failed) else result
        for (_, written, boxed), result in zip(items, compared, strict=True)
    ]


@functools.cache
def pool() -> JudgePool:
    return JudgePool("rlcourse.tasks.boxed:compare", min(PROCESSES, os.cpu_count() or 1), SECONDS, MEMORY_GB)


def load(data_dir: str | None = None) -> BoxedTask:
    """The task: about 102,500 problems to train on, 512 for validation (the last of the train file), 500 to test.

    Reads train.jsonl and test.jsonl from `data_dir`, with DeepMath's fields (question, final_answer, difficulty) or
    MATH's (problem, answer, level), else loads both through `datasets`, 2 GB. Raises ValueError if math-verify is
    missing, a line can't be used, or too few problems are left for training; FileNotFoundError or ConnectionError.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("Task math compares answers with math-verify: `python -m pip install 'rlcourse[math]'`.")
    if data_dir:
        remedy = "in --task math@FOLDER, or leave it out to load DeepMath-103K and MATH-500 from the Hugging Face hub"
        train, test = read_train_and_test(data_dir, remedy, problem_of, EXAMPLE)
    else:
        remedy = "put train.jsonl and test.jsonl in a folder and name it: --task math@FOLDER"
        train, test = (
            [problem_of(row) for row in load_rows(name, remedy, split=split).select_columns(columns)]
            for name, split, columns in HUB
        )
    return BoxedTask("math", INSTRUCTION, *hold_out(train), test)


def problem_of(record: dict[str, Any]) -> Problem:
    """The problem in a record of DeepMath or MATH. Raises ValueError for others."""
    both = ("question", "problem"), ("final_answer", "answer")
    keys = [next((name for name in names if name in record), names[0]) for names in both]
    question, answer = texts_of(record, keys)
    check_columns(record, SOLUTIONS.union(keys))
    if "####" in answer:
        raise ValueError(f"{keys[1]!r} is worked, as GSM8K's are: use --task gsm8k@FOLDER, or leave the working out.")
    level = record.get("level", record.get("difficulty"))
    graded = type(level) in (int, float) and 0 <= level <= MANY  # DeepMath has -1 for a difficulty that is not known
    return Problem(question.strip(), "", answer.strip(), int(level) if graded else None)
