"""The commands beside `train`, `eval` and `sample`, registered by `cli.py`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rlcourse.cli_errors import user_errors
from rlcourse.cli_options import parse_rows, takes_settings, within
from rlcourse.files import try_empty_folder, try_file, try_folder
from rlcourse.settings import COUNT, MEMORY_GB, SEED, Range
from rlcourse.sft import config as sft_config

app = typer.Typer()


@app.command()
@partial(takes_settings, kind=sft_config.SFTConfig, panels=sft_config.PANELS)
def sft(
    settings: dict[str, Any],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint, with its settings.")
    ] = False,
):
    """Fine-tune a language model on conversations: it learns their answers. Alone, the worked answers of the embedded
    task.

    A line of `--data` is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} or
    {"prompt": "...", "answer": "..."}. The checkpoints are folders for `--model` of the other commands.
    """
    with user_errors():
        if resume:
            sft_config.check_settings(settings)  # before anything is loaded; the rest is in the run's folder
        else:
            config = sft_config.make_config(**settings)
            try_folder(Path(config.output).expanduser(), "choose another --output")
        from rlcourse import cli_tables
        from rlcourse.sft import trainer

        cli_tables.print_fine_tuning(trainer.resume(**settings) if resume else trainer.fine_tune(config))


@app.command("filter")
def keep_right(
    data: Annotated[Path, typer.Argument(help="Conversations, as `rlcourse sft` takes them")],
    task: Annotated[str, typer.Option("--task", help="Task whose judge decides")],
    output: Annotated[Path, typer.Option("--output", help="File to write those to that are right.")],
):
    """Of demonstrations keep those that a task's judge finds right, for `rlcourse sft` to learn. Those of problems that
    are held out are left out."""
    with user_errors():
        data, output = data.expanduser(), output.expanduser()
        try_file(output, "choose another --output", data)
        from rlcourse.sft import traces
        from rlcourse.tasks import load_task

        print(traces.keep_right(data, load_task(task), output))


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="A folder with an adapter, or a run that trained one")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write the model to.")],
):
    """Write the model that a LoRA adapter makes of its base: plain weights, W + (alpha / rank) B A, in float32."""
    with user_errors():
        output = output.expanduser()
        try_empty_folder(output, "choose another --output", adapter)
        from rlcourse.merge import merge_adapter

        found = merge_adapter(adapter.expanduser(), output)
        print(f"{found} is merged into its base: `rlcourse eval --model {output}` measures it.")


@app.command()
def publish(
    runs: Annotated[list[Path], typer.Argument(help="A run's folder, then those of its other seeds.")],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write to.")] = None,
    hub: Annotated[str | None, typer.Option("--hub", help="Hub repository, NAME or USER/NAME, to upload to.")] = None,
):
    """Publish a run's model or adapter, with a model card, as a folder or on the Hugging Face hub.

    transformers, peft and vLLM can load it, and its logits are checked against the run's last checkpoint. Given several
    seeds of a run, the card also shows their mean and range; the weights are those of the first.
    """
    with user_errors():
        from rlcourse.publish import publish

        print(publish(runs, to, hub))


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="decode or step")],
    shape: Annotated[str, typer.Option("--shape", help="Random weights of this shape; decode: or embedded")] = (
        "qwen2.5-0.5b"
    ),
    rows: Annotated[str, typer.Option("--rows", help="Rows of a batch")] = "16,64",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="decode: tokens of a prompt", callback=within(COUNT))
    ] = 128,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", help="tokens of an answer", callback=within(Range(2, 10**9)))
    ] = 256,
    lengths: Annotated[str, typer.Option("--lengths", help="decode: equal, or skewed (median 120)")] = "equal",
    repeats: Annotated[int, typer.Option("--repeats", help="Timed repetitions", callback=within(COUNT))] = 5,
):
    """Measure this machine: every way to `decode`, or a whole training `step`, with random weights."""
    with user_errors():
        from rlcourse.bench import Options, run_bench

        options = Options(shape, tuple(parse_rows(rows)), prompt_tokens, new_tokens, lengths, repeats)
        run_bench(what, options)


@app.command()
def speedrun(
    recipe: Annotated[Path, typer.Argument(help="Python with `settings` of a run and, if you like, hooks.")],
    gsm8k: Annotated[bool, typer.Option("--gsm8k", help="Train a real model on GSM8K instead, on one GPU.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="--gsm8k: its start, a folder or a name on the hub.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds to train with.", callback=within(COUNT))] = 2,
):
    """Time your own recipe: from the start of its process to 80% of the embedded task's test problems, on two cores.

    The verifier draws the seeds, keeps the clock and tests the weights. docs/speedrun.md has rules and records.
    """
    with user_errors():
        from rlcourse.speedrun import verifier

        if model is not None and not gsm8k:
            raise ValueError("--model is for --gsm8k: on two cores everybody starts from the embedded model.")
        track = verifier.GSM8K if gsm8k else verifier.EMBEDDED
        attempts = []
        for attempt in verifier.verify(recipe.expanduser(), track, model, seeds):
            attempts.append(attempt)
            print(attempt)
        print(verifier.in_short(attempts))


@app.command()
def grade(
    submission: Annotated[Path, typer.Argument(help="An exercise notebook, or a folder of them")],
    hidden: Annotated[Path | None, typer.Option("--hidden", help="Folder of nbNN.py with more tests.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write it as JUnit's XML.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the scores (a folder: to grades.csv).")] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of the random inputs; new each time if left out.", callback=within(SEED)),
    ] = None,
    memory: Annotated[
        float, typer.Option("--memory", help="GB that a notebook's code may take.", callback=within(MEMORY_GB))
    ] = 2.0,
):
    """Grade the exercises of a notebook, or of a class. On Linux a notebook's code runs isolated, without the answers,
    your files and the network; elsewhere the report says what is not isolated. Kernels need CuTe DSL, and no GPU; where
    it is missing, the report says which questions are not graded."""
    with user_errors():
        inputs = [submission, *submission.rglob("*.ipynb"), *(hidden.glob("*.py") if hidden else ())]
        for file in (json_file, junit, csv):
            if file is not None:
                try_file(file, "name another file", *inputs)
        from rlcourse.course.grading.report import run_grade

        run_grade(submission, json_file, junit, csv, hidden=hidden, seed=seed, memory_gb=memory)


@app.command()
def lab(
    port: Annotated[int, typer.Option("--port", help="Port of the server.", callback=within(Range(1, 65535)))] = 8888,
):
    """Open the course's notebooks in JupyterLab."""
    with user_errors():
        from rlcourse.course.lab import lab

        raise typer.Exit(lab(port))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False):
    """Say what this machine is, which presets fit it, and what is missing, with the command that installs it."""
    with user_errors():
        from rlcourse import doctor

        facts = doctor.gather()
        doctor.print_json(facts) if as_json else doctor.print_report(facts)
        raise typer.Exit(0 if doctor.healthy(facts) else 1)
