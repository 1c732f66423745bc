"""Kernels are graded as the card judges them, and nothing but a kernel earns their points."""

import resource
import time

import pytest
from answers import KERNELS, edited, kernel_from, source
from submissions import IMPORTS, catalogue, many, workers, write

from rlcourse.course.checks.kernels import Maker
from rlcourse.course.grading import isolation, report, student
from rlcourse.course.grading.grade import grade
from rlcourse.kernels import dsl
from rlcourse.sandbox.process import GUARD

graded = pytest.mark.skipif(not dsl.INSTALLED or isolation.way()[0] == GUARD, reason="needs CuTe DSL and namespaces")
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
{"".join(source("nb08", "puzzle").partition("def puzzle")[1:])}

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


def graded_kernels(folder, answers: dict[str, str], number: str = "08"):
    """The report on a notebook of kernels {question: source}."""
    cells = [IMPORTS.format(number=number)]
    for question, text in answers.items():
        cells += [text, f"check.{question}({KERNELS['nb' + number, question].function})"]
    return grade(write(folder / f"{number}_kernels.ipynb", cells))


@graded
def test_the_report_names_the_line_of_the_cell(tmp_path):
    beyond, _ = edited("nb08", "q2", "no guard")
    unknown = edited("nb08", "q1", "copied")[0].replace("out[thread] = a[thread]", "out[thread] = nothing[thread]")
    result = graded_kernels(tmp_path, {"q1": unknown, "q2": beyond})
    messages = {r.question: r.cases[-1].message for r in result.results}
    write = "out[i] = a[i] + 10.0"
    assert f"Python line {beyond[: beyond.index(write)].count(chr(10)) + 1}: {write}" in messages["q2"]
    line = unknown[: unknown.index("= nothing[")].count("\n") + 1
    assert "'nothing' is not defined" in messages["q1"] and f"(line {line} of the cell" in messages["q1"]


SLOW = {
    "a loop in Python": ("while True:\n            pass", ""),
    "a loop without end": ("while thread >= 0:\n            out[thread] = a[thread]", "does not end"),
}


@graded
@pytest.mark.thorough
@pytest.mark.parametrize("slow", SLOW)
def test_a_kernel_without_end_is_stopped_and_the_others_are_graded(slow, tmp_path, monkeypatch, temporary):
    for question in KERNELS.values():
        monkeypatch.setattr(question, "seconds", 4)
    code, said = SLOW[slow]
    loop = edited("nb08", "q1")[0].replace("out[thread] = a[thread] + 10.0", code)
    start = time.monotonic()
    result = graded_kernels(tmp_path, {"q1": loop, "q2": edited("nb08", "q2")[0]})
    first, second = result.results[:2]
    assert first.score == 0 and said in first.cases[0].message, report.as_text(result)
    assert second.passed, report.as_text(result)
    assert time.monotonic() - start < 60 and list(temporary.iterdir()) == [] and workers() == {}


@compiles
def test_a_kernel_that_changes_its_input_earns_nothing(tmp_path, monkeypatch):
    """The norm of a row of zeros is 0: who may write to x needs no more."""
    old = "total += value * value"
    text = source("nb08", "RowNorm").replace(old, f"{old}\n                    x[row, i * self.threads + thread] = 0.0")
    kernel = kernel_from(text, "RowNorm", tmp_path, monkeypatch)
    messages = [case.message for case in KERNELS["nb08", "q10"].run(Maker(kernel), seed=0).cases]
    assert messages == ["Your kernel writes to x: only y is to be written."] * len(messages)


@pytest.mark.parametrize("missing", ["the compiler", "the isolation"])
def test_what_cannot_be_graded_is_said_and_costs_no_points(missing, tmp_path, monkeypatch):
    if missing == "the compiler":
        monkeypatch.setattr(dsl, "INSTALLED", False)
    else:
        monkeypatch.setattr(isolation, "way", lambda: (GUARD, "no namespaces"))
    result = graded_kernels(tmp_path, {"q1": edited("nb08", "q1")[0] + "\nprint(AddTen)"})
    assert [r.question for r in result.results] == ["q7", "q8"]
    (note,) = [note for note in result.notes if note.startswith("Not graded: q1 AddTen, q2 AddTenAnyLength")]
    assert "q10 RowNorm" in note and ("CuTe DSL, which is not installed here" in note) == (missing == "the compiler")
