"""Graded notebooks on paper: text, JUnit's XML, and a CSV for a class."""

import csv
import io
import sys
from pathlib import Path
from xml.etree import ElementTree

from rlcourse.course.checks import CaseResult
from rlcourse.course.grading.grade import Report, grade, grade_folder, printable
from rlcourse.files import write_text


def run_grade(submission: Path, junit: Path | None = None, csv_file: Path | None = None, **options) -> None:
    """`rlcourse grade`: print what a notebook, or each notebook of a folder, earned, and write what is asked for, after
    each notebook. csv_file: grades.csv for a folder if not given. options: as `grade` has them."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a sign that a reader used
    folder, reports = submission.is_dir(), []
    csv_file = csv_file or (Path("grades.csv") if folder else None)
    for report in grade_folder(submission, **options) if folder else [grade(submission, **options)]:
        reports.append(report)
        if csv_file:
            write_csv(reports, csv_file)
        if junit:
            write_junit(reports, junit)
        print(as_line(report) if folder else as_text(report), flush=True)
    if not folder:
        return
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    print("\n".join([*notes, f"{len(reports)} notebooks, seed {report.seed}: {csv_file}"]))


def save(path: Path, text: str) -> None:
    """Write a file. Raises OSError for a link, which may lead to a file of somebody else's."""
    if path.is_symlink() and not str(path).startswith("/dev/"):
        raise OSError(f"{path} is a link: remove it, or name another file.")
    write_text(path, text)


def message(case: CaseResult) -> str:  # nothing of why a hidden one failed
    return "a hidden test" if case.hidden and not case.passed else printable(case.message)


def as_text(report: Report) -> str:
    lines = []
    for result in report.results:
        lines.append(f"{result.question} {result.function}: {result.score:g} of {result.possible:g}")
        cases = ((case, message(case)) for case in result.cases)
        lines += [f"  {'ok' if c.passed else 'no'}  {c.name}{': ' + why if why else ''}" for c, why in cases]
    return "\n".join([*lines, *report.errors, *report.notes, f"{as_line(report)}, seed {report.seed}"])


def as_line(report: Report) -> str:
    if not report.results:
        return f"{report.submission}: {'; '.join(report.errors)}"
    return f"{report.submission}: {report.score:g} of {report.possible:g} points"


def write_junit(reports: list[Report], path: Path) -> None:
    """JUnit's XML: a suite for each submission, a test case for each case."""
    root = ElementTree.Element("testsuites", name="rlcourse")
    for report in reports:
        cases = [(result, case) for result in report.results for case in result.cases]
        errors = [] if report.results else report.errors
        failures = sum(not case.passed for _, case in cases)
        counts = {"tests": len(cases) + len(errors), "failures": failures, "errors": len(errors)}
        counts = {name: str(count) for name, count in counts.items()}
        suite = ElementTree.SubElement(root, "testsuite", counts, name=report.submission)
        for result, case in cases:
            name = {"classname": f"{report.notebook}.{result.question}", "name": case.name}
            element = ElementTree.SubElement(suite, "testcase", name, time=f"{case.seconds:.3f}")
            if not case.passed:
                ElementTree.SubElement(element, "failure").text = message(case)
        for error in errors:
            element = ElementTree.SubElement(suite, "testcase", classname="notebook", name="can be graded")
            ElementTree.SubElement(element, "error").text = error
    save(path, ElementTree.tostring(root, encoding="unicode", xml_declaration=True))


def write_csv(reports: list[Report], path: Path) -> None:
    """One row a submission, one column a question."""
    questions = sorted({f"{r.notebook} {result.question}" for r in reports for result in r.results})
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["submission", *questions, "total", "possible", "seed", "errors"])
    for report in reports:
        scores = {f"{report.notebook} {result.question}": f"{result.score:g}" for result in report.results}
        row = [scores.get(question, "") for question in questions]
        name = report.submission if report.submission[:1].isalnum() else f"'{report.submission}"  # no formula
        errors = "; ".join(report.errors)
        writer.writerow([name, *row, f"{report.score:g}", f"{report.possible:g}", report.seed, errors])
    save(path, file.getvalue())
