"""Fill README.md, RECORDS.md and docs/ from the records, and draw the picture that README opens with:
`python -m tools.readme`. No figure in them is typed.

A table stands between `<!-- record nvidia-h200 step: column, column -->`, `<!-- curves -->`, `<!-- gain -->`,
`<!-- sampler_gap -->`, `<!-- gap -->`, `<!-- gsm8k -->`, `<!-- headline -->`, `<!-- ran -->`, `<!-- course -->`,
`<!-- syllabus -->` or `<!-- speedrun -->` and `<!-- end -->`.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from rlcourse.course.checks import questions
from rlcourse.course.contents import COURSE
from rlcourse.course.lessons.curve_records import load_curve
from rlcourse.course.lessons.gain import summary
from rlcourse.measure.plots import LABELS
from rlcourse.measure.records import load_record, provenance
from rlcourse.paths import data_folder
from tools import front
from tools.gsm8k import VARIANTS
from tools.lessons.curves import recorded_algorithms
from tools.notebooks.headers import BADGE, colab_url
from tools.records import columns_of, format_cell

ROOT = Path(__file__).resolve().parents[1]
FILLED = ("README.md", "RECORDS.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
KINDS = "record|headline|curves|gain|sampler_gap|gap|gsm8k|course|ran|syllabus|speedrun"
GSM8K = {  # variants of the record, and how the table names them
    "dr_grpo": "`--preset h200`, on the Coder",
    "grpo": "GRPO instead of Dr. GRPO",
    "ppo": "PPO",
    "lora": "LoRA of rank 32, learning rate 3e-5",
    "4 updates": "four updates per rollout",
    "ten minutes": "no examples, any final number counts, 64 prompts per step",
    "small": "`--preset h200`, 100 steps",
    "trl": "TRL with vLLM, the same settings, 100 steps",
    "no examples": "no examples in the prompt",
    "format bonus": "no examples, and 0.2 for a wrong answer in the right form",
}
WEEKS = [(0, 1), (2,), (3,), (4,), (5,), (13,), (6, 7), (8,), (9,), (10,), (11,), (12,), (14, 15)]  # lessons
MARKER = re.compile(rf"(<!-- ({KINDS})([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """A page with every marked table made anew from its record."""
    return MARKER.sub(lambda match: match[1] + (_table(match[2], match[3])) + match[4], text)


def _table(kind: str, arguments: str) -> str:
    if kind != "record":
        return TABLES[kind]()
    source, columns = arguments.split(":")
    device, name = source.split()
    return record_markdown(load_record(name, device), [column.strip() for column in columns.split(",")])


def record_markdown(record: dict[str, Any], columns: list[str] | None = None) -> str:
    """The results as a Markdown table with its provenance in the last line."""
    columns = columns or columns_of(record["results"])
    rows = [columns, ["---"] * len(columns)]
    results = [
        row | {f"{k[:-6]}_gb": v / 1e9 for k, v in row.items() if k.endswith("_bytes") and v}
        for row in record["results"]
    ]
    rows += [[format_cell(row.get(column)).replace("|", "\\|") for column in columns] for row in results]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{table}\n\n{provenance(record)}\n"


def curves_markdown() -> str:
    """One line per algorithm: test accuracy before and after, and seconds, least to most over the seeds."""
    recorded: dict[str, list[str]] = {}  # where and when: which algorithms
    lines = ["| algorithm | seeds | accuracy before | accuracy after | seconds |", "| --- | --- | --- | --- | --- |"]
    for record in recorded_algorithms():
        runs = [seed["summary"] for seed in record["results"]]
        before, after = ([run[f"accuracy_{when}"] for run in runs] for when in ("before", "after"))
        name = LABELS.get(record["name"], record["name"].upper())
        took = _counts([run["wall_seconds"] for run in runs])
        lines.append(f"| {name} | {len(runs)} | {_range(before)} | {_range(after)} | {took} |")
        recorded.setdefault(provenance(record), []).append(name)
    (most, _), *others = sorted(recorded.items(), key=lambda item: -len(item[1]))
    said = [most, *(f"{' and '.join(names)} {where.removeprefix('recorded ')}" for where, names in others)]
    return "\n".join(lines) + f"\n\n{'; '.join(said)}\n"


def gain_markdown() -> str:
    """What makes a sampled answer right, before and after training, and what each part of it brings."""
    record = load_curve("lesson00_gain")
    found = summary(record)
    holds = {
        "clean": "it makes sense from beginning to end",
        "choice": "it works the problem out, and does not guess",
        "arithmetic": "all of its numbers are right",
    }
    lines = ["| a sampled answer is right if | before | after | brings, in points |", "| --- | --- | --- | --- |"]
    for name, text in holds.items():
        f = found[name]
        lines.append(f"| {text} | {f['before']:.0%} | {f['after']:.0%} | {f['points']:.1f} |")
    total = found["accuracy"]
    lines.append(f"| or by luck | | | {found['luck']['points']:.1f} |")
    lines.append(f"| **together** | {total['before']:.1%} | {total['after']:.1%} | {total['points']:.1f} |")
    return "\n".join(lines) + f"\n\n{provenance(record)}, {len(record['results'])} seeds, validation problems\n"


def sampler_gap_markdown() -> str:
    """One line a variant: validation accuracy at the end (a mean of four evaluations), least to most over the seeds."""
    record = load_curve("sampler_gap")
    by_variant: dict[str, list[float]] = {}
    for row in record["results"]:
        last = [evaluation["accuracy"] for evaluation in row["evals"][-4:]]
        by_variant.setdefault(row["variant"], []).append(sum(last) / len(last))
    lines = ["| sampler, correction | seeds | accuracy after |", "| --- | --- | --- |"]
    lines += [f"| {variant} | {len(found)} | {_range(found)} |" for variant, found in by_variant.items()]
    return "\n".join(lines) + f"\n\n{provenance(record)}\n"


def gap_markdown() -> str:
    """One line a way to train: test accuracy and share of clipped tokens, mean and least to most over the seeds, and
    the mean gap, where one is known."""
    record = load_record("gap", "nvidia-h200")
    lines = ["| trained with | seeds | accuracy after | its mean | clipped tokens | their mean | gap, nats |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for variant in dict.fromkeys(row["variant"] for row in record["results"]):
        runs = [row for row in record["results"] if row["variant"] == variant]
        cells = [variant, str(len(runs))]
        for name in ("accuracy_after", "clip_fraction"):
            found = [run[name] for run in runs]
            cells += [_range(found), f"{statistics.fmean(found):.1%}"]
        gaps = [run["mismatch_mean"] for run in runs if run["mismatch_mean"] is not None]
        cells.append(f"{statistics.fmean(gaps):.2g}" if gaps else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{provenance(record)}\n"


def gsm8k_markdown() -> str:
    """One line per way to train the real model: test accuracy as it's rewarded, and seconds since the command began,
    least to most over the seeds."""
    record = load_record("gsm8k", "nvidia-h100-80gb-hbm3")
    tests = [row for row in record["results"] if row["split"] == "test"]
    lines = [
        "| trained with | steps | seeds | accuracy before | after | seconds | of them before the first step "
        "| tokens of wrong answers, first, last |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant, name in GSM8K.items():
        first, last = (
            [r for r in tests if r["variant"] == variant and bool(r["step"]) is end] for end in (False, True)
        )
        read = "accuracy_lenient" if VARIANTS[variant].get("reward_parser") == "lenient" else "accuracy"
        before, after = (_range([row[read] for row in rows]) for rows in (first, last))
        took = _counts([row["seconds"] for row in last])
        starts = [row["seconds"] for row in record["results"] if row["variant"] == variant and not row["step"]]
        until = _counts([start for start in starts if start is not None])
        wrong = ", ".join(_counts([row["length_wrong"] for row in rows]) for rows in (first, last))
        lines.append(f"| {name} | {last[0]['step']} | {len(last)} | {before} | {after} | {took} | {until} | {wrong} |")
    return "\n".join(lines) + f"\n\n{provenance(record)}\n"


def course_markdown() -> str:
    """One line per lesson: minutes to read, and what's in it."""
    lines = ["|lesson|min|what's in it|", "|-|-|-|"]
    for (name, lesson), read in zip(COURSE.items(), minutes("notebooks"), strict=True):
        badge = f"[![Colab][]]({colab_url(f'notebooks/{name}.ipynb')})"
        lines.append(f"|[{name[:2]} {lesson.title}](notebooks/{name}.ipynb) {badge}|{read}|{lesson.holds}|")
    read, solve = (round(sum(minutes(kind)) / 60) for kind in ("notebooks", "exercises"))
    return "\n".join(lines) + f"\n\nAbout {read} hours to read, {solve} for exercises.\n\n[Colab]: {BADGE}\n"


