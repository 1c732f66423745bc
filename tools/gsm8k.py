"""Real models on GSM8K, run by run: training in several variants and seeds, and the record that holds them.

    python -m tools.gsm8k --model FOLDER --runs runs/gsm8k                # all of VARIANTS, seeds 0, 1 and 2
    python -m tools.gsm8k --model FOLDER --runs runs/gsm8k --variants dr_grpo,grpo --seeds 0,1 --gpus 0,1,2,3
    python -m tools.gsm8k --model FOLDER --runs runs/gsm8k --record      # write the records, from what is there

Each run is `rlcourse train --preset h200` with a variant's settings, in a process and on a GPU of its own. A run that
is there is not repeated, and one that was cut off goes on from its last checkpoint, so a study can grow over many short
leases. GSM8K comes from the folder in RLCOURSE_GSM8K_DIR, or from the hub. `trl` is TRL with vLLM (`gsm8k_trl.py`), and
`small` ours with the same settings. `ten minutes` is the best that we know within ten minutes.

The last ones, beside `dr_grpo`, are a study: sampler and trainer agree to the last bit, or the trainer runs (`two`)
transformers' layers, whose log-probs differ by rounding; `tis` corrects for that by truncated importance sampling, and
`4 updates` is the same with four mini-batches per rollout. `grpo` beside `dr_grpo` is another: does GRPO lengthen wrong
answers?
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from rlcourse.config import make_config
from rlcourse.files import read_json, read_lines
from rlcourse.measure.records import device_name, slug
from rlcourse.paths import data_folder
from tools.records import write_record

SMALL = {"steps": 100, "eval_every": 20}  # TRL ends in a quarter of an hour
FAILS = SMALL | {"examples": 0, "steps": 30}
TWO = {"micro_batch_tokens": 4096, "logprob_chunk": 4096}  # transformers' layers take more memory
TIS = TWO | {"sampler_correction": "token"}
VARIANTS: dict[str, dict[str, Any]] = {
    "dr_grpo": {},
    "grpo": {"algorithm": "grpo"},
    "ppo": {"algorithm": "ppo"},
    "lora": {"lora_rank": 32, "lr": 3e-5},
    "ten minutes": {"examples": 0, "reward_parser": "lenient", "num_prompts": 64, "lr": 2.5e-6, "steps": 440}
    | {"max_new_tokens": 300, "eval_every": 110},
    "small": SMALL,
    "trl": SMALL,
    "no examples": FAILS,
    "format bonus": FAILS | {"reward_format": 0.2},
    "two": TWO,
    "two tis": TIS,
    "4 updates": {"minibatches": 4},
    "two 4 updates": TWO | {"minibatches": 4},
    "two tis 4 updates": TIS | {"minibatches": 4},
}
CONFIG = ("model", "runs", "preset")  # arguments that every run shares
NEAR = 10  # steps before an evaluation over which lengths are averaged


def settings_of(variant: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    name = slug(f"{variant}-seed{seed}")
    shared = {"preset": arguments.preset, "model": arguments.model, "output": str(arguments.runs)}
    return shared | VARIANTS[variant] | {"seed": seed, "name": name}


def train_one(variant: str, seed: int, arguments: argparse.Namespace) -> None:
    """Train in this process, or go on where a run was cut off."""
    from rlcourse import train as trainer
    from tools.bench.gap import TWO, put_back

    if variant.startswith("two"):
        make_learner = trainer.Trainer.__init__

        def make_with_two_sets(self: trainer.Trainer, *rest: Any, **named: Any) -> None:
            make_learner(self, *rest, **named)
            put_back(self, TWO)

        trainer.Trainer.__init__ = make_with_two_sets
    settings = settings_of(variant, seed, arguments)
    if variant == "trl":
        from tools import gsm8k_trl

        folder = folder_of(variant, seed, arguments)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off: TRL's doesn't go on
        folder.mkdir(parents=True)
        gsm8k_trl.train(make_config(**settings), folder, BEGAN)
    elif any((arguments.runs / settings["name"]).glob("checkpoints/step-??????")):
        trainer.resume(output=settings["output"], name=settings["name"])
    else:
        trainer.train(make_config(**settings), BEGAN)


def train_all(jobs: list[tuple[str, int]], arguments: argparse.Namespace) -> None:
    """Each job in a process of its own, one at a time on each GPU. Says how each ended."""
    jobs = [job for job in jobs if not (folder_of(*job, arguments) / "summary.json").exists()]
    running: dict[str, tuple[tuple[str, int], subprocess.Popen]] = {}
    while jobs or running:
        for gpu in arguments.gpus.split(","):
            if gpu in running and running[gpu][1].poll() is not None:
                job, process = running.pop(gpu)
                print(*job, "done" if process.returncode == 0 else f"ended with {process.returncode}", flush=True)
            if gpu not in running and jobs:
                variant, seed = job = jobs.pop(0)
                shared = [f"--{name}={getattr(arguments, name)}" for name in CONFIG]
                command = [sys.executable, "-m", "tools.gsm8k", *shared, "--one", variant, "--seeds", str(seed)]
                process = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu})
                running[gpu] = job, process
        time.sleep(1)


def folder_of(variant: str, seed: int, arguments: argparse.Namespace) -> Path:
    return arguments.runs / settings_of(variant, seed, arguments)["name"]


def rows_of(variant: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a finished run: test problems before and after, validation problems between."""
    summary, steps = read_json(folder / "summary.json", "run it again"), read_lines(folder / "metrics.jsonl")
    evals = [{"split": "validation"} | line for line in read_lines(folder / "evals.jsonl")]
    ends = [(0, summary["before"], None), (summary["steps"], summary["after"], summary["wall_seconds"])]
    evals += [{"split": "test", "step": step, "seconds": seconds} | found for step, found, seconds in ends]
    rows = []
    for line in evals:
        near = [step for step in steps if max(0, line["step"] - NEAR) <= step["step"] <= max(line["step"], NEAR)]
        lengths = {
            name: fmean(values)
            for name in ("length_right", "length_wrong")
            if (values := [step[name] for step in near if step[name] is not None])
        }
        rows.append(
            {"variant": variant, "seed": seed, "split": line["split"], "step": line["step"]}
            | {name: line[name] for name in ("accuracy", "accuracy_lenient")}
            | {"pass_k": line.get("pass@8"), "truncated": 1 - line["finished"]}
            | {name: lengths.get(name) for name in ("length_right", "length_wrong")}
            | {
                "seconds": line["seconds"],
                "mismatch_max": max((m for step in steps if (m := step["mismatch_max"]) is not None), default=None),
            }
        )
    return rows


