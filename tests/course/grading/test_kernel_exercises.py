"""Kernels are graded as the card judges them, and nothing but a kernel earns their points."""

import linecache
import pickle
import re
import resource
import time
from types import SimpleNamespace

import pytest
import test_nb08
import test_nb09
from submissions import IMPORTS, catalogue, many, workers, write
from thorough import thinned

from rlcourse.course.checks import nb08
from rlcourse.course.checks.kernels import Maker
from rlcourse.course.grading import isolation, report, student
from rlcourse.course.grading.grade import grade
from rlcourse.course.grading.student import RemoteMaker
from rlcourse.course.grading.worker import Kernels, within
from rlcourse.kernels import dsl
from rlcourse.sandbox.wire import decode

graded = pytest.mark.skipif(
    not dsl.INSTALLED or isolation.way()[0] == isolation.GUARD, reason="needs CuTe DSL and namespaces"
)
compiles = pytest.mark.skipif(not dsl.INSTALLED, reason="needs CuTe DSL")

HONEST = """
.visible .entry add_ten(.param .align 8 .b8 p0[8], .param .align 8 .b8 p1[8]) .reqntid 64, 1, 1
{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<6>;
    ld.param.b64 %rd1, [p0]; ld.param.b64 %rd2, [p1];
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3; ld.global.b32 %r2, [%rd4];
    add.f32 %r3, %r2, 0f41200000;
    add.s64 %rd5, %rd2, %rd3; st.global.b32 [%rd5], %r3;
    ret;
}
"""
TOOLS = f"""
import os, torch
from rlcourse.course.kernels import trace
from rlcourse.kernels.arguments import Argument
from rlcourse.kernels.dsl import Float32, cute, range_constexpr

HONEST = {HONEST!r}
{test_nb08.frame()}

class Mine:
    def grid(self, *tensors):
        if Mine.blocks is None:
            os._exit(0)
        return Mine.blocks

def hand_in(ptx, threads=64, shared=0, arguments=None, grid=(1, 1, 1)):
    "Facts by hand in place of those of a compiled kernel."
    listed = arguments or [[name, "float32", [64], 0, 4] for name in ("a", "out")]
    facts = {{"owner": "AddTen", "ptx": ptx, "threads": threads, "shared_bytes": shared, "arguments": listed}}
    Mine.blocks, trace.trace = grid, lambda make, *rest: (make(), facts)
"""
CHEATS = catalogue("kernels")
PREDICTED = "constants for the inputs that follow from the seed"


@pytest.mark.thorough
@graded
def test_what_is_no_kernel_earns_nothing_and_harms_nothing(tmp_path, temporary):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    path, asked = many(tmp_path, CHEATS, start=TOOLS, number=93, function="AddTen")
    result = grade(path)
    said = {asked[r.question]: [case.message for case in r.cases] for r in result.results if r.question in asked}
    assert not {asked[r.question] for r in result.results if r.question in asked and r.score}, said
    assert not any("is not defined" in text or "not reached" in text for texts in said.values() for text in texts), said
    assert "root:" not in report.as_text(result) and "daemon" not in report.as_text(result)
    assert time.monotonic() - start < 90
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in kB
    assert list(temporary.iterdir()) == [] and workers() == {}


@pytest.mark.thorough
@graded
def test_ptx_that_is_right_is_right_and_inputs_that_are_known_before_would_be_worth_something(tmp_path, monkeypatch):
    """So the cheats fail for what they are, and not because nothing that is handed in by hand passes."""
    kinds = {"by hand": ["AddTen = Mine\nhand_in(HONEST)"], PREDICTED: CHEATS[PREDICTED]}
    path, _ = many(tmp_path, kinds, start=TOOLS, number=93, function="AddTen")
    assert [r.score for r in grade(path).results[:2]] == [2, 0]
    monkeypatch.setattr(student, "derived", lambda seed, name: seed)
    assert [r.score for r in grade(path).results[:2]] == [2, 1]


def wrong_kernels(nth: int) -> dict[str, tuple[str, str]]:
    """For each question of 08 that asks for a kernel its wrong answer number `nth`, and what the card says of it."""
    found = {}
    for question, edits in test_nb08.EDITS.items():
        names = [name for name, (_, _, said) in edits.items() if said is not None]
        found[question] = test_nb08.edited(question, names[nth])
    return found


def notebook(path, number: str, answers: dict[str, tuple[str, str]]):
    """A notebook of answers {question: (source, ...)}; the cells' last line checks."""
    cells = [IMPORTS.format(number=number)]
    for question, (source, *_) in answers.items():
        name = re.findall(r"^class (\w+)", source, re.M)[-1]
        cells += [source, f"check.{question}({name})"]
    return write(path, cells)


@graded
@pytest.mark.thorough
@pytest.mark.parametrize("nth", range(2))
def test_wrong_kernels_fail_with_the_card_s_reason(nth, tmp_path):
    wrong = wrong_kernels(nth)
    result = grade(notebook(tmp_path / "08_wrong.ipynb", "08", wrong))
    assert not result.errors, result.errors
    for judged in result.results:
        if judged.question in wrong:
            messages = [case.message for case in judged.cases if not case.passed]
            said = wrong[judged.question][1]
            assert messages and any(said in message for message in messages), report.as_text(result)
    assert result.seconds < 60


