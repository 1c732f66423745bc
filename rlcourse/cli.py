"""The command line. `rlcourse train` alone trains the embedded model on a laptop; `rlcourse COMMAND --help` explains.

Only light modules are imported here, so that `--help` answers at once; each command imports what it runs.
"""

import time
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlcourse import __version__, cli_tables
from rlcourse.cli_shared import App, drop_output, refuse, takes_settings, within
from rlcourse.config import TrainConfig, make_config
from rlcourse.dist import hush_all_but_first, launched
from rlcourse.openmp import spare_busy_cores
from rlcourse.settings import COUNT

BEGAN = time.perf_counter()  # a run's clock starts here, before torch is imported


class Commands(TyperGroup):
    """The commands here, and those of `cli_more.py`, which is imported when one of them is asked for."""

    def list_commands(self, context: typer.Context) -> list[str]:
        return [*super().list_commands(context), *self._more()]

    def get_command(self, context: typer.Context, name: str) -> Any:
        return super().get_command(context, name) or self._more().get(name)

    def _more(self) -> dict[str, Any]:
        from rlcourse.cli_more import app as more

        return typer.main.get_command(more).commands


app = App(
    cls=Commands,
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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint, with its settings.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Take a few steps, print what the run would be like, and exit.")
    ] = False,
):
    """Train a language model by reinforcement learning.

    An option overrides what the algorithm sets, and the algorithm overrides the preset. The defaults below are those of
    the laptop preset with Dr. GRPO; `--preset a10g --dry-run` shows another's.
    """
    if dry_run:
        from rlcourse.preview import print_preview

        return print_preview(make_config(**settings), BEGAN)
    config = TrainConfig.check_settings(settings) if resume else make_config(**settings)
    from rlcourse import train as training

    summary = training.resume(**settings) if resume else training.train(config, BEGAN)
    cli_tables.print_summary(summary, f"{summary['eval_problems']} problems held out")


@app.command("eval", epilog="Example: rlcourse eval --model runs/first/checkpoints/step-000010")
@takes_settings
def evaluate(settings: dict[str, Any]):
    """Measure a model on a task's test problems.

    Each problem gets a greedy answer, and some get sampled ones for pass@k. `--model` can be a run's checkpoint.
    """
    config = make_config(**settings)
    from rlcourse import evaluation

    cli_tables.print_evaluation(config, evaluation.evaluate(config))


@app.command(epilog="Example: rlcourse sample --model embedded --count 3")
@takes_settings
def sample(
    settings: dict[str, Any],
    count: Annotated[int, typer.Option("--count", help="Problems to solve.", callback=within(COUNT))] = 5,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most probable token each time.")] = False,
):
    """Show a model's answers to test problems, and how each is judged."""
    config = make_config(**settings)
    from rlcourse import evaluation

    cli_tables.print_answers(evaluation.sample(config, count, greedy))


def main() -> None:
    """Entry point of the `rlcourse` command."""
    spare_busy_cores()  # each command imports torch later, or not at all
    try:
        app()
    finally:
        drop_output()


if __name__ == "__main__":
    main()
