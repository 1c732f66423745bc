"""Mathematics: the box that counts, what equals what, what earns nothing, time limits, the two data sets' fields."""

import json
import time

import pytest

from rlcourse.tasks import load_task
from rlcourse.tasks import math as math_task
from rlcourse.tasks.math import TO_COMPUTE, BoxedTask, compare, last_box, problem_of
from rlcourse.tasks.pool import JudgePool
from rlcourse.tasks.task import Attempt, Problem
from rlcourse.tasks.verify import CUT_OFF, Readings

pytest.importorskip("math_verify", exc_type=ImportError)
TASK = BoxedTask("math", "Box it.", [], [], [])


BOXES = {
    r"\boxed{1} no, \boxed{2}.": "2", r"\boxed {x^{2^{3}}} }": "x^{2^{3}}", r"\boxed{\{1,2\}}": r"\{1,2\}",
    r"\boxed{ \boxed{7} }": "7", r"\boxed{3} and \boxed{4": "3", r"\boxed{3} and \boxed{ }": "3",  # never closed, empty
    "\\boxed{1,\n2}": "1,\n2", r"\boxed{\}": None,
}  # fmt: skip


def test_the_last_box_that_holds_something_counts_and_a_long_text_of_boxes_is_read_at_once():
    assert {text: last_box(text) for text in BOXES} == BOXES
    started = time.process_time()
    assert last_box(r"\boxed{" * 20_000) is None and last_box("{" * 10**6) is None
    assert time.process_time() - started < 5


