"""What the command line prints as tables."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

from rlcourse.config import TrainConfig
from rlcourse.tasks import in_format


def form_of(name: str, metrics: dict[str, str]) -> str:
    """The format of a result: its task's, or a share's."""
    return ({"loss": ".3f", "tokens": ".1f"} | metrics).get(name, ".1%")


def measured(summary: dict[str, Any]) -> dict[str, str]:
    """What a run's tables show, each with its format."""
    metrics = summary["metrics"]
    shown = (name for name in summary["after"] if name in (*metrics, "loss", "tokens") or name.startswith("pass@"))
    return {name: form_of(name, metrics) for name in shown}


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table, wider than a narrow terminal if that's what it takes to keep its words and numbers whole."""
    console = console or Console()
    width, unlimited = console.width, console.options.update(max_width=10_000)
    console.width = max(width, Measurement.get(console, unlimited, table).minimum)
    console.print(table)
    console.width = width


def print_evaluation(config: TrainConfig, result: dict[str, Any]) -> None:
    """What `rlcourse eval` has measured."""
    print_samples(result)
    title = f"{escape(config.model)} on {result['problems']} test problems of {config.task}"
    table = Table("measure", "value", title=title)
    for name, value in result.items():
        if name not in ("problems", "samples", "metrics"):
            table.add_row(name.replace("_", " "), in_format(value, form_of(name, result["metrics"])))
    print_table(table)


def print_samples(result: dict[str, Any]) -> None:
    """The first test problems with the model's greedy answers, if it gave any."""
    samples = Table("question", "answer", Column("right", no_wrap=True), title="Samples", show_lines=True)
    for sample in result.get("samples", [])[:4]:
        samples.add_row(escape(sample["question"]), escape(sample["text"]), "yes" if sample["right"] else "no")
    if samples.rows:
        Console().print(samples)


def print_summary(summary: dict[str, Any], title: str) -> None:
    """What a run achieved: answers, what was measured before and after, if it warned, and where the results are."""
    print_samples(summary["after"])
    table = Table("measure", "before", "after", title=title)
    for name, form in measured(summary).items():
        table.add_row(name.replace("_", " "), *(in_format(summary[when][name], form) for when in ("before", "after")))
    if table.rows:  # supervised fine-tuning may have nothing held out
        print_table(table)
    console, steps, changed = Console(), summary["steps"], summary["steps_that_changed_weights"]
    if said := summary["warnings"]:
        these = "1 warning is" if len(said) == 1 else f"{len(said)} warnings are"
        console.print(f"[yellow]{these}[/yellow] above and in warnings.jsonl.", highlight=False)
    noun = "step" if steps == 1 else "steps"
    those = f"{changed} of {steps}" if changed < steps else f"all {steps}" if steps > 1 else "the one"
    weights = f"The weights changed in {those} {noun}."
    weights = weights if changed else f"[red]{weights}[/red]"
    took, place = f"{steps} {noun} in {summary['wall_seconds']:.0f} s.", escape(summary["folder"])
    said = f"{took} {weights} Curve, metrics, samples and checkpoints are in {place}."
    console.print(said, highlight=False, soft_wrap=True)
