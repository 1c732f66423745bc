"""The notebooks that ship: made from the masters as they are, complete, small, and without traces of a failed run."""

import functools
import re

import nbformat
import pytest

from rlcourse.course.contents import COURSE
from rlcourse.course.widgets import explorer
from tools.notebooks import build
from tools.notebooks.execution import data_digests
from tools.notebooks.headers import header
from tools.notebooks.references import outdated

HINTS = ["Hint 1: a question", "Hint 2: the idea", "Hint 3: the shape of the answer"]
KINDS = ("notebooks", "exercises", "solutions")
TEXTS = "text/plain", "text/html", "text/markdown"
MARKER = re.compile(r" {0,3}(?:[-+*]|1[.)]) ")  # of a list that may begin in the middle of a paragraph
NOTEBOOKS = sorted(path for kind in KINDS for path in (build.ROOT / kind).glob("*.ipynb"))
pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")


@functools.cache
def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def outputs(path):
    return [output for cell in code_cells(path) for output in cell.outputs]


def master(path):
    kind = "notebooks" if path.parent.name == "notebooks" else "exercises"
    return build.ROOT / kind / "_src" / f"{path.stem}.py"


def test_it_is_what_its_master_makes(path):
    """`python -m tools.notebooks.build` after a change of a master."""
    shipped, made = read(path), build.assemble(master(path), path.parent.name)
    ran = shipped if path.parent.name != "exercises" else read(path.parents[1] / "solutions" / path.name)
    if ran is shipped:
        assert shipped.metadata["rlcourse"]["code"] == build.what_runs(made)
    build.fill_in(made, ran.metadata["rlcourse"].get("values", {}))
    assert [cell.source for cell in shipped.cells[1:]] == [cell.source for cell in made.cells[1:]]
    assert [cell.metadata for cell in shipped.cells[1:]] == [cell.metadata for cell in made.cells[1:]]
    assert shipped.cells[0].source == header(made, ran.metadata["rlcourse"]["run"])
    assert path.stem in COURSE and all((build.ROOT / kind / path.name).exists() for kind in KINDS)
    # The records that it read are those that ship, and what it says of a record or a config is what that says now.
    facts = shipped.metadata["rlcourse"]
    assert facts.get("data", {}) == data_digests(facts.get("data", {}))
    assert outdated(facts.get("values", {}), build.WITHOUT_KERNEL) == {}


def test_it_ran_in_full_and_nothing_failed(path):
    if path.parent.name == "exercises":
        assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))
        return
    assert read(path).metadata["rlcourse"]["run"].get("profile", "full") == "full"
    left_out = [cell for cell in code_cells(path) if cell.execution_count is None]
    assert all("gpu" in cell.metadata.get("tags", []) for cell in left_out)
    assert not [output for output in outputs(path) if output.output_type == "error"]


def test_it_is_small_has_no_widgets_and_tells_nothing_of_the_machine_that_made_it(path):
    """Paths of temporary folders and of the user's home, warnings of libraries, and progress bars."""
    assert path.stat().st_size <= build.MAX_BYTES and "widgets" not in read(path).metadata
    assert not [o for o in outputs(path) if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    shown = [o.get("text", "") + "".join(o.get("data", {}).get(kind, "") for kind in TEXTS) for o in outputs(path)]
    text = re.sub(r"base64,[^\"]*", "", "\n".join(shown))
    assert not re.search(r"/(tmp|home|root|work)/|Warning:|it/s\]", text)
    if path.parent.name == "notebooks":  # an explorer has its picture for readers without a kernel
        for cell in code_cells(path):
            if re.search(rf"^{explorer.__name__}\(", cell.source, re.M):
                data = [o.get("data", {}) for o in cell.outputs]
                assert [d for d in data if "image/png" in d or "<img " in d.get("text/html", "")]


def test_no_line_of_a_paragraph_begins_as_a_list_does(path):
    """Markdown would make an item of `- 1$` or `1. Both`, in the middle of a formula or of a sentence."""
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            for first, *rest in (block.splitlines() for block in re.split(r"\n\s*\n", cell.source) if block.strip()):
                is_list = MARKER.match(first) or (first.endswith(":") and MARKER.match(rest[0] if rest else ""))
                assert is_list or not [line for line in rest if MARKER.match(line)], first


def test_a_lesson_begins_and_ends_as_every_lesson_does(path):
    cells = read(path).cells
    assert cells[0].source.startswith("# ") and "colab" in cells[0].source
    assert "rlcourse" in cells[1].source and cells[1].cell_type == "code"
    if path.parent.name == "notebooks":
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        assert "**You will learn**" in cells[2].source
        places = [text.index(f"## {title}") for title in ("Check yourself", "Exercises", "Further reading")]
        assert places == sorted(places) and text.count("<details>") >= 1
        assert f"../exercises/{path.stem}.ipynb" in text


def test_a_lesson_is_short(path):
    """At most 2,500 words of prose, without tables, formulas and the reading list, and five bets."""
    if path.parent.name != "notebooks":
        pytest.skip("for lessons")
    prose = "\n".join(cell.source for cell in read(path).cells[1:] if cell.cell_type == "markdown")
    prose = re.sub(r"^\|[^\n]*$|\$\$.*?\$\$|\$.*?\$", "", prose.split("## Further reading")[0], flags=re.M | re.S)
    assert len(re.findall(r"[A-Za-z0-9][\w'’.,%-]*", prose)) <= 2500
    assert sum(len(re.findall(r"\bbet\(", cell.source)) for cell in code_cells(path)) <= 5


def test_what_a_bet_is_about_is_closed_until_asked_for(path):
    cells, waiting = code_cells(path), {}
    for at, cell in enumerate(cells):
        waiting |= dict.fromkeys(re.findall(r"^(\w+) = bet\(", cell.source, re.M), at)
    for name, first in waiting.items():
        [last] = [at for at, cell in enumerate(cells) if f"{name}.result(" in cell.source]
        shown = [output for cell in cells[first + 1 : last + 1] for output in cell.outputs]
        texts = [output.get("data", {}).get(kind) for output in shown for kind in ("text/html", "text/markdown")]
        assert last > first and shown
        assert all(t.startswith(("<details>", "> **Place your bet.**")) for t in texts if t), (name, texts)
        assert len([t for t in texts if t]) == len(shown)


def test_exercises_have_holes_hints_and_checks(path):
    if path.parent.name != "exercises":
        pytest.skip("for exercises")
    cells = read(path).cells
    holes = [i for i, cell in enumerate(cells) if "exercise" in cell.metadata.get("tags", [])]
    assert 2 <= len(holes) <= 11
    before = 0
    for number, i in enumerate(holes, 1):
        assert "raise NotImplementedError" in cells[i].source and "SOLUTION" not in cells[i].source
        assert cells[i + 1].source.startswith(f"check.q{number}(")
        text = "\n".join(cell.source for cell in cells[before:i] if cell.cell_type == "markdown")
        hints = re.findall(r"<summary>(Hint.*?)</summary>", text)
        assert len(hints) == 3 and "●" in text and "minutes" in text
        assert hints == HINTS
        before = i