def syllabus_markdown() -> str:
    """One line per week: its lessons, minutes to read and to solve, and the points of its exercises."""
    names, read, solve = list(COURSE), minutes("notebooks"), minutes("exercises")
    lines = ["| week | lessons | min to read | min of exercises | points |", "| --- | --- | --- | --- | --- |"]
    for number, week in enumerate(WEEKS, 1):
        titles = ", ".join(f"{names[n][:2]} {COURSE[names[n]].title}" for n in week)
        cells = (titles, sum(read[n] for n in week), sum(solve[n] for n in week), f"{sum(map(points, week)):g}")
        lines.append("| " + " | ".join(map(str, (number, *cells))) + " |")
    return "\n".join(lines) + "\n"


def speedrun_markdown() -> str:
    """One line per record, the newest last: mean seconds, and least to most, over the seeds."""
    paths = (data_folder() / "measurements").glob("*/speedrun-*.json")
    records = [load_record(path.stem, path.parent.name) for path in paths]
    columns = ("date", "recipe", "by", "goal", "seconds", "of the seeds", "accuracy", "on new problems", "machine")
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for record in sorted(records, key=lambda record: record["date"]):
        setup, rows = record["setup"], record["results"]
        name = record["name"].removeprefix("speedrun-")
        seconds, accuracy, new = ([row[key] for row in rows] for key in ("seconds", "accuracy", "on_new"))
        cells = [record["date"], f"`speedrun/{name}.py`", setup["by"]]
        cells += [f"{setup['goal']:.0%}, {setup['model']}", f"{statistics.fmean(seconds):.1f}", _counts(seconds)]
        cells += [_range(accuracy), "" if None in new else _range(new), record["device"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def points(lesson: int) -> float:
    """What the exercises of a lesson are worth."""
    return sum(case.points for question in questions(f"nb{lesson:02d}") for case in question.cases)


def ran_markdown() -> str:
    """What ran on which hardware, and when last."""
    rows = json.loads((ROOT / "data" / "ran.json").read_text(encoding="utf-8"))
    places = list(dict.fromkeys(place for row in rows for place in row["where"]))
    lines = ["| what | " + " | ".join(places) + " |", "| --- |" + " --- |" * len(places)]
    for row in rows:
        lines.append("| " + " | ".join([row["what"], *(row["where"].get(place, "–") for place in places)]) + " |")
    return "\n".join(lines) + "\n"


def minutes(kind: str) -> list[int]:
    """How long each notebook of a kind takes, as its header says."""
    headers = [json.loads(path.read_text())["cells"][0]["source"] for path in sorted((ROOT / kind).glob("*.ipynb"))]
    return [int(re.search(r"\| [●○]{5} \| (\d+) \|", "".join(header))[1]) for header in headers]


def _counts(values: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values))))


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.1%}", f"{max(values):.1%}"
    return low if low == high else f"{low} to {high}"


TABLES = {
    "headline": front.headline,
    "curves": curves_markdown,
    "course": course_markdown,
    "gain": gain_markdown,
    "sampler_gap": sampler_gap_markdown,
    "gap": gap_markdown,
    "gsm8k": gsm8k_markdown,
    "ran": ran_markdown,
    "syllabus": syllabus_markdown,
    "speedrun": speedrun_markdown,
}


def main() -> None:
    for name in FILLED:
        path = ROOT / name
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    picture = ROOT / "data" / "headline.png"
    if front.shown(picture) != front.digest():
        front.draw(picture)


if __name__ == "__main__":
    main()
