"""The first cell of every notebook: its title, the badge that opens it in Colab, its difficulty, what it takes to read
and to run.

Run time and memory are those of the run that made the notebook's outputs; `rlcourse.course.dev.build` measures them.
"""

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcourse.course import REPOSITORY, colab_url

if TYPE_CHECKING:  # a lesson shows COURSE where nbformat is not installed
    from nbformat import NotebookNode


@dataclass(frozen=True)
class Lesson:
    """An entry of the course: its title, how hard it is from 1 to 5, and what the reader holds at the end."""

    title: str
    difficulty: int
    holds: str


COURSE = {
    "00_start_here": Lesson(
        "Start here", 1, "a working machine, the map, a small model that fails, and what training changes in it"
    ),
    "01_policy_gradient": Lesson(
        "The policy gradient",
        2,
        "the whole training loop in 25 lines: run, derived, broken, and fixed with a baseline",
    ),
    "02_ppo": Lesson(
        "PPO",
        3,
        "many steps from one rollout, broken and fixed: ratio, clip, critic, GAE; a KL to be trusted",
    ),
    "03_grpo": Lesson(
        "GRPO", 3, "the critic deleted, the group in its place; a thousandth of a point that ruins a run, and the cure"
    ),
    "04_dr_grpo": Lesson(
        "Dr. GRPO: two biases and two deletions",
        4,
        "why GRPO can lead first and lose later; the biases of length and difficulty; a map of the family",
    ),
    "05_full_loop": Lesson(
        "The full loop",
        3,
        "your loop found again in the package; a verifier hacked and closed; curves diagnosed; what a rented GPU costs",
    ),
    "06_where_time_goes": Lesson(
        "Where the time goes", 4, "what each cure can bring, before you try it: ceilings, traces, the floor of a step"
    ),
    "07_static_cache": Lesson(
        "From generate to one CUDA graph a step",
        4,
        "the ladder of decoding, every rung explained; a CUDA graph of your own in 20 lines",
    ),
    "08_first_kernels": Lesson(
        "First kernels in CuTe DSL",
        4,
        "a whole CuTe program; warps, layouts, banks; six small kernels and RMSNorm at the speed of memory",
    ),
    "09_decode_attention": Lesson(
        "Decode attention in one kernel",
        5,
        "online softmax, splits, tensor cores; RoPE and the cache write in the same launch",
    ),
    "10_faster_kernel_slower_loop": Lesson(
        "A faster kernel, a slower loop", 4, "a kernel that wins alone and loses in generate: why, and the way back"
    ),
    "11_engine_for_rl": Lesson(
        "An engine for RL", 4, "a cache in blocks and its schedule; what an update invalidates; one token, one number"
    ),
    "12_update_phase": Lesson(
        "The update phase",
        4,
        "where its seconds and gigabytes go; logits that are never all in memory; two backward passes by hand",
    ),
    "13_sft_and_lora": Lesson(
        "SFT and LoRA before RL", 3, "a start for a model that earns nothing; how much SFT, how much rank, and why"
    ),
    "14_kernel_writer": Lesson(
        "A model that writes kernels",
        4,
        "a language, a compiler and a clock; a policy that learns to fuse; a judge that is cheated",
    ),
    "15_scale_out": Lesson(
        "Scale out",
        3,
        "two processes train one model, by hand; an all-reduce; when it pays; how old a sampler's weights may be",
    ),
}

BADGE = "https://colab.research.google.com/assets/colab-badge.svg"


WORDS_A_MINUTE, LINES_A_MINUTE = 150, 12  # of technical prose, and of code that is not folded away


def header(notebook: "NotebookNode", run: dict) -> str:
    """Markdown of the first cell. run: as in `measured`.

    Raises ValueError for a notebook that `COURSE` does not list.
    """
    name, kind = notebook.metadata["rlcourse"]["name"], notebook.metadata["rlcourse"]["kind"]
    if name not in COURSE:
        raise ValueError(f"{name} is not part of the course yet: add it to COURSE in rlcourse/course/dev/headers.py.")
    lesson = COURSE[name]
    path = f"{kind}/{name}.ipynb"
    title = f"# {name[:2]} · {lesson.title}" + ("" if kind == "notebooks" else f": {kind}")
    badge = f"[![Open in Colab]({BADGE})]({colab_url(path)}) [`{path}`](https://github.com/{REPOSITORY})"
    minutes = stated_minutes(notebook) if kind == "exercises" else reading_minutes(notebook)
    return f"{title}\n\n{badge}\n\n{measured(lesson, run, minutes, 'solve' if kind == 'exercises' else 'read')}"


def reading_minutes(notebook: "NotebookNode") -> int:
    """Minutes that a reader needs for the words and for the code that is in view, to the next five."""
    words = lines = 0
    for cell in notebook.cells[2:]:  # behind the header and the cell that installs the package
        if cell.cell_type == "markdown":
            words += len(re.findall(r"\w+", cell.source))
        elif "source_hidden" not in cell.metadata.get("jupyter", {}):
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    return 5 * math.ceil((words / WORDS_A_MINUTE + lines / LINES_A_MINUTE) / 5)


def stated_minutes(notebook: "NotebookNode") -> int:
    """Minutes of all exercises, as each says: `●●○○○ · 10 minutes`."""
    text = "\n".join(cell.source for cell in notebook.cells[1:] if cell.cell_type == "markdown")
    return sum(map(int, re.findall(r"○* · (\d+) minutes", text)))


def measured(lesson: Lesson, run: dict, minutes: int, what: str) -> str:
    """A table of difficulty, the reader's minutes, and minutes and peak memory of a run.

    run: {seconds, peak_memory_bytes, device, date} of the run that made the outputs. what: what the reader does.
    """
    running = "under 1" if run["seconds"] < 60 else f"{run['seconds'] / 60:.0f}"
    memory = f"{run['peak_memory_bytes'] / 1e9:.1f} GB"
    dots = "●" * lesson.difficulty + "○" * (5 - lesson.difficulty)
    return (
        f"| difficulty | minutes to {what} | minutes to run on 2 CPU cores | on a T4 or an A10G | peak memory |\n"
        "| --- | --- | --- | --- | --- |\n"
        f"| {dots} | {minutes} | {running} | not measured | {memory} |\n\n"
        f"Run time and memory: one run of all cells on {run['device']}, {run['date']}."
    )
