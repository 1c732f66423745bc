"""Run a notebook: its cells, the references in its prose, and what shall be known of the run; then tidy its outputs."""

import base64
import copy
import datetime
import hashlib
import html
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

from rlcourse.course import profile
from rlcourse.measure.records import device_name
from rlcourse.paths import data_folder
from tools.notebooks.references import probe, read_values, references

CELL_SECONDS = 3600

# Of the kernel: its own peak, in kB (ru_maxrss would count this process, from which it was forked), and the records it
# has read.
AT_THE_END = """\
import json, pathlib, re, resource, sys
status = pathlib.Path("/proc/self/status")
peak = re.search(r"VmHWM:\\s+(\\d+)", status.read_text()) if status.exists() else None
peak = int(peak[1] if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
records = sys.modules.get("rlcourse.measure.records")
print(json.dumps([peak, [str(path) for path in sorted(records.loaded)] if records else []]))"""


def execute(notebook: nbformat.NotebookNode, left_out: list, root: Path) -> dict:
    """Run all cells but those left out, in the folder `root`, and tidy their outputs.

    Returns run: seconds, peak memory of the kernel, device, date and profile; values: of the references; data: digests
    of the records that were read. The last two only where there are any. Raises CellExecutionError where a cell does.
    """
    running, probes = copy.copy(notebook), []
    running.cells = []
    for cell in notebook.cells:
        if any(cell is other for other in left_out):
            continue
        running.cells.append(cell)
        if cell.cell_type == "markdown" and references(cell.source):
            probes.append(nbformat.v4.new_code_cell(probe(cell.source, enforce=profile() == "full")))
            running.cells.append(probes[-1])
    end = nbformat.v4.new_code_cell(AT_THE_END)
    running.cells.append(end)
    # Pictures in place of widgets; a solution that fails its own check stops the build.
    environment = os.environ | {"RLCOURSE_STATIC": "1", "RLCOURSE_STRICT": "1"}
    resources = {"metadata": {"path": str(root)}}
    client = NotebookClient(running, timeout=CELL_SECONDS, kernel_name="python3", resources=resources)
    # Without installed kernels, one of which may be called python3 and be another Python, only this Python is left.
    client.create_kernel_manager().kernel_spec_manager.kernel_dirs = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:  # without a loop of the author's own
        client.execute(env=environment | {"RLCOURSE_MY_LOOP": f"{folder}/my_loop.py"})
    seconds = time.perf_counter() - start
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}  # the kernel adds its version
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(tidy, joined(cell.outputs)) if output is not None]
    count_cells(notebook)
    peak, loaded = json.loads(end.outputs[0].text)
    run = {
        "seconds": round(seconds),
        "peak_memory_bytes": 1024 * peak,
        "device": device_name(),
        "date": datetime.date.today().isoformat(),
        "profile": profile(),
    }
    values = read_values([cell.outputs[0].text for cell in probes])
    data = data_digests(Path(path).relative_to(data_folder()).as_posix() for path in loaded)
    return {"run": run} | ({"values": values} if values else {}) | ({"data": data} if data else {})


def count_cells(notebook: nbformat.NotebookNode) -> None:
    """Number the cells that ran as if the build had run nothing between them."""
    ran = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count is not None]
    for number, cell in enumerate(ran, start=1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number


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
    """An output without progress bars and with small pictures; None if nothing is left of it, or for a widget: on paper
    it shows nothing."""
    if output.output_type != "stream":
        data = output.get("data", {})
        if "image/png" in data:
            data["image/png"] = smaller(data["image/png"])
        return None if "application/vnd.jupyter.widget-view+json" in data else output
    lines = [line.rsplit("\r", 1)[-1] for line in output.text.split("\n")]
    output.text = "\n".join(line for line in lines if not PROGRESS_BAR.search(line))
    return output if output.text.strip() else None


BET, RESULT = "> **Place your bet.**", "<details>"  # how what `Bet` shows begins, in a notebook that ships


def hide_results(notebook: nbformat.NotebookNode) -> None:
    """Put each output between a bet and its result, that cell's included, into a closed <details>, which readers of the
    shipped notebook and of the site open when they like."""
    waiting: set[str] = set()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if waiting:
                cell.outputs = [closed(output) for output in cell.outputs]
            waiting -= {name for name in waiting if f"{name}.result(" in cell.source}
            waiting |= set(re.findall(r"^(\w+) = bet\(", cell.source, re.M))


def closed(output):
    data = output.get("data", {})
    kind = "text/markdown" if "text/markdown" in data else "text/html"
    text = data.get(kind, "")
    if text.startswith((BET, RESULT)):
        return output
    if "image/png" in data:
        text = f'<img src="data:image/png;base64,{data["image/png"]}">'
    elif output.output_type == "stream":
        text = f"<pre>{html.escape(output.text)}</pre>"
    text = f"<details><summary>Open after your bet</summary>\n\n{text}\n\n</details>"
    return nbformat.v4.new_output("display_data", {kind: text})


def smaller(png: str) -> str:
    """A picture (PNG in base64) with a palette of 256 colours, a third of the bytes: enough for a diagram."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT).save(buffer, format="png", optimize=True)
    found = base64.b64encode(buffer.getvalue()).decode()
    return found if len(found) < len(png) else png


def data_digests(names: Iterable[str]) -> dict[str, str]:
    """A digest of each of these files of the data folder, "" for one that is gone."""
    paths = {name: data_folder() / name for name in names}
    return {name: hashlib.sha256(p.read_bytes()).hexdigest()[:12] if p.exists() else "" for name, p in paths.items()}
