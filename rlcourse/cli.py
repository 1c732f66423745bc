"""The command line. `rlcourse train` alone trains the embedded model on a laptop; `rlcourse COMMAND --help` explains.

Only light modules are imported here, so that `--help` answers at once; each command imports what it runs.
"""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rlcourse import __version__, cli_tables
from rlcourse.cli_shared import Group, drop_output, refuse, takes_settings
from rlcourse.config import EVALUATION, TrainConfig, make_config
from rlcourse.dist import hush_all_but_first, launched
from rlcourse.files import try_empty_folder, try_file
from rlcourse.openmp import spare_busy_cores
from rlcourse.sft.config import SFTConfig
from rlcourse.sft.config import make_config as make_sft_config

BEGAN = time.perf_counter()  # a run's clock starts here, before torch is imported
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint, with its settings.")]

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for language models, from the policy gradient to a GPU kernel.",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
):
    hush_all_but_first()
    if launched()[1] > 1 and context.invoked_subcommand not in ("train", "eval"):
        refuse("torchrun is for `train` and `eval`: start this command without it.")
    if version:
        print(f"rlcourse {__version__}")
        raise typer.Exit


@app.command(epilog="Example: rlcourse train --steps 10 --name first")
@takes_settings
def train(
    settings: dict[str, Any],
    resume: Resume = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Take a few steps, print what the run would be like, and exit.")
    ] = False,
):
    """Train a language model by reinforcement learning.

    An option overrides what the algorithm sets, and the algorithm overrides the preset. The defaults below are those of
    the laptop preset with Dr. GRPO; `--preset a10g --dry-run` shows another's.
    """
    if dry_run and resume:
        raise ValueError("--dry-run previews a new run: leave out --resume.")
    if dry_run:
        from rlcourse.preview import print_preview

        return print_preview(make_config(**settings), BEGAN)
    config = TrainConfig.check_settings(settings) if resume else make_config(**settings)
    from rlcourse import train as training

    summary = training.resume(**settings) if resume else training.train(config, BEGAN)
    cli_tables.print_summary(summary, f"{summary['eval_problems']} problems held out")


@app.command("eval", epilog="Example: rlcourse eval --model runs/first/checkpoints/step-000010")
@partial(takes_settings, names=EVALUATION)
def evaluate(settings: dict[str, Any]):
    """Measure a model on a task's test problems.

    Each problem gets a greedy answer, and some get sampled ones for pass@k. `--model` can be a run's checkpoint: then
    repeat the run's `--preset` and `--task`.
    """
    config = make_config(**settings)
    from rlcourse import evaluation

    cli_tables.print_evaluation(config, evaluation.evaluate(config))


@app.command(epilog="Example: rlcourse sft --data minigsm --steps 25")
@partial(takes_settings, kind=SFTConfig)
def sft(settings: dict[str, Any], resume: Resume = False):
    """Fine-tune a language model on worked answers.

    Without `--data` it learns those of the embedded task. A line of `--data` is {"prompt": "...", "answer": "..."} or
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}. Other commands take a
    checkpoint as their `--model`.
    """
    config = SFTConfig.check_settings(settings) if resume else make_sft_config(**settings)
    from rlcourse.sft import trainer

    summary = trainer.resume(**settings) if resume else trainer.fine_tune(config)
    learned, examples = summary["learned"], summary["examples"]
    counted = f"{examples:,}" if learned == examples else f"{learned:,} of {examples:,}"  # with --steps
    cli_tables.print_summary(summary, f"examples: {counted} learned, {summary['held_out']:,} held out")


@app.command(epilog="Example: rlcourse merge runs/first --output merged")
def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of an adapter, or of the run that trained it.")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write the model to.")],
):
    """Merge a LoRA adapter into its base model.

    The result has plain float32 weights, W + (alpha / rank) B A.
    """
    output = output.expanduser()
    try_empty_folder(output, "choose another --output", adapter)
    from rlcourse.publish import merge_adapter

    found = merge_adapter(adapter.expanduser(), output)
    print(f"{found} is merged into its base: `rlcourse eval --model {output}` measures it.")


