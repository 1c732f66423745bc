"""Which demonstrations a warm start may learn from: right ones, of problems to train on."""

import json

import pytest
from typer.testing import CliRunner

from rlcourse import cli
from rlcourse.sft.data import of_file
from rlcourse.sft.traces import keep_right, trace_of
from rlcourse.tasks import MathTask, Problem


def problem(question: str, gold: str) -> Problem:
    return Problem(question, "", gold)


TASK = MathTask(
    "toy",
    "",
    train=[problem("What is 1+1?", "2"), problem("What is 1+1? Twice that?", "4")],
    validation=[problem("What is 2+2?", "4")],
    test=[problem("What is 3+3? ", "6")],
)


def line(prompt: str, answer: str) -> dict:
    return {"prompt": prompt, "answer": answer}


def written(path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_right_answers_to_problems_of_training_are_kept_as_they_are(tmp_path):
    chat = [{"role": "system", "content": "What is 1+1?"}, {"role": "user", "content": "Go on."}]
    records = [
        line("Solve: What is 1+1?\nThanks.", "#### 2") | {"source": "ü"},
        line("What is 1+1?", "#### 3"),
        line("What is 1+1? Twice that?", "#### 4"),  # the longer question, not the one that it begins with
        line("What is 1+1? Twice that?", "#### 2"),
        line("What is 2+2?", "#### 4"),
        line("What is 3+3?", "#### 6"),
        line("What is 9+9?", "#### 18"),
        {"messages": [*chat, {"role": "assistant", "content": "#### 2"}]},
        {"messages": [*chat, {"role": "assistant", "content": "#### 2"}, *chat,
                      {"role": "assistant", "content": "#### 5"}]},
    ]  # fmt: skip
    written(tmp_path / "all.jsonl", records)
    found = keep_right(tmp_path / "all.jsonl", TASK, tmp_path / "right.jsonl")
    kept = [json.loads(text) for text in (tmp_path / "right.jsonl").read_text().splitlines()]
    assert kept == [records[0], records[2], records[7]]
    reasons = "3 wrong, 2 of held-out problems, 1 of unknown problems"
    assert found == f"3 of 9 are right and kept; left out: {reasons}."
    assert len(list(of_file(tmp_path / "right.jsonl"))) == 3  # `rlcourse sft` takes it


def test_nothing_right_is_refused_and_nothing_written(tmp_path):
    written(tmp_path / "all.jsonl", [line("What is 1+1?", "#### 3")])
    with pytest.raises(ValueError, match=r"Nothing is left of .*: 0 of 1 are right"):
        keep_right(tmp_path / "all.jsonl", TASK, tmp_path / "right.jsonl")
    assert not (tmp_path / "right.jsonl").exists()


def test_the_question_that_is_asked_counts_and_none_of_an_example():
    long, short = problem("How many apples has Tom, who buys 12?", "12"), problem("How many has Ann?", "7")
    known = [long, short, sum_ := problem("1+1?", "2")]
    turns = [("user", long.question), ("assistant", "#### 12")]
    asked = {
        "turns": ([*turns, ("user", short.question)], short),
        "one turn": ([("user", f"Q: {long.question}\nA: 12\nQ: {short.question}\nA:")], short),
        "an unknown question behind turns": ([*turns, ("user", "How many has Bob?")], None),
        "an earlier turn": ([("user", short.question), ("assistant", "Hm."), ("user", "Try again.")], None),
        "an unknown question in one turn": ([("user", f"Q: {short.question}\nA: 7\nQ: Add 5 and 5.\nA:")], None),
        "a question about the answer": ([("user", f"{short.question} And Bob?")], None),
        "another number": ([("user", "What is 11+1?")], None),
        "an instruction": ([("user", f"{sum_.question}\nEnd with #### NUMBER.")], sum_),
    }
    for what, (prompt, expected) in asked.items():
        messages = [{"role": role, "content": text} for role, text in [*prompt, ("assistant", "x")]]
        assert trace_of(messages, known) == (expected, "x"), what


def test_the_command_filters_programs_of_the_tile_language(tmp_path):
    from rlcourse.tasks import load_task

    first, second = (p for p in load_task("kernels").train[:2])
    records = [line(first.question, first.gold), line(second.question, "nothing")]
    written(tmp_path / "all.jsonl", records)
    arguments = ["filter", str(tmp_path / "all.jsonl"), "--task", "kernels", "--output", str(tmp_path / "right.jsonl")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0 and "1 of 2 are right and kept; left out: " in done.output
    assert [json.loads(text) for text in (tmp_path / "right.jsonl").read_text().splitlines()] == records[:1]
