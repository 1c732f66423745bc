import re
from fractions import Fraction
from itertools import chain

import pytest

from rlcourse import paths
from rlcourse.tasks import load_task, minigsm
from rlcourse.tasks.minigsm import BOXES, BOYS, GIRLS, THINGS, generate
from tools.embedded.problems import MINIGSM, write_minigsm

WORDS = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}
WORDS |= {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}
CALCULATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
EXACT = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


@pytest.fixture(scope="module")
def shipped():
    """Every problem of data/minigsm by split."""
    task = load_task("minigsm")
    return {split: task.problems(split) for split in MINIGSM}


def numbers_in(question):
    """The numbers of a question, those written as words included."""
    return [int(n) for n in re.findall(r"\d+", question)] + [n for word, n in WORDS.items() if word in question]


def skeleton(question):
    """The question without its decoration: what is left is the template and the numbers."""
    for kind in (BOYS + GIRLS, THINGS, [*BOXES, *BOXES.values()], ["He", "She", "he", "she", "him", "her"]):
        question = re.sub(rf"\b({'|'.join(kind)})\b", "_", question)
    return question


def test_shipped_files_are_what_the_generator_writes(tmp_path):
    write_minigsm(tmp_path)
    for split in MINIGSM:
        file = f"{split}.jsonl"
        assert (tmp_path / file).read_bytes() == (paths.data_folder() / "minigsm" / file).read_bytes(), file


def test_every_worked_answer_is_right(shipped):
    for problem in chain.from_iterable(shipped.values()):
        *steps, last = problem.answer.split("\n")
        known = numbers_in(problem.question)
        unused = []
        for step in steps:
            ((left, op, right, result),) = CALCULATION.findall(step)
            assert EXACT[op](Fraction(left), Fraction(right)) == int(result), problem
            assert int(left) in known and int(right) in known, problem
            unused = [n for n in unused if n not in (int(left), int(right))] + [int(result)]
            known.append(int(result))
        assert len(steps) == problem.level
        assert unused == [int(result)], "every result but the last is used by a later step"
        assert last == f"#### {result}" and problem.gold == result


def test_no_problem_is_in_two_splits_whatever_its_names(shipped):
    skeletons = {split: [skeleton(p.question) for p in problems] for split, problems in shipped.items()}
    for split, own in skeletons.items():
        assert len(set(own)) == len(own), f"{split} has a problem twice"
    demonstrated = {skeleton(p.question) for p in generate(6000, seed=0, split="sft")}
    assert len(demonstrated) == 6000
    for one, other in [("train", "validation"), ("train", "test"), ("validation", "test")]:
        assert not set(skeletons[one]) & set(skeletons[other])
    assert not demonstrated & {s for own in skeletons.values() for s in own}


def test_a_slip_is_carried_into_the_later_steps():
    steps = [minigsm.parse_step(text) for text in ("A has [x+y] coins.", "She has [r1-z] coins.", "So [r2*r2] coins.")]
    numbers = {"x": 5, "y": 4, "z": 3}
    assert [str(c) for c in minigsm.solve(steps, numbers)] == ["5+4=9", "9-3=6", "6*6=36"]
    assert [str(c) for c in minigsm.solve(steps, numbers, {1: 1})] == ["5+4=10", "10-3=7", "7*7=49"]
    assert [str(c) for c in minigsm.solve(steps, numbers, {3: 10})] == ["5+4=9", "9-3=6", "6*6=46"]
    assert minigsm.solve(steps, numbers, {1: -5}) is None  # 4-3=1 would be singular
    assert minigsm.solve(steps, numbers, {1: 5}) is None  # 11*11 is not asked for


def test_the_task_reads_what_ships_or_another_folder(tmp_path, shipped):
    task = load_task("minigsm")
    assert task.name == "minigsm" and task.instruction == ""
    assert task.problems("test") == shipped["test"] and task.problems("train") == shipped["train"]
    problem = task.problems("validation")[0]
    assert task.verify(problem.answer, problem.gold).strict
    for split in MINIGSM:
        (tmp_path / f"{split}.jsonl").write_text(f'{{"question": "{split}?", "answer": "#### 5"}}')
    assert load_task(f"minigsm@{tmp_path}").problems("test")[0].question == "test?"
