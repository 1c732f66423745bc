"""Masters to notebooks: `python -m rlcourse.course.dev.build [NAMES...] [--force]`.

`notebooks/_src/NN_topic.py` becomes `notebooks/NN_topic.ipynb`, executed. `exercises/_src/NN_topic.py` becomes
`exercises/NN_topic.ipynb`, with holes and no outputs, and `solutions/NN_topic.ipynb`, executed. A notebook whose code
did not change keeps the outputs it has, so that a rebuild without a change is byte-identical; `--force` runs it anyway.
Notebooks run in the Python that runs the build. Those built under RLCOURSE_PROFILE=smoke are run again in full.

Masters are jupytext py:percent files. What stands between `# BEGIN SOLUTION` and `# END SOLUTION` becomes a hole in
exercises; cells tagged `solution` or `exercise-only` are for one kind alone. Cells tagged `gpu` run where there is a
GPU; elsewhere they keep the outputs of their last run, and are listed if their source changed since.
"""

import argparse
import copy
import datetime
import hashlib
import os
import re
import time
from pathlib import Path

import jupytext
import nbformat
import torch
from nbclient import NotebookClient

from rlcourse.course import BOOTSTRAP, profile
from rlcourse.course.dev.headers import header
from rlcourse.measure.records import device_name

ROOT = Path(__file__).resolve().parents[3]
SOLUTION = re.compile(r"^([ \t]*)# BEGIN SOLUTION[^\n]*\n(.*?)^[ \t]*# END SOLUTION[^\n]*\n?", re.M | re.S)
MARK = re.compile(r"^[ \t]*# (BEGIN|END) SOLUTION", re.M)
MAX_BYTES = 1_000_000
CELL_SECONDS = 3600


def build(master: Path, force: bool = False) -> list[str]:
    """Make the notebooks of one master. Returns a sentence for each thing that somebody should look at."""
    if master.parent.parent.name == "notebooks":
        notebook, notes = executed(master, "notebooks", force)
        write(notebook, notebook.metadata["rlcourse"]["run"])
        return notes
    solution, notes = executed(master, "solutions", force)
    write(solution, solution.metadata["rlcourse"]["run"])
    write(assemble(master, "exercises"), solution.metadata["rlcourse"]["run"])
    return notes


def assemble(master: Path, kind: str) -> nbformat.NotebookNode:
    """The notebook of one kind without outputs: place for the header, bootstrap cell, then the master's cells.

    Raises ValueError for a solution that begins and does not end.
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
        cells.append(cell)
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["rlcourse"] = {"name": master.stem, "kind": kind}
    return notebook


def write(notebook: nbformat.NotebookNode, run: dict) -> None:
    """Add the header and the cell ids, and write the file. Raises ValueError for a notebook of over 1 MB."""
    name, kind = notebook.metadata["rlcourse"]["name"], notebook.metadata["rlcourse"]["kind"]
    notebook.cells[0].source = header(name, kind, run)
    set_ids(notebook, f"{kind}/{name}")
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"{kind}/{name} is over 1 MB ({len(text.encode()):,} bytes): make its figures smaller.")
    path = ROOT / kind / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


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
    digest = source_hash("\n\0".join(cell.source for cell in code))
    known = {} if old is None else old.metadata.get("rlcourse", {})
    on_gpu = [c for c in code if "gpu" in c.metadata.get("tags", [])]
    if known.get("code") == digest and known["run"].get("profile", "full") == profile() and not force:
        for cell, before in zip(code, [c for c in old.cells if c.cell_type == "code"], strict=True):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
        run = known["run"]
    else:
        left_out = [] if torch.cuda.is_available() else on_gpu
        run = execute(notebook, left_out)
        print(f"{kind}/{master.stem}: {run['seconds']:.0f} s, {run['peak_memory_bytes'] / 1e9:.1f} GB", flush=True)
        carry_forward(left_out, old)
    notebook.metadata["rlcourse"] |= {"code": digest, "run": run}
    return notebook, [
        f"{kind}/{path.name}: no output of a GPU for the cell that begins {cell.source.splitlines()[0]!r}"
        for cell in on_gpu
        if cell.execution_count is None
    ]


# The kernel's own peak, in kB. ru_maxrss would count this process, from which the kernel was forked.
PEAK_MEMORY = """\
import pathlib, re, resource
status = pathlib.Path("/proc/self/status")
peak = re.search(r"VmHWM:\\s+(\\d+)", status.read_text()) if status.exists() else None
print(peak[1] if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""


def execute(notebook: nbformat.NotebookNode, left_out: list) -> dict:
    """Run all cells but those left out, in the repository's root, and tidy their outputs.

    Returns seconds, peak memory of the kernel, device, date and profile. Raises CellExecutionError where a cell does.
    """
    running = copy.copy(notebook)
    running.cells = [c for c in notebook.cells if not any(c is other for other in left_out)]
    memory = nbformat.v4.new_code_cell(PEAK_MEMORY)
    running.cells.append(memory)
    # Pictures in place of widgets; a solution that fails its own check stops the build.
    environment = os.environ | {"RLCOURSE_STATIC": "1", "RLCOURSE_STRICT": "1"}
    resources = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(running, timeout=CELL_SECONDS, kernel_name="python3", resources=resources)
    # Without installed kernels, one of which may be called python3 and be another Python, only this Python is left.
    client.create_kernel_manager().kernel_spec_manager.kernel_dirs = []
    start = time.perf_counter()
    client.execute(env=environment)
    seconds = time.perf_counter() - start
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}  # the kernel adds its version
    for cell in running.cells[:-1]:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(tidy, joined(cell.outputs)) if output is not None]
    return {
        "seconds": round(seconds),
        "peak_memory_bytes": 1024 * int(memory.outputs[0].text),
        "device": device_name(),
        "date": datetime.date.today().isoformat(),
        "profile": profile(),
    }


def joined(outputs: list) -> list:
    """The outputs with text that arrived in pieces in one piece."""
    whole: list = []
    for output in outputs:
        before = whole[-1] if whole else {}
        if output.output_type == "stream" and output.name == before.get("name"):
            before.text += output.text
        else:
            whole.append(output)
    return whole


PROGRESS_BAR = re.compile(r"\d+%\|.*\||\b\d+it \[\d\d:\d\d")


def tidy(output):
    """An output without progress bars; None if nothing is left of it, or for a widget: on paper it shows nothing."""
    if output.output_type != "stream":
        return None if "application/vnd.jupyter.widget-view+json" in output.get("data", {}) else output
    lines = [line.rsplit("\r", 1)[-1] for line in output.text.split("\n")]
    output.text = "\n".join(line for line in lines if not PROGRESS_BAR.search(line))
    return output if output.text.strip() else None


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