EQUAL = [
    # numbers
    ("0.5", r"\frac12"), (r"\frac12", r"\frac 1 2"), (r"\frac{1}{2}", "1/2"), ("1/3", "0.333333"),
    (r"-\frac{1}{2}", r"\dfrac{-1}{2}"),
    ("1234", "1,234"), ("1 234 567", "1234567"), (r"1{,}234", "1234"), ("1000000", "10^6"), ("5", "5."), ("5", "$5$"),
    (r"\$5", "5"), (r"3\frac{1}{2}", "3.5"),
    (r"\log 6", r"\log 2+\log 3"), (r"\sqrt{8}", r"2\sqrt2"), (r"\infty", r"\infty"), ("-2", "−2"),
    # units, percent
    ("5", r"5\text{ cm}"), (r"5 \text{ cm}^2", "5"), ("90", r"90^\circ"),
    ("50", r"50\%"), (r"50\%", "0.5"), ("1/2", "0.5."),
    ("12", "12 apples"), (r"5\text{ cm}", r"5\,\text{cm}"), ("3t", r"3\cdot t"), ("60°", r"60\text{ degrees}"),
    (r"\frac{1}{2^{98}}", r"\frac{1}{4^{49}}"), (r"1.5\times10^{-20}", r"15\times10^{-21}"), (r"1011_{2}", "1011_2"),
    (r"\frac{1}{2048}", "0.00048828"), (r"\log_2 8", "3"), (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    # expressions
    ("x^2-1", "(x-1)(x+1)"), (r"2\pi r", r"2r\pi"), ("6+9i", "9i+6"), ("5", "x=5"), ("x=5", "5"), ("y=2x+3", "2x+3"),
    # intervals, inequalities, sets, tuples, matrices
    ("[1,2)", r"\left[1, 2\right)"), ("(0.5,1)", r"(\frac12, 1)"), (r"(-\infty,3]", r"x \le 3"),
    ("[1,2]", r"1\le x\le 2"),
    (r"(-1,0)\cup(0,1)", r"(0,1)\cup(-1,0)"), (r"x\in[-2,7]", "[-2,7]"),
    ("[-2,7]", r"x\in[-2,7]"), (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\{1,2\}", r"\{2,1\}"), ("1,2", "2, 1"), (r"\{-1,1\}", r"\pm 1"), (r"\emptyset", r"\{\}"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    # words, and LaTeX that does not parse
    (r"\text{Evelyn}", "Evelyn"), (r"\text{June 20}", "June 20"), ("Yes", r"\text{Yes}"), (r"\text{(C)}", "C"),
    (r"\frac{1}{2", r"\frac{1}{2"),
]  # fmt: skip
DIFFERENT = [
    ("5", "6"), ("1/3", "0.333"), (r"\pi", "3.14"), ("-2", "2"), ("31/2", r"3\frac12"), ("3", "3!"), ("5", "five"),
    ("[1,2)", "(1,2)"), ("[1,2]", "[1,2)"), ("(1,2)", "(2,1)"), (r"x \le 3", "x < 3"), (r"(-\infty,3]", r"x \ge 3"),
    (r"\{1,2\}", r"\{1,2,3\}"), ("(3,5)", "(5,3)"), ("(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("x^2", "x^3"), ("a", "b"),
    # tiny numbers, and decimals of other digits
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"), (r"\sqrt2\cdot10^{-20}", r"\sqrt3\cdot10^{-20}"),
    ("e^{-50}", "e^{-51}"),
    (r"\sqrt2+10^{-20}", r"\sqrt2"), ("x=10^{-20}", "x=10^{-21}"), ("(10^{-20},1)", "(10^{-21},1)"),
    (r"\frac{1}{100!}", r"\frac{1}{99!}"), ("0.0000001", "0.0000002"), (r"\{0.0000001\}", r"\{0.0000002\}"),
    (r"1.5\times10^{-20}", r"1.6\times10^{-20}"), ("1.0000001", "1"), (r"\frac{1}{2048}", "0.000488"),
    # what math-verify drops
    ("1011_3", "1011_2"), (r"1011_{\text{two}}", r"1011_{\text{three}}"), ("1A3_{16}", "1A3_{12}"),
    ("(1011)_2", "1011"), ("1e5", "5e"), ("5e", "1e5"),
    (r"\sin 30", r"\sin 30^\circ"), (r"\cos 60°", r"\cos 60"), (r"5^\circ\text{F}", r"5^\circ\text{C}"), ("30'", "30"),
    ("f'(x)", "f(x)"), (r"3 \mod 5", r"3 \mod 7"), (r"a\equiv b", "a=b"), (r"1,2,\ldots,10", "1,2,10"),
    ("0.333...", "0.333"),
    ("12", "1 2"), ("1234", "12 34"), ("2", "1 2"), ("31/2", "3 1/2"), ("5", r"5\text{ million}"), ("5", "5 thousand"),
    (r"\log 10", "1"), (r"\log_{10} x", r"\log x"), ("3", "3t"),
    ("2ab", "2"), ("A^T", "A"), (r"5\text{ cm}", r"5\text{ m}"), (r"5\text{ cm}^2", r"5\text{ cm}^3"),
    # what it reads as something else
    (r"\frac{1}{2x}", "1/2x"), ("12:30", r"\frac25"), ("5!!", "120!"), ("odd", "ddo"), (r"\angle ABC", r"\angle CBA"),
    ("(1,2)", r"\{1,2\}"), ("A", "a"),
    # hedging
    ("1", "1, 2"), ("2", r"1 \text{ or } 2"), ("1", r"\pm 1"), ("12", r"12 \text{ apples and } 3"),
    ("5", "x = 5, y = 6"),
    # words, and what does not parse
    ("Yes", "No"), ("True", "False"), ("even", "odd"), (r"\text{no solution}", r"\text{none}"), (r"\frac{1}{2", "0.5"),
    ("5", r"\frac{"), ("5", r"\ "), ("5", "x"), ("True", "1=1"), ("5", "NaN"), ("0", "x=y"),
    # left undone
    ("1/3", r"\int_0^1 x^2 dx"), ("55", r"\sum_{k=1}^{10} k"), ("24", r"\prod_{k=1}^4 k"), ("2x", r"\frac{d}{dx}x^2"),
    ("1", r"\lim_{x\to0}\frac{\sin x}{x}"), ("4", r"\max(2,4)"), ("4", r"\iint 1"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), EQUAL, ids=lambda text: text[:30])
def test_what_means_the_same_is_right(gold, answer):
    text = rf"Thus \boxed{{{answer}}}."
    box = last_box(text) or last_box(rf"\boxed{{{answer}}}") or answer  # a brace of the answer may be missing
    assert compare((gold, box, True)) == (True, box)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT, ids=lambda text: text[:30])
def test_what_means_something_else_is_wrong(gold, answer):
    assert compare((gold, answer, True)) == (False, answer)


def test_a_computation_may_be_left_where_the_gold_answer_leaves_it():
    assert not TO_COMPUTE.search(r"\infty") and not TO_COMPUTE.search(r"\sin x")  # \in is not \int
    assert compare((r"\sum_{k=1}^n k", r"\sum_{k=1}^{n} k", True))[0]


def judged(*texts, gold="1/2", question="", finished=True):
    return TASK.judge([Attempt(Problem(question, "", gold), text, 9, finished) for text in texts], training=True)


def test_the_box_is_the_strict_reading_and_without_one_the_lenient_one_looks_elsewhere():
    assert judged(r"\boxed{0.5}", r"The answer is $\frac{1}{2}$.", "It is 0.25", r"0.5, \boxed{2}") == [
        Readings(True, True, True, "0.5"),
        Readings(False, True, False, r"\frac{1}{2}"),
        Readings(False, False, False, "0.25"),
        Readings(False, False, True, "2"),
    ]
    assert judged(r"\boxed{0.5}", finished=False) == [CUT_OFF]


def test_an_expression_copied_from_the_question_is_no_answer():
    question = r"Compute $\left(1 + 2\right) \cdot 3$ and write 9/1 or 9 as $x$."
    verdicts = judged(
        r"\boxed{(1+2)\cdot 3}", r"\boxed{9}", r"\boxed{9/1}", r"\boxed{3 \cdot 3}", gold="9", question=question
    )
    assert [v.right for v in verdicts] == [False, True, True, True]
    assert verdicts[0] == Readings(False, False, True, r"(1+2)\cdot 3")
    assert judged(r"\boxed{x + 1}", gold="x+1", question="Is it x+1 or x-1?")[0].right


def test_an_answer_that_takes_for_ever_costs_itself_alone(monkeypatch):
    short = JudgePool("rlcourse.tasks.math:compare", processes=1, seconds=2.0, memory_gb=4.0)
    monkeypatch.setattr(math_task, "pool", lambda: short)
    started = time.perf_counter()
    verdicts = judged(r"\boxed{9^{9^{9^9}}}", r"\boxed{0.5}", "(" * 400 + r"\boxed{\frac{1}{4}}", r"\boxed{2/4}")
    assert [v.right for v in verdicts] == [False, True, False, True]
    assert verdicts[0] == Readings(False, False, True, "9^{9^{9^9}}")
    assert time.perf_counter() - started < 120


def test_what_is_written_alike_needs_no_process(monkeypatch):
    monkeypatch.setattr(math_task, "pool", lambda: pytest.fail("a process"))
    assert [v.right for v in judged(r"\boxed{1/2}", r"\boxed{ 1 / 2 }", r"\boxed{$1/2$.}")] == [True] * 3


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question": "Q?", "final_answer": " 5 ", "difficulty": 4.5, "topic": "x"}, Problem("Q?", "", "5", 4)),
        ({"problem": "Q?", "answer": r"\pi", "solution": "long", "level": 5}, Problem("Q?", "", r"\pi", 5)),
        ({"problem": "Q?", "answer": "2", "level": float("inf")}, Problem("Q?", "", "2")),
    ],
)
def test_the_fields_of_both_data_sets_are_read(record, expected):
    assert problem_of(record) == expected


