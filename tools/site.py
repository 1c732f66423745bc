"""The course as a website: `python -m tools.site [--output build/site]`, after
`pip install -e ".[site]"`.

Sphinx and MyST-NB turn the very notebooks of the repository into pages, without running them and without a network. The
API pages are made here from the docstrings, which are plain text with code in backticks.
"""

import argparse
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlcourse.course.contents import COURSE
from tools.front import headline

ROOT = Path(__file__).resolve().parents[1]

# The modules of the API pages, grouped along the road of one training step.
API = {
    "Settings": ["config", "presets", "settings", "device"],
    "The step": ["train", "collect", "batch", "metrics"],
    "Tasks": [
        "tasks",
        "tasks.task",
        "tasks.prompts",
        "tasks.minigsm",
        "tasks.gsm8k",
        "tasks.math",
        "tasks.jsonl",
        "tasks.pool",
        "tasks.llm_judge",
    ],
    "Kernels in a small language": [
        "tasks.kernels",
        "tasks.kernels.language",
        "tasks.kernels.clock",
        "tasks.kernels.judge",
        "tasks.kernels.lowering",
        "tasks.kernels.task",
    ],
    "Kernels that a model writes": [
        "tasks.kernelbench",
        "tasks.kernelbench.task",
        "tasks.kernelbench.rules",
        "tasks.kernelbench.cases",
        "tasks.kernelbench.compare",
        "tasks.kernelbench.judging",
        "sandbox",
        "sandbox.process",
    ],
    "Policy": ["policy", "trial", "chat", "sampling"],
    "Rollout": [
        "llm",
        "rollout",
        "rollout.hf",
        "rollout.torch_engine",
        "rollout.decoder",
        "rollout.gpu_engine",
        "rollout.blocks",
        "rollout.scheduler",
        "rollout.slots",
        "rollout.prefill",
        "rollout.triton_step",
        "cuda_graphs",
        "rollout.vllm",
        "rollout.vllm_server",
    ],
    "Sampler and trainer alike": [
        "exact",
        "exact.weights",
        "exact.model",
        "exact.layers",
        "exact.head",
        "exact.products",
    ],
    "Reward": ["tasks.verify"],
    "Advantages and loss": ["advantages", "logprobs", "head", "losses", "learner"],
    "A run": ["watch", "preview", "evaluation", "checkpoint", "runs", "files", "interrupts"],
    "Publishing": ["publish", "model_card"],
    "Speedrun": ["speedrun", "speedrun.verifier", "speedrun.worker"],
    "Several GPUs": [
        "dist",
        "distributed",
        "distributed.world",
        "distributed.sharded",
    ],
    "Fine-tuning and LoRA": [
        "sft",
        "sft.config",
        "sft.data",
        "sft.packing",
        "sft.trainer",
        "lora",
        "adapters",
    ],
    "Kernels": ["kernels", "kernels.kernel", "kernels.toolchain", "kernels.decode_attention", "kernels.decode_ops"],
    "Kernels of a layer": [
        "course.kernels.rms_norm",
        "course.kernels.residual_norm",
        "course.kernels.rope",
        "course.kernels.swiglu",
        "course.kernels.attention",
        "course.kernels.embedding",
        "course.kernels.token_logprob",
        "course.kernels.sampler",
        "course.kernels.adamw",
    ],
    "Measuring": [
        "measure.timing",
        "measure.profiling",
        "measure.roofline",
        "measure.shapes",
        "memory",
        "measure.records",
        "measure.plots",
        "doctor",
    ],
    "Course": [
        "course",
        "course.contents",
        "course.checks",
        "course.grading",
        "course.grading.grade",
        "course.widgets",
        "course.ranks",
        "course.kernels",
        "course.lessons.experiment",
        "course.lessons.gain",
        "course.lessons.demonstrations",
        "course.lessons.warm_start",
        "course.lessons.generate_attention",
        "course.lessons.lesson13",
        "course.lessons.lesson15",
    ],
}


