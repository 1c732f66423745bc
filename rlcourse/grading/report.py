"""A graded notebook on paper: text, JSON, JUnit, and a CSV for a class."""

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rlcourse.checks import CaseResult
from rlcourse.grading import Report


def message(case: CaseResult) -> str:
    """What a report says of a case: nothing of why a hidden one failed."""
    return "a hidden test" if case.hidden and not case.passed else case.message


def as_text(report: Report) -> str:
    """For the terminal."""
    lines = []
    for result in report.results:
        lines.append(f"{result.question} {result.function}: {result.score:g} of {result.possible:g}")
        for case in result.cases:
            why = message(case)
            lines.append(f"  {'ok' if case.passed else 'no'}  {case.name}{': ' + why if why else ''}")
    lines += report.errors
    lines.append(f"{report.submission}: {report.score:g} of {report.possible:g} points, seed {report.seed}")
    return "\n".join(lines)


def as_dict(report: Report) -> dict[str, Any]:
    """For JSON."""
    questions = [
        {
            "question": result.question,
            "function": result.function,
            "score": result.score,
            "possible": result.possible,
            "cases": [
                {
                    "name": case.name,
                    "passed": case.passed,
                    "message": message(case),
                    "points": case.points,
                    "hidden": case.hidden,
                    "seconds": round(case.seconds, 3),
                }
                for case in result.cases
            ],
        }
        for result in report.results
    ]
    return {
        "submission": report.submission,
        "notebook": report.notebook,
        "seed": report.seed,
        "score": report.score,
        "possible": report.possible,
        "seconds": round(report.seconds, 1),
        "errors": report.errors,
        "questions": questions,
    }


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(as_dict(report), indent=1) + "\n", encoding="utf-8")


def write_junit(report: Report, path: Path) -> None:
    """JUnit's XML, as continuous integration reads it: a test case for each case of each question."""
    cases = [(result, case) for result in report.results for case in result.cases]
    failures = sum(not case.passed for _, case in cases)
    suite = ElementTree.Element("testsuite", name="rlcourse", tests=str(len(cases)), failures=str(failures))
    for result, case in cases:
        name = {"classname": result.question, "name": case.name, "time": f"{case.seconds:.3f}"}
        element = ElementTree.SubElement(suite, "testcase", name)
        if not case.passed:
            ElementTree.SubElement(element, "failure").text = printable(message(case))
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def printable(text: str) -> str:
    """Without the control characters that XML has no way to write."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def write_csv(reports: list[Report], path: Path) -> None:
    """One line a submission, one column a question."""
    questions = sorted({f"{r.notebook} {result.question}" for r in reports for result in r.results})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["submission", *questions, "score", "possible", "errors"])
        for report in reports:
            scores = {f"{report.notebook} {result.question}": result.score for result in report.results}
            line = [f"{scores[q]:g}" if q in scores else "" for q in questions]
            errors = "; ".join(report.errors)
            writer.writerow([Path(report.submission).name, *line, f"{report.score:g}", f"{report.possible:g}", errors])
