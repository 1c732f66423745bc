"""Masters to notebooks: `python -m tools.notebooks.build [NAMES...] [--force]`.

`notebooks/_src/NN_topic.py` becomes `notebooks/NN_topic.ipynb`, executed. `exercises/_src/NN_topic.py` becomes
`exercises/NN_topic.ipynb`, with holes and no outputs, and `solutions/NN_topic.ipynb`, executed. A notebook whose code,
references and records did not change keeps the outputs it has, so that a rebuild without a change is byte-identical;
`--force` runs it anyway. Notebooks run in the Python that runs the build. Those built under RLCOURSE_PROFILE=smoke are
run again in full.

Masters are jupytext py:percent files. What stands between `# BEGIN SOLUTION` and `# END SOLUTION` becomes a hole in
exercises; cells tagged `solution` or `exercise-only` are for one kind alone. The code of a cell tagged `hide-input` is
folded away: its first line is a title, `# @title WORDS`, which is what Colab shows of it. Cells tagged `gpu` run where
there is a GPU; elsewhere they keep the outputs of their last run, and are listed if their source changed since. Numbers
in the prose: see `tools.notebooks.references`.
"""

import argparse
import hashlib
import re
from pathlib import Path

import jupytext
import nbformat
import torch

from rlcourse.config import make_config
from rlcourse.course import profile
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.measure.records import load_record
from tools.notebooks.execution import data_digests, execute, hide_results
from tools.notebooks.headers import BOOTSTRAP, header
from tools.notebooks.references import fill, outdated, references

ROOT = Path(__file__).resolve().parents[2]
SOLUTION = re.compile(r"^([ \t]*)# BEGIN SOLUTION[^\n]*\n(.*?)^[ \t]*# END SOLUTION[^\n]*\n?", re.M | re.S)
MARK = re.compile(r"^[ \t]*# (BEGIN|END) SOLUTION", re.M)
FOLDED = "hide-input"  # the site folds cells of this tag by itself
MAX_BYTES = 1_000_000
# What references use that need no kernel: they are evaluated again at each build and each test.
WITHOUT_KERNEL = {"load_curve": load_curve, "load_record": load_record, "make_config": make_config}


def build(master: Path, force: bool = False) -> list[str]:
    """Make the notebooks of one master. Returns a sentence for each thing that somebody should look at."""
    if master.parent.parent.name == "notebooks":
        notebook, notes = executed(master, "notebooks", force)
        write(notebook, notebook.metadata["rlcourse"])
        return notes
    solution, notes = executed(master, "solutions", force)
    write(solution, solution.metadata["rlcourse"])
    write(assemble(master, "exercises"), solution.metadata["rlcourse"])
    return notes


def assemble(master: Path, kind: str) -> nbformat.NotebookNode:
    """The notebook of one kind without outputs: place for the header, bootstrap cell, then the master's cells.

    Raises ValueError for a solution that begins and does not end, and for a folded cell without a title.
    """
    cells = [nbformat.v4.new_markdown_cell(""), nbformat.v4.new_code_cell(BOOTSTRAP)]
    for cell in jupytext.read(master).cells:
        tags = cell.metadata.get("tags", [])
        if (kind == "exercises" and "solution" in tags) or (kind == "solutions" and "exercise-only" in tags):
            continue
        cell.source = SOLUTION.sub(hole if kind == "exercises" else shown, cell.source + "\n").rstrip("\n")
        if MARK.search(cell.source):
            raise ValueError(f"{master.name}: BEGIN SOLUTION and END SOLUTION must come in pairs: {cell.source[:60]!r}")
        cell.metadata = nbformat.NotebookNode({"tags": tags} if tags else {})
        if FOLDED in tags:
            if not cell.source.startswith("# @title "):
                raise ValueError(f"{master.name}: a folded cell begins with `# @title WORDS`: {cell.source[:60]!r}")
            cell.metadata |= {"jupyter": {"source_hidden": True}, "cellView": "form"}  # JupyterLab, Colab
        cells.append(cell)
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["rlcourse"] = {"name": master.stem, "kind": kind}
    return notebook


