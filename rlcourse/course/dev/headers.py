"""The first cell of every notebook: its title, the badge that opens it in Colab, its difficulty, and what a run takes.

Minutes and memory are those of the run that made the notebook's outputs; `rlcourse.course.dev.build` measures them.
"""

from dataclasses import dataclass

from rlcourse.course import REPOSITORY, colab_url


@dataclass(frozen=True)
class Lesson:
    """An entry of the course: its title, how hard it is from 1 to 5, and what the reader holds at the end."""

    title: str
    difficulty: int
    holds: str


COURSE = {
    "00_start_here": Lesson(
        "Start here", 1, "a working machine, the map, the embedded task solved badly by the model that ships"
    ),
    "01_policy_gradient": Lesson(
        "The policy gradient", 2, "a verifier as reward; REINFORCE with and without a baseline; its variance measured"
    ),
    "02_ppo": Lesson("PPO", 3, "value head, GAE, ratio, clip, KL to a reference: each built, then imported"),
    "03_grpo": Lesson("GRPO", 3, "the critic deleted; the group as a baseline; groups without signal"),
    "04_dr_grpo": Lesson(
        "Dr. GRPO: two biases and two deletions",
        4,
        "the biases of length and difficulty, derived and shown; a map of the family",
    ),
    "05_full_loop": Lesson(
        "The full loop", 3, "training end to end; reading the curves; what goes wrong; GSM8K on a GPU"
    ),
    "06_where_time_goes": Lesson(
        "Where the time goes", 4, "phase times, traces, the floor of a step; why decoding is slow and the update is not"
    ),
    "07_static_cache": Lesson(
        "From generate to one CUDA graph a step", 4, "the ladder of decoding, every rung measured and explained"
    ),
    "08_first_kernels": Lesson(
        "First kernels in CuTe DSL",
        4,
        "layouts, tiles, threads; RMSNorm and SwiGLU against the bandwidth floor",
    ),
    "09_decode_attention": Lesson(
        "Decode attention in one kernel",
        5,
        "online softmax, splits, tensor cores; the whole step fused",
    ),
    "10_faster_kernel_slower_loop": Lesson(
        "A faster kernel, a slower loop", 4, "a kernel that wins alone and loses in generate: why, and the way back"
    ),
}

BADGE = "https://colab.research.google.com/assets/colab-badge.svg"


def header(name: str, kind: str, run: dict | None) -> str:
    """Markdown of the first cell. kind: notebooks, exercises or solutions. run: as in `measured`.

    Raises ValueError for a notebook that `COURSE` does not list.
    """
    if name not in COURSE:
        raise ValueError(f"{name} is not part of the course yet: add it to COURSE in rlcourse/course/dev/headers.py.")
    lesson = COURSE[name]
    path = f"{kind}/{name}.ipynb"
    title = f"# {name[:2]} · {lesson.title}" + ("" if kind == "notebooks" else f": {kind}")
    badge = f"[![Open in Colab]({BADGE})]({colab_url(path)}) [`{path}`](https://github.com/{REPOSITORY})"
    return f"{title}\n\n{badge}\n\n{measured(lesson, run)}"


def measured(lesson: Lesson, run: dict | None) -> str:
    """A table of difficulty, minutes and peak memory.

    run: {seconds, peak_memory_bytes, device, date} of the run that made the outputs; None before one.
    """
    minutes = memory = "not run yet"
    note = ""
    if run is not None:
        minutes = "under 1" if run["seconds"] < 60 else f"{run['seconds'] / 60:.0f}"
        memory = f"{run['peak_memory_bytes'] / 1e9:.1f} GB"
        note = f"\n\nMinutes and memory: one run of all cells on {run['device']}, {run['date']}."
    return (
        "| difficulty | minutes on 2 CPU cores | on a T4 or an A10G | peak memory |\n| --- | --- | --- | --- |\n"
        f"| {'●' * lesson.difficulty}{'○' * (5 - lesson.difficulty)} | {minutes} | not measured | {memory} |{note}"
    )
