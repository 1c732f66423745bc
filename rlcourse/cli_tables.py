"""What the command line prints as tables: settings, memory, and what a run achieved."""

from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from rlcourse.cli_options import PANELS
from rlcourse.config import TrainConfig
from rlcourse.distributed import check_launch, launched, share_of


def print_config(config: TrainConfig) -> None:
    """The resolved config; what differs from the laptop preset is in bold."""
    table = Table("setting", "value", title=f"Config of {escape(config.run_name)}")
    for f in fields(TrainConfig):
        if f.name in PANELS:
            table.add_section()
        value = getattr(config, f.name)
        table.add_row(f.name, escape(str(value)), style="bold" if value != f.default else None)
    Console().print(table)


def print_memory(config: TrainConfig) -> None:
    """The memory estimate, by part and by phase."""
    from rlcourse.device import wanted_device
    from rlcourse.measure import memory, shapes
    from rlcourse.measure.machine import format_bytes

    check_launch(config)
    device, ranks = wanted_device(config), launched()[1]
    shape = shapes.model_shape(config.model)
    estimate = memory.estimate(share_of(config, ranks), shape, device, ranks, memory.has_exact_pass(config, device))
    each = f", each of {ranks} processes" if ranks > 1 else ""
    title = f"Memory estimate on {device}{each}: {shapes.parameters(shape):,} parameters"
    table = Table("part", "memory", title=title)
    table.columns[1].justify = "right"
    for name, count in vars(estimate).items():
        if count:
            table.add_row(name.replace("_", " "), format_bytes(count))
    table.add_row("libraries", format_bytes(memory.LIBRARIES), end_section=True)
    table.add_row("rollout phase", format_bytes(estimate.rollout))
    table.add_row("update phase", format_bytes(estimate.update))
    table.add_row("at most, with every row at its longest", format_bytes(estimate.peak), style="bold")
    Console().print(table)


def print_preview(config: TrainConfig, found: dict[str, Any]) -> None:
    """What the run would be like: what answers earn now, what to worry about, memory and time."""
    from rlcourse.measure.machine import format_bytes

    console = Console()
    title = (
        f"{config.rows} answers of the first step, {found['length']:.0f} tokens each, {found['cut_off']:.0%} cut off"
    )
    table = Table("measure", "mean", "groups with signal", title=title)
    for name, mean, signal in found["readings"]:
        rewarded = " (rewarded)" if name == found["rewarded"] else ""
        table.add_row(name.replace("_", " ") + rewarded, f"{mean:.3f}", f"{signal:.0%}")
    samples = Table("answer now", "gold", "verdict", title="Samples", show_lines=True)
    for sample in found["samples"]:
        samples.add_row(escape(sample["text"]), sample["gold"], sample["words"])
    console.print(samples, table)
    console.print(f"An answer ends at {escape(' or '.join(map(repr, found['ends'])))}.", highlight=False)
    for text in found["warnings"].values():
        console.print(f"[yellow]Warning:[/yellow] {escape(text)}", highlight=False)
    parts, total = found["seconds"], sum(found["seconds"].values())
    listed = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
    console.print(
        f"{config.steps} steps of {found['step_seconds']:.2f} s: {total / 60:.1f} minutes in all ({listed}), peak "
        f"memory so far {format_bytes(found['memory_bytes'])}.",
        highlight=False,
        soft_wrap=True,
    )


def printed(name: str, value: float | None, metrics: dict[str, str]) -> str:
    """A result as a table has it: in its task's format, tokens with one decimal, everything else as a share."""
    from rlcourse.tasks import in_format

    return in_format(value, metrics.get(name, ".1f" if name == "tokens" else ".1%"))


def print_evaluation(config: TrainConfig, result: dict[str, Any]) -> None:
    """What `rlcourse eval` has measured."""
    title = f"{escape(config.model)} on {result['problems']} test problems of {config.task}"
    table = Table("measure", "value", title=title)
    for name, value in result.items():
        if name not in ("problems", "samples", "metrics"):
            table.add_row(name.replace("_", " "), printed(name, value, result["metrics"]))
    Console().print(table)


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
    samples = Table("question", "answer after training", "right", title="Samples", show_lines=True)
    for sample in after["samples"][:4]:
        samples.add_row(escape(sample["question"]), escape(sample["text"]), "yes" if sample["right"] else "no")
    Console().print(samples, table)
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
    Console().print(table)
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
