"""What a run would be like: a few real steps on a throw-away copy of it, before the hours are paid for."""

import statistics
import tempfile
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from rlcourse import memory
from rlcourse.advantages import has_signal
from rlcourse.checkpoint import save
from rlcourse.cli_tables import print_table
from rlcourse.collect import Completions
from rlcourse.config import TrainConfig
from rlcourse.device import can_run, find_device, wanted_device
from rlcourse.dist import launched, share_of
from rlcourse.distributed import check_launch
from rlcourse.evaluation import BATCH_ROWS, PASS_K_PROBLEMS, answer_problems
from rlcourse.interrupts import progress_bar
from rlcourse.measure import shapes
from rlcourse.measure.machine import format_bytes
from rlcourse.measure.timing import peak_memory_bytes, seconds
from rlcourse.runs import RunFolder
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import Answer, Problem
from rlcourse.train import Trainer, train_step
from rlcourse.watch import before_training

STEPS = 8  # of a run that has as many; the first compiles and is not timed
# Later steps took 0.8 to 1.3 times as long in 22 runs, as answers grew or shrank and more groups had a signal.
SLOWER = 1.05


def print_preview(config: TrainConfig, began: float) -> None:
    """What `rlcourse train --dry-run` says: settings, the memory estimate, and a preview where it can run here. Nothing
    is printed of a run that can't start: an error comes alone."""
    needs = memory_needs(config)
    if launched()[1] > 1 or not can_run(config):
        print_config(config)
        print(needs)
        print("A preview of answers and time needs one process, on the GPU that this run asks for.")
    else:
        preview(config, needs, began)


def preview(config: TrainConfig, needs: str, began: float) -> None:
    """Load the run's model, take up to `STEPS` of its steps, answer some of its test problems and print what came of
    it; keep nothing of it. needs: of `memory_needs`. Raises what `rlcourse.train.train` does."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder), replace(config, log_to="none"))
        run.began = began
        trainer = Trainer(run, find_device(config))
        greedy, evaluation = evaluation_seconds(trainer)
        parts = trainer.learner, trainer.engine, trainer.training_task, trainer.data_sampler
        count = min(STEPS, max(2, config.steps))
        found = []
        with progress_bar("dry run", count, leave=False) as bar:
            for step in range(count):
                found.append(train_step(*parts, step))
                bar.update()
        saving = seconds(lambda: save(trainer), trainer.device)
    print_config(config)
    print(needs)
    print_answers(trainer, found[0][1], greedy)
    first, *later = (metrics["timing"]["step_s"] for metrics, _ in found)
    step = SLOWER * statistics.mean(later)
    saves = 1 + (config.steps - 1) // config.save_every if config.save_every else 1
    parts = {"starting": trainer.spent.seconds["starting"], "steps": first + (config.steps - 1) * step}
    parts |= {"evaluation": evaluation, "saving": saves * saving}
    listed = ", ".join(f"{name} {took:.0f} s" for name, took in parts.items())
    minutes, held = sum(parts.values()) / 60, format_bytes(peak_memory_bytes(trainer.device))
    print(f"{config.steps} steps of {step:.2f} s: {minutes:.1f} minutes in all ({listed}), peak memory {held}.")


def evaluation_seconds(trainer: Trainer) -> tuple[list[Answer], float]:
    """Greedy answers to a batch of test problems, and how long all of the run's evaluations will take at that rate."""
    config, task = trainer.config, trainer.task
    tested = task.problems("test")[: config.eval_problems]
    few, greedy = tested[:BATCH_ROWS], []

    def rate(problems: list[Problem], sampling: Sampling = GREEDY, times: int = 1) -> float:
        """Seconds per problem."""
        arguments = trainer.policy, trainer.engine, task, problems, config.max_new_tokens, sampling, times
        took = seconds(lambda: greedy.extend(answer_problems(*arguments)), trainer.device)
        return took / len(problems)

    first = rate(few)
    answered = [group[0] for group in greedy]
    again = rate(few)  # without compilation
    total = len(few) * (first - again) + 2 * len(tested) * again
    if config.pass_k:
        some = few[: max(1, min(BATCH_ROWS // config.pass_k, PASS_K_PROBLEMS))]
        total += 2 * min(PASS_K_PROBLEMS, len(tested)) * rate(some, config.sampling, config.pass_k)
    if config.eval_every:
        validated = min(config.eval_validation, len(task.problems("validation")))
        total += (1 + config.steps // config.eval_every) * validated * again
    return answered, total


def print_config(config: TrainConfig) -> None:
    """The resolved config; what differs from the laptop preset is in bold."""
    table = Table("setting", "value", title=f"Config of {escape(config.run_name)}")
    for f in fields(TrainConfig):
        if f.name in config.panels:
            table.add_section()
        value = getattr(config, f.name)
        table.add_row(f.name, escape(str(value)), style="bold" if value != f.default else None)
    print_table(table)


def memory_needs(config: TrainConfig) -> str:
    """The memory estimate, by phase. Raises ValueError for a model that can't be found, or processes that don't fit."""
    check_launch(config)
    device, ranks = wanted_device(config), launched()[1]
    shape = shapes.model_shape(config.model)
    estimate = memory.estimate(share_of(config, ranks), shape, device, ranks, memory.has_exact_pass(config, device))
    each = f", each of {ranks} processes" if ranks > 1 else ""
    rollout, update, peak = map(format_bytes, (*estimate, estimate.peak))
    return (
        f"Memory on {device}{each}, {shapes.parameters(shape):,} parameters: rollout {rollout}, update {update}; with "
        f"every row at its longest {peak} at most.\n"
    )


def print_answers(trainer: Trainer, first: Completions, greedy: list[Answer]) -> None:
    """What the first step's answers earn, two of them, where they end, and what to worry about. greedy: one answer to
    each of some test problems."""
    console, config, answers = Console(), trainer.config, first.answers
    samples = Table("answer now", Column("gold", no_wrap=True), "verdict", title="Samples", show_lines=True)
    for answer in answers[:2]:
        samples.add_row(escape(answer.text), answer.problem.gold, answer.verdict.words)
    console.print(samples)
    length, cut = sum(a.tokens for a in answers) / len(answers), sum(not a.finished for a in answers) / len(answers)
    title = f"{config.rows} answers of the first step, {length:.0f} tokens each, {cut:.0%} cut off"
    table = Table("measure", "mean", "groups with signal", title=title)
    readings = {"reward": first.rewards}
    for name in trainer.metrics:
        values = [answer.verdict.metrics.get(name) for answer in answers]
        if None not in values:
            rewarded = " (rewarded)" if name == trainer.headline and name.startswith("accuracy") else ""
            readings[name.replace("_", " ") + rewarded] = first.rewards.new_tensor([float(value) for value in values])
    for name, values in readings.items():
        signal = has_signal(values, config.num_generations).float().mean()
        table.add_row(name, f"{values.mean():.3f}", f"{signal:.0%}")
    print_table(table, console)
    ends = [repr(trainer.policy.tokenizer.decode([token])) for token in trainer.policy.eos_ids]
    print(f"An answer ends at {' or '.join(ends)}.")
    groups = [answers[i : i + config.num_generations] for i in range(0, config.rows, config.num_generations)]
    for text in before_training(greedy, groups, config).values():
        console.print(f"[yellow]Warning:[/yellow] {escape(text)}", highlight=False)