def write(notebook: nbformat.NotebookNode, made: dict) -> None:
    """Fill in the numbers of the prose, add the header and the cell ids, and write the file.

    made: what is known of the run: run and values. Raises ValueError for a notebook of over 1 MB.
    """
    name, kind = notebook.metadata["rlcourse"]["name"], notebook.metadata["rlcourse"]["kind"]
    fill_in(notebook, made.get("values", {}))
    notebook.cells[0].source = header(notebook, made["run"])
    set_ids(notebook, f"{kind}/{name}")
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{kind}/{name} is over 1 MB ({len(text.encode()):,} bytes): make its figures smaller.")
    path = ROOT / kind / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def fill_in(notebook: nbformat.NotebookNode, values: dict[str, str]) -> None:
    """Put the values of the references into the prose."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = fill(cell.source, values)


def hole(match: re.Match) -> str:
    return f"{match[1]}# YOUR CODE HERE\n{match[1]}raise NotImplementedError\n"


def shown(match: re.Match) -> str:
    return match[2]


def set_ids(notebook: nbformat.NotebookNode, name: str) -> None:
    """Cell ids made of what the cells say, so that they do not change from build to build."""
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = source_hash(name + cell.cell_type + cell.source)[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def source_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def executed(master: Path, kind: str, force: bool) -> tuple[nbformat.NotebookNode, list[str]]:
    """The notebook with outputs: those it has if no code changed, else of a run. And what is stale."""
    notebook = assemble(master, kind)
    path = ROOT / kind / f"{master.stem}.ipynb"
    old = nbformat.read(path, as_version=4) if path.exists() else None
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    digest = what_runs(notebook)
    known = {} if old is None else old.metadata.get("rlcourse", {})
    on_gpu = [c for c in code if "gpu" in c.metadata.get("tags", [])]
    same = known.get("code") == digest and known.get("data", {}) == data_digests(known.get("data", {}))
    same = same and not outdated(known.get("values", {}), WITHOUT_KERNEL)
    if same and known["run"].get("profile", "full") == profile() and not force:
        for cell, before in zip(code, [c for c in old.cells if c.cell_type == "code"], strict=True):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
        made = {name: known[name] for name in ("run", "values", "data") if name in known}
    else:
        left_out = [] if torch.cuda.is_available() else on_gpu
        made = execute(notebook, left_out, ROOT)
        run = made["run"]
        print(f"{kind}/{master.stem}: {run['seconds']:.0f} s, {run['peak_memory_bytes'] / 1e9:.1f} GB", flush=True)
        carry_forward(left_out, old)
    hide_results(notebook)
    notebook.metadata["rlcourse"] |= {"code": digest} | made
    return notebook, [
        f"{kind}/{path.name}: no output of a GPU for the cell that begins {cell.source.splitlines()[0]!r}"
        for cell in on_gpu
        if cell.execution_count is None
    ]


def what_runs(notebook: nbformat.NotebookNode) -> str:
    """A digest of the code cells and the references: while it is the same, outputs and numbers are."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    asked = [r for cell in notebook.cells if cell.cell_type == "markdown" for r in references(cell.source)]
    return source_hash("\n\0".join(sources + asked))


def carry_forward(left_out: list, old: nbformat.NotebookNode | None) -> None:
    """Give cells that need a GPU the outputs they had, if their source is what it was."""
    before = {} if old is None else {c.source: c for c in old.cells if c.cell_type == "code"}
    for cell in left_out:
        if cell.source in before:
            cell.outputs, cell.execution_count = before[cell.source].outputs, before[cell.source].execution_count


def masters(names: list[str]) -> list[Path]:
    """The masters called `names`, or all. Raises ValueError for one that does not exist."""
    found = sorted(ROOT.glob("notebooks/_src/*.py")) + sorted(ROOT.glob("exercises/_src/*.py"))
    for name in names:
        if not any(path.stem == name for path in found):
            raise ValueError(f"There is no master {name!r}: use {', '.join(sorted({p.stem for p in found}))}.")
    return [path for path in found if not names or path.stem in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="masters, like 02_ppo; all if none are given")
    parser.add_argument("--force", action="store_true", help="run notebooks whose code did not change, too")
    options = parser.parse_args()
    notes = [note for master in masters(options.names) for note in build(master, options.force)]
    print("\n".join(notes) or "Nothing is stale.")


if __name__ == "__main__":
    main()