def record(jobs: list[tuple[str, int]], arguments: argparse.Namespace) -> None:
    """Write the record `gsm8k`, and a learning curve for each variant, from the runs that have finished. What these
    records of this GPU hold of other variants and seeds stays, with its date."""
    done = [job for job in jobs if (folder_of(*job, arguments) / "summary.json").exists()]
    setup = make_config(arguments.preset, model=arguments.model).to_dict() | {"note": arguments.note}
    command = f"python -m tools.gsm8k --model {Path(arguments.model).name} --runs runs/gsm8k"
    rows = [row for job in done for row in rows_of(*job, folder_of(*job, arguments))]
    rows = others_there("gsm8k", "measurements", {(row["variant"], row["seed"]) for row in rows}) + rows
    print(write_record("gsm8k", setup, rows, command=command))
    for variant in dict.fromkeys(variant for variant, _ in done):
        seeds = [seed_of_curve(seed, folder_of(variant, seed, arguments)) for name, seed in done if name == variant]
        name = "gsm8k_" + slug(variant).replace("-", "_")
        seeds = others_there(name, "curves", {(row["variant"], row["seed"]) for row in seeds}) + seeds
        print(write_record(name, setup | VARIANTS[variant], seeds, command=command, folder=data_folder() / "curves"))


def others_there(name: str, kind: str, measured: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """The rows of a record of this GPU, with their date, but for those of these variants and seeds."""
    path = data_folder() / kind / slug(device_name()) / f"{name}.json"
    if not path.exists():
        return []
    there = read_json(path, "record it again")
    rows = [row for row in there["results"] if (row["variant"], row["seed"]) not in measured]
    return [{"date": there["date"]} | row for row in rows]


def seed_of_curve(seed: int, folder: Path) -> dict[str, Any]:
    """A finished run's row in the record of its learning curve."""
    summary, samples = read_json(folder / "summary.json", "run it again"), read_lines(folder / "samples.jsonl")
    rewarded = next(iter(summary["metrics"]))  # the reading that's rewarded, strict or lenient
    ends = {f"accuracy_{when}": summary[when][rewarded] for when in ("before", "after")}
    kept = ("eval_problems", "wall_seconds", "peak_memory_bytes", "seconds")
    return {
        "variant": f"seed {seed}",
        "seed": seed,
        "evals": [{"step": e["step"], "accuracy": e[rewarded]} for e in read_lines(folder / "evals.jsonl")],
        "rewards": [step["reward"] for step in read_lines(folder / "metrics.jsonl")],
        "summary": ends | {name: summary[name] for name in kept},
        "warnings": summary["warnings"],
        "samples": [sample for sample in samples if sample["step"] == summary["steps"]],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of the model to train")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--preset", default="h200")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--note", default="", help="what the record should say about the model")
    parser.add_argument("--record", action="store_true", help="write the records instead of training")
    parser.add_argument("--one", choices=VARIANTS, help="train this variant, with one seed, in this process")
    return parser.parse_args()


BEGAN = time.perf_counter()

if __name__ == "__main__":
    given = parse()
    pairs = [(name, int(seed)) for name in given.variants.split(",") for seed in given.seeds.split(",")]
    if given.one:
        train_one(given.one, int(given.seeds), given)
    elif given.record:
        record(pairs, given)
    else:
        train_all(pairs, given)
