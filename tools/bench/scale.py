"""How a training step scales over ranks, each a process with its own GPU: `python -m tools.bench scale --gpus 1,2`.

Without a GPU the ranks share the processor, so that efficiency says little there; it shows that all works.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlcourse.dist import launched
from rlcourse.distributed import launch
from rlcourse.measure.timing import median_seconds
from rlcourse.runs import new_run
from rlcourse.tasks import load_task
from rlcourse.train import Trainer
from tools.bench.models import write_random_model
from tools.bench.results import Rows
from tools.bench.step import step_config, time_steps

VARIANTS = EACH, IN_ALL = "equal work a rank", "equal work in all"


def scale(shape: str, completions: int, new_tokens: int, gpus: list[int], repeats: int) -> tuple[dict[str, Any], Rows]:
    """Tokens/s of a whole Dr. GRPO step for each number of ranks, with random weights of `shape`: `completions` rows a
    rank, and `completions` rows in all. Answers all have `new_tokens` tokens; rewards are coin flips.

    efficiency: tokens/s, as a share of so many times those of one rank. allreduce_s, allreduce_gb_per_s: of as many
    float32 numbers as there are gradients, by the clock, in bytes of the gradient a second. Raises ValueError if there
    are not as many GPUs, or a rank would have no group.
    """
    gpus, there = sorted({1, *gpus}), torch.cuda.device_count()
    if there and gpus[-1] > there:
        raise ValueError(f"There are {there} GPUs, not {gpus[-1]}: lower --gpus.")
    if completions // 8 < gpus[-1]:
        raise ValueError(f"{completions} rows are fewer than {gpus[-1]} groups of 8, one a rank: raise --rows.")
    task = load_task("gsm8k" if shape != "tiny" else "minigsm")
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(shape, task, Path(folder) / "model")
        given = {"folder": folder, "task": task.name, "new_tokens": new_tokens, "repeats": repeats}
        asked = [(variant, count) for variant in (EACH, IN_ALL) for count in gpus]
        measured = {
            (variant, count): _on_ranks(count, given | {"rows": completions * (count if variant == EACH else 1)})
            for variant, count in asked
            if (variant, count) != (IN_ALL, 1)  # which is the same as one with its own work
        }
    rows, one = [], measured[EACH, 1]
    for variant, count in asked:
        row = measured.get((variant, count), one)
        efficiency = row["tokens_per_s"] / (count * one["tokens_per_s"])
        rows.append({"variant": variant, "gpus": count} | row | {"efficiency": efficiency})
    setup = {"shape": shape, "task": task.name, "num_generations": 8, "new_tokens": new_tokens, "repeats": repeats}
    return setup, rows


def _on_ranks(count: int, given: dict[str, Any]) -> dict[str, Any]:
    """What `time_rank` measures on `count` ranks. Raises RuntimeError, with their error, if they fail."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    with tempfile.TemporaryDirectory(dir=given["folder"]) as own:
        command = [sys.executable, *launch, "-m", "tools.bench.scale", json.dumps(given | {"own": own})]
        done = subprocess.run(command, capture_output=True, text=True)
        result = Path(own) / "result.json"
        if not result.exists():
            said = [line for line in done.stderr.splitlines() if "Error: " in line] or done.stderr.splitlines()[-1:]
            raise RuntimeError(f"{count} ranks could not be measured ({' '.join(said[:1])}).")
        return json.loads(result.read_text())


def time_rank(given: dict[str, Any]) -> dict[str, Any]:
    """One rank's part of a measurement, and what it found, which is the same on all of them but for the clock."""
    model = str(Path(given["folder"]) / "model")
    config = step_config(model, given["task"], given["rows"], given["new_tokens"], given["own"])
    with launch(lambda: new_run(config)) as (run, device, world):
        return time_trainer(Trainer(run, device, world), given)


def time_trainer(trainer: Trainer, given: dict[str, Any]) -> dict[str, Any]:
    """Seconds of its steps, and of an all-reduce in its world."""
    world, times = trainer.world, time_steps(trainer, given["repeats"])
    numbers = sum(p.numel() for p in trainer.policy.model.parameters())
    gradients = torch.zeros(numbers, device=trainer.device)
    row = {"rows": given["rows"], "tokens_per_s": given["rows"] * given["new_tokens"] / times["step_s"]}
    row |= {name: times[name] for name in ("step_s", "rollout_s", "update_s", "spread", "peak_memory_bytes")}
    if world.size == 1:
        return row | {"allreduce_s": None, "allreduce_gb_per_s": None}
    took = median_seconds(lambda: world.all_reduce(gradients), trainer.device, given["repeats"])
    return row | {"allreduce_s": took, "allreduce_gb_per_s": 4 * numbers / took / 1e9}


def main() -> None:
    """A rank of `_on_ranks`: the first writes what it found."""
    given = json.loads(sys.argv[1])
    found = time_rank(given)
    if launched()[0] == 0:
        (Path(given["own"]) / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
