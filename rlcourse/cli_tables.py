"""What the command line prints as tables: answers, and what a run achieved."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Column, Table

from rlcourse.config import TrainConfig


def printed(name: str, value: float | None, metrics: dict[str, str]) -> str:
    """A result as a table has it: in its task's format, tokens with one decimal, everything else as a share."""
    from rlcourse.tasks import in_format

    return in_format(value, metrics.get(name, ".1f" if name == "tokens" else ".1%"))


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table, wider than a narrow terminal if that's what it takes to keep its words and numbers whole."""
    console = console or Console()
    width, unlimited = console.width, console.options.update(max_width=10_000)
    console.width = max(width, Measurement.get(console, unlimited, table).minimum)
    console.print(table)
    console.width = width


def print_evaluation(config: TrainConfig, result: dict[str, Any]) -> None:
    """What `rlcourse eval` has measured."""
    title = f"{escape(config.model)} on {result['problems']} test problems of {config.task}"
    table = Table("measure", "value", title=title)
    for name, value in result.items():
        if name not in ("problems", "samples", "metrics"):
            table.add_row(name.replace("_", " "), printed(name, value, result["metrics"]))
    print_table(table)


def print_answers(answers: list[Any]) -> None:
    """Answers with their questions and verdicts."""
    console = Console()
    for answer in answers:
        words = answer.verdict.words if answer.finished else "cut off"
        verdict = f"[{'green' if answer.right else 'red'}]{escape(words)}[/]"
        console.print(escape(answer.problem.question), soft_wrap=True)
        console.print(Panel(escape(answer.text) or "(nothing)", title=verdict, title_align="left"))
        console.print(f"Gold: {answer.problem.gold}\n", soft_wrap=True)


def print_summary(summary: dict[str, Any]) -> None:
    """What a run achieved: test results before and after, and some answers of the trained model."""
    before, after = summary["before"], summary["after"]
    table = Table("test problems", "before", "after", title=f"{summary['eval_problems']} problems held out")
    for name in (*summary["metrics"], *(key for key in after if key.startswith("pass@")), "tokens"):
        values = (printed(name, when[name], summary["metrics"]) for when in (before, after))
        table.add_row(name.replace("_", " "), *values)
    right = Column("right", no_wrap=True)
    samples = Table("question", "answer after training", right, title="Samples", show_lines=True)
    for sample in after["samples"][:4]:
        samples.add_row(escape(sample["question"]), escape(sample["text"]), "yes" if sample["right"] else "no")
    Console().print(samples)
    print_table(table)
    print_ending(summary)


def print_fine_tuning(summary: dict[str, Any]) -> None:
    """What fine-tuning achieved: held-out loss, and what the task measures, before and after."""
    before, after = summary["before"], summary["after"]
    table = Table("measure", "before", "after", title=f"{summary['examples']:,} examples learned")
    if "loss" in after:
        table.add_row(f"loss of {summary['held_out']} held out", f"{before['loss']:.3f}", f"{after['loss']:.3f}")
    for name in summary["metrics"]:
        values = (printed(name, when[name], summary["metrics"]) for when in (before, after))
        table.add_row(name.replace("_", " "), *values)
    print_table(table)
    print_ending(summary)


def print_ending(summary: dict[str, Any]) -> None:
    """Warnings again, how long it took, in how many steps the weights changed, and where the results are."""
    console, steps, changed = Console(), summary["steps"], summary["steps_that_changed_weights"]
    for text in summary["warnings"].values():
        console.print(f"[yellow]Warning:[/yellow] {escape(text)}", highlight=False)
    weights = f"The weights changed in {'all' if changed == steps else f'{changed} of'} {steps} steps."
    color = "" if changed else "[red]"
    console.print(
        f"{steps} steps in {summary['wall_seconds']:.0f} s. {color}{weights}{color and '[/red]'} "
        f"Curve, metrics, samples and checkpoints are in {escape(summary['folder'])}.",
        highlight=False,
        soft_wrap=True,
    )