def write_sources(folder: Path) -> None:
    """Everything that Sphinx reads: configuration, start page, notebooks, API pages."""
    shutil.copytree(ROOT / "site", folder, dirs_exist_ok=True)
    (folder / "data" / "curves").mkdir(parents=True)
    for picture in ("headline.png", "curves/curves.png"):
        shutil.copy(ROOT / "data" / picture, folder / "data" / picture)
    start = (ROOT / "site" / "index.md").read_text(encoding="utf-8")
    (folder / "index.md").write_text(start.replace("HEADLINE", headline()).replace("CARDS", cards()), encoding="utf-8")
    shutil.copy(ROOT / "RECORDS.md", folder / "RECORDS.md")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for kind in ("notebooks", "exercises", "solutions"):
        (folder / kind).mkdir()
        names = [name for name in COURSE if (ROOT / kind / f"{name}.ipynb").exists()]
        for name in names:
            shutil.copy(ROOT / kind / f"{name}.ipynb", folder / kind)
        title = {"notebooks": "Lessons", "exercises": "Exercises", "solutions": "Solutions"}[kind]
        (folder / kind / "index.md").write_text(page(title, "", names), encoding="utf-8")
    (folder / "api").mkdir()
    (folder / "ptx_interpreter").mkdir()
    shutil.copy(ROOT / "ptx_interpreter" / "README.md", folder / "ptx_interpreter")
    for group, modules in API.items():
        text = f"# {group}\n\n" + "\n\n".join(module_markdown(f"rlcourse.{module}") for module in modules) + "\n"
        (folder / "api" / f"{slug(group)}.md").write_text(text, encoding="utf-8")
    listing = page(
        "The package", "In the order in which one training step uses it.", [*map(slug, API), "/ptx_interpreter/README"]
    )
    (folder / "api" / "index.md").write_text(listing, encoding="utf-8")


def cards() -> str:
    """The lessons, a card each: what one holds at the end, and how hard it is."""
    parts = []
    for name, lesson in COURSE.items():
        dots = "●" * lesson.difficulty + "○" * (5 - lesson.difficulty)
        head = f":::{{grid-item-card}} {name[:2]} · {lesson.title}\n:link: notebooks/{name}\n:link-type: doc"
        parts.append(f"{head}\n\n{lesson.holds}\n\n{dots}\n:::")
    return "::::{grid} 1 2 2 3\n:gutter: 3\n\n" + "\n\n".join(parts) + "\n::::"


def page(title: str, text: str, names: list[str]) -> str:
    """A page that lists others."""
    return f"# {title}\n\n{text}\n\n```{{toctree}}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"


def slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def module_markdown(name: str) -> str:
    """A module's docstring and those of what it defines for others, in the order of its file."""
    module = importlib.import_module(name)
    parts = [f"## `{name}`", prose(inspect.getdoc(module))]
    for attribute, value in vars(module).items():
        ours = getattr(value, "__module__", None) == name and not attribute.startswith("_")
        if ours and (inspect.isfunction(value) or inspect.isclass(value)) and value.__doc__:
            parts += [f"### `{attribute}`", signature(attribute, value), prose(inspect.getdoc(value))]
    return "\n\n".join(parts)


def signature(name: str, value) -> str:
    """How it is called, as code."""
    try:
        text = f"{name}{inspect.signature(value)}"
    except ValueError:  # a class without a signature of its own
        text = name
    return "```python\n" + re.sub(r"<(?:class ')?([\w.]+)(?:'| object at 0x[0-9a-f]+)>", r"\1", text) + "\n```"


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: what stands outside backticks means no markup; indented lines stay as they are."""
    if not docstring:
        return ""
    blocks = []
    for block in docstring.split("\n\n"):
        if any(line.startswith("  ") or re.match(r"[-\d]", line) for line in block.split("\n")):
            blocks.append(f"```text\n{block}\n```")
        else:
            pieces = re.split(r"(`[^`]*`)", block)
            pieces[::2] = [re.sub(r"([\\*_<>\[\]{}|$#])", r"\\\1", piece) for piece in pieces[::2]]
            blocks.append("".join(pieces))
    return "\n\n".join(blocks)


def build(output: Path) -> int:
    """Write the site to `output`; warnings are errors, and so is a table that is shown as text. Returns the exit status
    of Sphinx, or 1."""
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", folder, str(output)]
        status = subprocess.run(command).returncode
    if raw := [page.name for page in output.rglob("*.html") if "<p>| " in page.read_text(encoding="utf-8")]:
        print(f"Tables are shown as text in {', '.join(raw)}.", file=sys.stderr)
    return status or int(bool(raw))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    output = parser.parse_args().output
    status = build(output)
    if status == 0:
        print(f"The site is in {output}.")
    sys.exit(status)


if __name__ == "__main__":
    main()