@pytest.mark.thorough
@graded
def test_an_attention_kernel_is_told_its_mistake(tmp_path):
    old, new, said = test_nb09.KERNEL["acc not rescaled"]
    sources = {"q5": (test_nb09.attention_source(old, new),)}
    result = grade(notebook(tmp_path / "09_wrong.ipynb", "09", sources))
    assert any(said in case.message for case in result.results[-1].cases), report.as_text(result)


@graded
def test_the_report_names_the_line_of_the_cell(tmp_path):
    beyond, _ = test_nb08.edited("q2", "no guard")
    unknown, _ = test_nb08.edited("q1", "copied")
    unknown = unknown.replace("out[thread] = a[thread]", "out[thread] = nothing[thread]")
    result = grade(notebook(tmp_path / "08_lines.ipynb", "08", {"q1": (unknown,), "q2": (beyond,)}))
    messages = {r.question: r.cases[-1].message for r in result.results}
    line = beyond[: beyond.index(test_nb08.ADD_AT)].count("\n") + 1
    assert f"Python line {line}: {test_nb08.ADD_AT}" in messages["q2"]
    line = unknown[: unknown.index("= nothing[")].count("\n") + 1
    assert "'nothing' is not defined" in messages["q1"] and f"(line {line} of the cell" in messages["q1"]


SLOW = {
    "a loop in Python": ("while True:\n            pass", ""),
    "a loop without end": ("while thread >= 0:\n            out[thread] = a[thread]", "does not end"),
    "a kernel unrolled": (
        "for i in range_constexpr(1000000):\n            out[thread] = a[thread] + 10.0",
        "took longer than",
    ),
}


@graded
@pytest.mark.thorough
@pytest.mark.parametrize("slow", SLOW)
def test_a_kernel_without_end_is_stopped_and_the_others_are_graded(slow, tmp_path, monkeypatch, temporary):
    for question in nb08.KERNELS.values():
        monkeypatch.setattr(question, "seconds", 4)
    code, said = SLOW[slow]
    source = test_nb08.edited("q1", "as it is")[0].replace(test_nb08.ADD, code)
    answers = {"q1": (source,), "q2": test_nb08.edited("q2", "as it is")}
    result = grade(notebook(tmp_path / "08_slow.ipynb", "08", answers))
    first, second = result.results[:2]
    assert first.score == 0 and said in first.cases[0].message, report.as_text(result)
    assert second.passed, report.as_text(result)
    assert result.seconds < 60 and list(temporary.iterdir()) == [] and workers() == {}


@compiles
def test_a_kernel_that_changes_its_input_earns_nothing(tmp_path, monkeypatch):
    """The norm of a row of zeros is 0: who may write to x needs no more."""
    old = "total += value * value"
    source = test_nb08.solution("q10").replace(
        old, f"{old}\n                    x[row, i * self.threads + thread] = 0.0"
    )
    kernel = test_nb08.kernel_from(source, "RowNorm", tmp_path, monkeypatch)
    messages = [case.message for case in nb08.KERNELS["q10"].run(Maker(kernel), seed=0).cases]
    assert messages == ["Your kernel writes to x: only y is to be written."] * len(messages)


class Loopback:
    """A worker in this process: the same bytes both ways, the same calls."""

    alive = True

    def __init__(self, make):
        self.make, self.kernels = make, Kernels()

    def ask(self, request, seconds):
        kind, left, arguments, options = pickle.loads(pickle.dumps(request))
        arguments = (self.make, *arguments) if kind == "trace" else arguments
        return decode(within(left, getattr(self.kernels, kind), *arguments, **options))


EDITS = [(question, name) for question, edits in test_nb08.EDITS.items() for name in edits]


@compiles
@pytest.mark.parametrize("question, name", thinned(EDITS, every=24))
def test_card_and_grader_say_the_same_of_a_kernel(question, name, tmp_path, monkeypatch):
    asked = nb08.KERNELS[question]
    kernel = test_nb08.kernel_from(test_nb08.edited(question, name)[0], asked.function, tmp_path, monkeypatch)
    run = SimpleNamespace(worker=Loopback(kernel), left=1e9, line=linecache.getline)
    found, card = (asked.run(f, seed=0).cases for f in (RemoteMaker(run, question), Maker(kernel)))
    assert [(c.name, c.passed, c.message) for c in found] == [(c.name, c.passed, c.message) for c in card]


def test_without_the_compiler_the_report_says_which_questions_are_not_graded(tmp_path, monkeypatch):
    monkeypatch.setattr(dsl, "INSTALLED", False)
    source = test_nb08.edited("q1", "as it is")[0] + "\nprint(AddTen)"
    result = grade(notebook(tmp_path / "08_without.ipynb", "08", {"q1": (source,)}))
    assert [r.question for r in result.results] == ["q7", "q8"]
    assert len(result.notes) == 1 and "CuTe DSL, which is not installed here" in result.notes[0]
    assert "q1 AddTen, q2 AddTenAnyLength" in result.notes[0] and "q10 RowNorm" in result.notes[0]


def test_without_isolation_kernels_are_not_graded(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "way", lambda: (isolation.GUARD, "no namespaces"))
    source = test_nb08.edited("q1", "as it is")[0]
    result = grade(notebook(tmp_path / "08_guard.ipynb", "08", {"q1": (source,)}))
    assert [r.question for r in result.results] == ["q7", "q8"]
    assert any(note.startswith("Not graded: q1 AddTen") for note in result.notes)