@app.command(epilog="Example: rlcourse publish runs/first --to published")
def publish(
    runs: Annotated[list[Path], typer.Argument(help="A run's folder, then those of its other seeds.")],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write to.")] = None,
    hub: Annotated[str | None, typer.Option("--hub", help="Hub repository, NAME or USER/NAME, to upload to.")] = None,
):
    """Publish a run's model or adapter with a model card.

    It goes to a folder or to the Hugging Face hub. transformers, peft and vLLM can load it; its logits are checked
    against the run's last checkpoint. With several seeds of a run, the card shows their mean and range, and the weights
    are the first one's.
    """
    from rlcourse.publish import publish

    print(publish(runs, to, hub))


@app.command(epilog="Example: rlcourse speedrun speedrun/dr_grpo.py")
def speedrun(
    recipe: Annotated[Path, typer.Argument(help="Python with `settings` of a run and, if you like, hooks.")],
    gsm8k: Annotated[bool, typer.Option("--gsm8k", help="Train a real model on GSM8K instead, on one GPU.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="--gsm8k: its start, a folder or a name on the hub.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds to train with.", min=1)] = 2,
):
    """Time your own recipe.

    The goal is 80% of the embedded task's test problems, on two cores. The verifier draws the seeds, keeps the clock
    and tests the weights. Rules and records are in docs/speedrun.md.
    """
    from rlcourse.speedrun import verifier

    if model is not None and not gsm8k:
        raise ValueError("--model is for --gsm8k: on two cores everybody starts from the embedded model.")
    track = verifier.GSM8K if gsm8k else verifier.EMBEDDED
    attempts = []
    for attempt in verifier.verify(recipe.expanduser(), track, model, seeds):
        print(attempt)
        attempts.append(attempt)
    print(verifier.in_short(attempts))


@app.command(epilog="Example: rlcourse grade exercises/01_policy_gradient.ipynb --junit grades.xml")
def grade(
    submission: Annotated[Path, typer.Argument(help="An exercise notebook, or a folder of them.")],
    hidden: Annotated[Path | None, typer.Option("--hidden", help="Folder of nbNN.py with more tests.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the report as JUnit XML.")] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write the scores as CSV; for a folder, grades.csv by default.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of the random inputs; a new one each time by default.", min=0),
    ] = None,
    memory: Annotated[float, typer.Option("--memory", help="GB of memory that a notebook's code may use.")] = 2.0,
):
    """Grade a notebook's exercises, or a whole class's.

    On Linux a notebook's code runs isolated: it can't reach the answers, your files or the network. Elsewhere the
    report says what isn't isolated. Kernel questions need CuTe DSL, but no GPU; where it's missing, the report lists
    what wasn't graded.
    """
    inputs = [submission, *submission.rglob("*.ipynb"), *(hidden.glob("*.py") if hidden else ())]
    for file in (junit, csv):
        if file is not None:
            try_file(file, "name another file", *inputs)
    from rlcourse.course.grading.report import run_grade

    run_grade(submission, junit, csv, hidden=hidden, seed=seed, memory_gb=memory)


@app.command(epilog="Example: rlcourse lab --port 8889")
def lab(port: Annotated[int, typer.Option("--port", help="Port of the server.", min=1, max=65535)] = 8888):
    """Open the course's notebooks in JupyterLab."""
    from rlcourse.course.lab import lab

    raise typer.Exit(lab(port))


@app.command(epilog="Example: rlcourse doctor")
def doctor():
    """Say what this machine can run.

    It lists the hardware, the presets that fit, and what's missing, with the command that installs it.
    """
    from rlcourse import doctor

    facts = doctor.gather()
    doctor.print_report(facts)
    raise typer.Exit(any(check["required"] and not check["ok"] for check in facts["checks"]))


def main() -> None:
    """Entry point of the `rlcourse` command."""
    spare_busy_cores()  # each command imports torch later, or not at all
    try:
        app()
    finally:
        drop_output()
