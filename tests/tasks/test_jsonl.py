import json
import re

import pytest

from rlcourse.tasks import Problem
from rlcourse.tasks.jsonl import gold_of, hold_out, read_problems

GOOD = '{"question": "How many?", "answer": "1+1=2\\n#### 2"}'


def write(tmp_path, content):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_problems_are_read_as_they_were_written(tmp_path):
    records = [
        {"question": "How many?", "answer": "So 3*4=12.\n#### 12", "level": 1},
        {"question": "Wie groß, \u2028 日本?", "answer": "#### 1,234"},
    ]
    path = write(tmp_path, "\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    assert read_problems(path) == [
        Problem("How many?", "So 3*4=12.\n#### 12", "12", 1),
        Problem("Wie groß, \u2028 日本?", "#### 1,234", "1234", None),
    ]


@pytest.mark.parametrize("content", [f"\n{GOOD}\n \n{GOOD}\n\n", f"{GOOD}\r\n{GOOD}\r\n", f"\ufeff{GOOD}\n{GOOD}"])
def test_blank_lines_windows_lines_and_a_byte_order_mark_are_fine(tmp_path, content):
    assert read_problems(write(tmp_path, content)) == [Problem("How many?", "1+1=2\n#### 2", "2")] * 2


def test_gold_is_the_last_number_without_commas_currency_and_spaces():
    answers = ("#### $70,000", "#### $ 1 000 ", "#### -0.5\n", "#### 3\nno, wait\n#### 4", "#### 1/2")
    assert [gold_of(answer) for answer in answers] == ["70000", "1000", "-0.5", "4", "1/2"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "How many?", "answer": "#### 2"', "the line is not JSON"),
        ("[1, 2]", "the line is a JSON list"),
        ('{"question": " ", "answer": "#### 2"}', "'question' is missing"),
        ('{"question": "How many?", "answer": "#### 2", "context": "Tom has 2."}', "the column context isn't asked"),
        *(
            (json.dumps({"question": "How many?", "answer": answer}), "the answer does not end in '#### NUMBER'")
            for answer in ("two", "#### ", "#### 1,5", "#### 3 4", "#### 1e5", "#### 1 100/3", "#### 1234 567")
        ),
        (b'{"question": "\xff", "answer": "#### 2"}', "the line is not UTF-8"),
        ('{"question": "a", "answer": "#### 2", "answer": "#### 3"}', "the line is an object with the key 'answer' tw"),
        ('{"question": "\\ud83d", "answer": "#### 2"}', "the line has half of a character"),
        ('{"question": "How many? ", "answer": "#### 3"}', "the answer is '3', and to the same question in"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_file_and_number(tmp_path, line, complaint):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, b"\n".join([GOOD.encode(), b"", line, GOOD.encode()]))
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: {complaint}")) as caught:
        read_problems(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_question_may_come_again_with_the_same_number(tmp_path):
    lines = (json.dumps({"question": "How many?", "answer": f"#### {n}"}) for n in ("1/2", "0.50", "1/2"))
    assert [p.gold for p in read_problems(write(tmp_path, "\n".join(lines)))] == ["1/2", "0.50", "1/2"]


def test_the_last_problems_are_held_out_and_some_must_be_left():
    problems = [Problem(str(n), "", str(n)) for n in range(6000)]
    for count, held_out in ((10, 1), (29, 2), (6000, 512)):
        assert hold_out(problems[:count]) == (problems[: count - held_out], problems[count - held_out : count])
    with pytest.raises(ValueError, match="There are 9 train problems, and 10 are needed"):
        hold_out(problems[:9])
