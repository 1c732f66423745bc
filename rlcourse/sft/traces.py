"""Of demonstrations only those that a task's judge finds right: a warm start that has not learned mistakes.

A demonstration belongs to the training problem whose question its prompt asks last. Those of other problems are left
out, those of the test above all.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from rlcourse.files import write_text
from rlcourse.sft.data import EXPECTED, conversation_of
from rlcourse.tasks import Attempt, Problem, Task
from rlcourse.tasks.jsonl import parse_record, read_each_line

AT_ONCE = 256  # that are judged


def keep_right(data: Path, task: Task, output: Path) -> str:
    """Write the lines of `data` whose last answer is right to `output`, as they are. Returns a sentence: how many are
    kept, and why others are not, in the judge's words.

    Raises FileNotFoundError or ValueError, in one sentence, for a file that cannot be used, or of which nothing is left
    to write.
    """

    def parse(line: bytes) -> tuple[dict[str, Any], list[dict[str, str]]]:
        record = parse_record(line, EXPECTED)
        return record, conversation_of(record)

    rows = [row for _, row in read_each_line(data, parse, "conversations")]
    train, others = task.problems("train"), task.problems("validation") + task.problems("test")
    problems = [*others, *train]
    training, left_out, asked = set(map(id, train)), Counter(), []
    for record, messages in rows:
        problem, answer = trace_of(messages, problems)
        if id(problem) in training:
            asked.append((record, Attempt(problem, answer, 0, True)))
        else:
            left_out["of unknown problems" if problem is None else "of held-out problems"] += 1
    lines = []
    for first in range(0, len(asked), AT_ONCE):
        part = asked[first : first + AT_ONCE]
        verdicts = task.judge([attempt for _, attempt in part], training=False)
        lines += [json.dumps(record) for (record, _), verdict in zip(part, verdicts, strict=True) if verdict.right]
        left_out.update(verdict.words for verdict in verdicts if not verdict.right)
    found = f"{len(lines):,} of {len(rows):,} are right and kept"
    if left_out:
        found += "; left out: " + ", ".join(f"{count:,} {why}" for why, count in left_out.most_common(7))
    if not lines:
        raise ValueError(f"Nothing is left of {data}: {found}.")
    write_text(output, "\n".join(lines) + "\n")
    return f"{found}."


def trace_of(messages: list[dict[str, str]], problems: list[Problem]) -> tuple[Problem | None, str]:
    """The first of the problems whose question is asked last before the last answer; None if that is of none of them,
    or cannot be told; and the answer.

    Only the turns behind earlier answers ask. Of several questions in them it is the one that ends last, the longest if
    one holds another. Examples may stand before it; one that is answered there, or has a question behind it, is none.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = "\n".join(message["content"] for message in messages[max([-1, *answers[:-1]]) + 1 : answers[-1]])
    found = []
    for problem in problems:
        question = problem.question.strip()
        start = asked.rfind(question) if question else -1
        if start >= 0 and not asked[max(0, start - 1) : start].isalnum():
            found.append((start + len(question), len(question), problem))
    end, _, problem = max(found, key=lambda of_one: of_one[:2], default=(0, 0, None))
    behind = asked[end:]
    if problem is not None and ("?" in behind or re.search(rf"(?<!\w){re.escape(problem.gold or '?')}(?!\w)", behind)):
        problem = None
    return problem, messages[answers[-1]]["content"]