@pytest.mark.parametrize("extra", [{"context": "Let x be 3."}, {"problem": "R?"}, {"answer": "6"}])
def test_a_column_that_nothing_reads_is_refused(extra):
    with pytest.raises(ValueError, match=f"the column {next(iter(extra))} isn't asked"):
        problem_of({"question": "Q?", "final_answer": "5", "difficulty": 4.5, "r1_solution_1": "long"} | extra)


def test_a_worked_answer_is_not_taken_for_the_final_one():
    with pytest.raises(ValueError, match="'answer' is worked, as GSM8K's are: use --task gsm8k@FOLDER"):
        problem_of({"question": "Q?", "answer": "2+3=5\n#### 5"})


def write(folder, train: int, lines=()):
    rows = [{"question": f"{n}?", "final_answer": str(n), "difficulty": 3.5} for n in range(train)]
    (folder / "train.jsonl").write_text("\n".join([*map(json.dumps, rows), *lines]))
    (folder / "test.jsonl").write_text(json.dumps({"problem": "P?", "answer": "7", "level": 2}))
    return str(folder)


def test_a_folder_is_split_into_train_validation_and_test(tmp_path):
    task = load_task(f"math@{write(tmp_path, 20)}")
    assert [p.gold for p in task.problems("train")] == [str(n) for n in range(18)]
    assert [p.gold for p in task.problems("validation")] == ["18", "19"]
    assert task.problems("test") == [Problem("P?", "", "7", 2)] and r"\boxed{}" in task.instruction
    assert list(task.metrics) == ["accuracy", "accuracy_lenient", "formatted"]


def test_the_hub_is_asked_for_both_data_sets(monkeypatch):
    import datasets

    class Rows(list):
        def select_columns(self, names):
            return [{name: row[name] for name in names} for row in self]

    def load_dataset(name, split):
        if name == "zwhe99/DeepMath-103K" and split == "train":
            row = {"question": "q", "final_answer": "1", "difficulty": 5.0, "r1_solution_1": "x" * 99}
            return Rows([row] * 10)
        assert (name, split) == ("HuggingFaceH4/MATH-500", "test")
        return Rows([{"problem": "p", "answer": "2", "level": 1, "subject": "Algebra"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task("math")
    assert (task.train, task.test) == ([Problem("q", "", "1", 5)] * 9, [Problem("p", "", "2", 1)])
