"""Of demonstrations only those that a task's judge finds right: a warm start that has not learned mistakes.

A demonstration belongs to the training problem whose question stands in its prompt. Those of other problems are left
out, those of the test above all.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcourse.files import write_text
from rlcourse.sft.data import EXPECTED, conversation_of
from rlcourse.tasks import Attempt, Problem, Task
from rlcourse.tasks.jsonl import parse_record, read_each_line

AT_ONCE = 256  # that are judged


@dataclass
class Kept:
    """How many were read and kept; why others were not, in the judge's words; how many belong to problems that are held
    out, and to none that is known."""

    read: int = 0
    kept: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    held_out: int = 0
    unknown: int = 0

    def __str__(self) -> str:
        found = f"{self.kept:,} of {self.read:,} are right and kept"
        if self.wrong:
            why = ", ".join(f"{words} {count:,}" for words, count in self.wrong.most_common(5))
            found += f"; not right: {self.wrong.total():,} ({why})"
        for count, what in ((self.held_out, "of problems that are held out"), (self.unknown, "of no known problem")):
            found += f"; {what}: {count:,}" if count else ""
        return found + "."


def keep_right(data: Path, task: Task, output: Path) -> Kept:
    """Write the lines of `data` whose last answer is right to `output`, as they are.

    Raises FileNotFoundError or ValueError, in one sentence, for a file that cannot be used, or of which nothing is left
    to write.
    """

    def parse(line: bytes) -> tuple[dict[str, Any], list[dict[str, str]]]:
        record = parse_record(line, EXPECTED)
        return record, conversation_of(record)

    rows, found = [row for _, row in read_each_line(data, parse, "conversations")], Kept()
    train, others = task.problems("train"), task.problems("validation") + task.problems("test")
    problems = sorted([*others, *train], key=lambda problem: -len(problem.question))  # a question may hold another one
    training, found.read, asked = set(map(id, train)), len(rows), []
    for record, messages in rows:
        problem, answer = trace_of(messages, problems)
        if problem is None:
            found.unknown += 1
        elif id(problem) not in training:
            found.held_out += 1
        else:
            asked.append((record, Attempt(problem, answer, 0, True)))
    lines = []
    for first in range(0, len(asked), AT_ONCE):
        part = asked[first : first + AT_ONCE]
        verdicts = task.judge([attempt for _, attempt in part], training=False)
        lines += [json.dumps(record) for (record, _), verdict in zip(part, verdicts, strict=True) if verdict.right]
        found.wrong.update(verdict.words for verdict in verdicts if not verdict.right)
    found.kept = len(lines)
    if not lines:
        raise ValueError(f"Nothing is left of {data}: {found}")
    write_text(output, "\n".join(lines) + "\n")
    return found


def trace_of(messages: list[dict[str, str]], problems: list[Problem]) -> tuple[Problem | None, str]:
    """The first of the problems whose question stands before the last answer, None if there is none; and the answer."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    before = "\n".join(message["content"] for message in messages[:last])
    found = (problem for problem in problems if problem.question.strip() in before)
    return next(found, None), messages[last]["content"]
