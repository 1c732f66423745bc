"""The answers that all checks are tried with: the solutions of the masters, and the tables of the lessons' modules.

answers_nbNN.py has those of lesson NN:
RIGHT: {question: a right answer, written in another way than the solution and the check's own}
WRONG: {question: {mistake: function, or (function, what the card must say)}}, beside those that the check itself names
EDITS: {question: {mistake: (piece of a kernel's solution, what replaces it, what the card must say or None)}}
"""

import ast
import functools
import importlib
import linecache
import sys
from pathlib import Path
from types import ModuleType

from rlcourse.course.checks import questions
from tools.notebooks.build import ROOT

MASTERS = {f"nb{path.name[:2]}": path for path in sorted((ROOT / "exercises" / "_src").glob("*.py"))}
ASKED = {(lesson, question.name): question for lesson in MASTERS for question in questions(lesson)}
KERNELS = {which: question for which, question in ASKED.items() if question.caller.kernels}
QUESTIONS = [which for which in ASKED if which not in KERNELS]


def asked(lesson: str, question: str):
    return ASKED[lesson, question]


def tables(lesson: str) -> ModuleType:
    return importlib.import_module(f"answers_{lesson}")


def another(lesson: str, question: str):
    """A right answer beside the solution, None for a question without one."""
    return getattr(tables(lesson), "RIGHT", {}).get(question)


def wrong_answers(lesson: str, question: str) -> dict[str, tuple]:
    """{mistake: (function, what the card must say or "")}: the check's own mistakes, and those of the tables.

    Where several mistakes are left the card names one of them, maybe in another choice that gives the same numbers.
    """
    found = {}
    for sentence, function in asked(lesson, question).mistakes.items():
        if sentence[0] in "3456":  # so many mistakes are left
            continue
        found[sentence] = function, " left" if "mistakes are left" in sentence else sentence
    for name, entry in getattr(tables(lesson), "WRONG", {}).get(question, {}).items():
        found[name] = entry if isinstance(entry, tuple) else (entry, "")
    return found


def ruled(function, sentences: dict[str, str], keyword: str = "rule") -> dict[str, tuple]:
    """Entries of WRONG: `function` with one rule broken, which the card must name. sentences: {rule: sentence}."""
    return {name: (functools.partial(function, **{keyword: name}), said) for name, said in sentences.items()}


@functools.cache
def source(lesson: str, name: str) -> str:
    """What a master's function or class needs to run alone: its text, the imports, and what it uses of the master."""
    text = MASTERS[lesson].read_text(encoding="utf-8")
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    defined = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {n.id: node for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    needed, names = set(), [name]
    while names:
        node = defined.get(names.pop())
        if node is not None and node not in needed:
            needed.add(node)
            names += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    lines = text.split("\n")
    parts = []
    for node in body:
        if node in imports or node in needed:
            first = min(line.lineno for line in [node, *getattr(node, "decorator_list", [])])
            last = node.end_lineno
            while lines[last].strip() == "# END SOLUTION":
                last += 1
            parts.append("\n".join(lines[first - 1 : last]))
    return "\n".join(parts) + "\n"


@functools.cache
def given(lesson: str, name: str):
    """A function of a master."""
    file = f"<{name} of {lesson}>"
    text = source(lesson, name)
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    names = {}
    exec(compile(text, file, "exec"), names)
    return names[name]


def solution(lesson: str, question: str):
    return given(lesson, asked(lesson, question).function)


def solved(lesson: str, question: str, change):
    """The solution, with something done to its result."""
    return lambda *arguments: change(solution(lesson, question)(*arguments))


def edited(lesson: str, question: str, mistake: str = "") -> tuple[str, str | None]:
    """A kernel's solution with an edit, in what the reader writes if it is there; and what the card must say of it."""
    text = source(lesson, KERNELS[lesson, question].function)
    if not mistake:
        return text, None
    old, new, said = tables(lesson).EDITS[question][mistake]
    head, mark, own = text.rpartition("# BEGIN SOLUTION")
    assert old in text, "this mistake can no longer be made: write another one"
    return head + mark + own.replace(old, new, 1) if old in own else text.replace(old, new, 1), said


def kernel_from(text: str, name: str, folder: Path, monkeypatch) -> type:
    """A kernel's class from its source, which CuTe DSL reads from a file."""
    module = f"kernel_{folder.name}"
    (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        sys.modules.pop(module, None)
