"""Problems from files of JSON lines; by default in GSM8K's format, which `minigsm` has, too."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from rlcourse.files import of_json, read_bytes
from rlcourse.settings import shown
from rlcourse.tasks.task import Problem
from rlcourse.tasks.verify import plain, to_number

Parsed = TypeVar("Parsed")
VALIDATION = 512  # problems held out at most
PROVENANCE = (  # columns that say where a record is from, and nothing that a model should learn
    "id", "idx", "index", "uuid", "unique_id", "prompt_id", "source", "dataset", "split", "category", "topic",
    "subject", "level", "difficulty", "language", "license", "url", "timestamp", "model", "metadata",
)  # fmt: skip
EXAMPLE = '{"question": "...", "answer": "... #### 42"}'
EMPTY = None, "", [], {}
GROUPS = re.compile(r"\D*[0-9]{1,3}(?:\s[0-9]{3})+(?:\.[0-9]+)?")  # of digits: 12 345


def problem_of(record: dict[str, Any]) -> Problem:
    """The problem in a record with `question`, an `answer` that ends in `#### NUMBER`, and maybe an integer `level`.
    Raises ValueError, with what is wrong."""
    question, answer = texts_of(record, ("question", "answer"))
    check_columns(record, {"question", "answer"})
    level = record.get("level")
    return Problem(question, answer, gold_of(answer), level if type(level) is int else None)


def read_problems(
    path: str | Path, of: Callable[[dict[str, Any]], Problem] = problem_of, example: str = EXAMPLE
) -> list[Problem]:
    """The problems in a UTF-8 file with one JSON object per line, like `example`. of: makes a problem from a record.
    Raises FileNotFoundError, or ValueError that names a line that can't be used or contradicts an earlier one, or for
    no problems."""
    asked: dict[str, tuple[str, Problem]] = {}
    found = read_each_line(Path(path), lambda line: of(parse_record(line, example)), "problems")
    for place, problem in found:
        first, other = asked.setdefault(problem.question.strip(), (place, problem))
        value = to_number(problem.gold)
        if problem.gold != other.gold and (value is None or value != to_number(other.gold)):
            raise ValueError(
                f"{place}: the answer is {shown(problem.gold)}, and to the same question in {first} it's "
                f"{shown(other.gold)}: keep the right one."
            )
    return [problem for _, problem in found]


def read_train_and_test(folder: str, remedy: str, *form: Any) -> list[list[Problem]]:
    """The problems in train.jsonl and test.jsonl. remedy: where else to name a folder; form: see `read_problems`."""
    files = [Path(folder).expanduser() / name for name in ("train.jsonl", "test.jsonl")]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"There is no {file}: name a folder with train.jsonl and test.jsonl {remedy}.")
    return [read_problems(file, *form) for file in files]


def hold_out(problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """All problems but the last tenth, of `VALIDATION` at most, and those. Raises ValueError for fewer than ten."""
    count = min(VALIDATION, len(problems) // 10)
    if not count:
        raise ValueError(
            f"There are {len(problems)} train problems, and 10 are needed: the last tenth is for validation."
        )
    return problems[:-count], problems[-count:]


def read_each_line(path: Path, parse: Callable[[bytes], Parsed], what: str) -> list[tuple[str, Parsed]]:
    """Each line's place, and what `parse` makes of it; blank lines are skipped. what: a name for the lines. Raises like
    `read_problems`."""
    found = []
    content = read_bytes(path, f"a file of {what} is needed there, one per line")
    # Bytes are split, not text: a file that is not UTF-8 then still has a line to name.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                found.append((place, parse(line)))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no {what}: it must have one per line.")
    return found


def texts_of(record: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """The texts of these keys. Raises ValueError for one that is missing, blank or no text."""
    for key in keys:
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f"{key!r} is missing or is not a text.")
    return [record[key] for key in keys]


def parse_record(line: bytes, example: str) -> dict[str, Any]:
    """The JSON object on one line. Raises ValueError, with what is wrong and the example."""
    try:
        record = of_json(line)
    except ValueError as error:
        raise ValueError(f"the line is {error}; expected {example}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"the line is a JSON {type(record).__name__}; expected {example}.")
    if rb"\u" in line and re.search("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
        raise ValueError("the line has half of a character, as \\ud83d alone is: write it whole.")
    return record


def meant(record: dict[str, Any]) -> dict[str, Any]:
    """The columns of a record that hold something, and not only where it is from."""
    return {key: value for key, value in record.items() if value not in EMPTY and key not in PROVENANCE}


def check_columns(record: dict[str, Any], read: set[str]) -> None:
    """Raise ValueError if the record has a column that isn't read and may be part of the question."""
    if unread := meant(record).keys() - read:
        raise ValueError(f"the column {min(unread)} isn't asked: put it into the question, or leave it out.")


def gold_of(answer: str) -> str:
    """The number after the last `####` of a worked answer, as plain text. ValueError if it can't be read as one."""
    _, mark, after = answer.rpartition("####")
    number = after.strip()
    number = re.sub(r"\s", "", number) if GROUPS.fullmatch(number) else number
    if not mark or to_number(number) is None:
        raise ValueError("the answer does not end in '#### NUMBER'.")
    return plain(number)
