"""Time a recipe from the start of its process to the weights that it returns, and test those weights.

Start model, problems and clock are the verifier's. The recipe runs in a box (`rlcourse/sandbox`) that has the package,
the start model and the problems to train on, and neither the test problems nor a network. Only weights come back.
"""

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlcourse.config import TrainConfig, make_config
from rlcourse.device import find_device
from rlcourse.evaluation import answer_problems, summarize
from rlcourse.files import read_bytes
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import make_engine
from rlcourse.sandbox.process import GUARD, PACKAGE, Box, Child, find_way
from rlcourse.sandbox.wire import Unreadable, decode, encode, receive, send
from rlcourse.tasks import Problem, Task, task_of
from rlcourse.tasks.kernelbench import candidate
from rlcourse.tasks.minigsm import generate

RECIPE_BYTES = 8192  # too few for weights, or for the answers to the test problems
EXAMPLES = 8  # problems that keep their worked answers, to be shown in prompts
LEFT_OUT = ("bench", "course", "speedrun/verifier.py", "tasks/kernelbench")  # of the package, in the box
CODE = """
from rlcourse.openmp import spare_busy_cores
spare_busy_cores()  # before torch is imported
from rlcourse.speedrun.worker import main
main(wire)
"""


@dataclass(frozen=True)
class Track:
    """The start model unless another is named; the share of the test problems to solve greedily; settings that a recipe
    can't change; those of the test alone; how many problems that nobody has seen are tested, too; a seed's limits."""

    model: str
    goal: float
    fixed: dict[str, Any]
    tested: dict[str, Any]
    new: int
    seconds: int
    memory_bytes: int


EMBEDDED = Track("embedded", 0.80, {"preset": "laptop", "device": "cpu"}, {}, 1000, 3600, 8 << 30)
GSM8K_TEST = {"examples": 0, "reward_parser": "lenient", "max_new_tokens": 300}  # nobody can make new problems
GSM8K = Track(
    "Qwen/Qwen2.5-Coder-0.5B-Instruct", 0.45, {"preset": "h200", "device": "cuda"}, GSM8K_TEST, 0, 4 * 3600, 64 << 30
)
SLACK = 0.03  # by which new problems may miss the goal: 2.5 standard errors of 1,000


class Rejected(ValueError):
    """Why a recipe doesn't count, in one sentence."""


@dataclass(frozen=True)
class Attempt:
    """What one seed came to. accuracy: on the test problems; on_new: on new ones, None where there are none."""

    seed: int
    seconds: float
    accuracy: float
    on_new: float | None

    def __str__(self) -> str:
        new = "" if self.on_new is None else f", {self.on_new:.1%} of new ones"
        return f"Seed {self.seed}: {self.accuracy:.1%} of the test problems{new} after {self.seconds:.1f} seconds."


def in_short(attempts: list[Attempt]) -> str:
    """The verdict on a recipe whose seeds have all reached the goal."""
    took = [attempt.seconds for attempt in attempts]
    if len(took) == 1:
        return f"Verified with 1 seed: {took[0]:.1f} seconds."
    mean = f"{fmean(took):.1f} seconds on average ({min(took):.1f} to {max(took):.1f})"
    return f"Verified with {len(took)} seeds: {mean}."


def verify(recipe: Path, track: Track = EMBEDDED, model: str | None = None, seeds: int = 2) -> Iterator[Attempt]:
    """Train by a recipe once per seed, each drawn here and now, and yield what came of it.

    Raises Rejected for a recipe that fails, cheats or misses the goal, ValueError where no process can be isolated.
    """
    text = read_bytes(recipe, "a recipe is a Python file, see docs/speedrun.md")
    if len(text) > RECIPE_BYTES:
        raise Rejected(f"{recipe} has {len(text):,} bytes, a recipe at most {RECIPE_BYTES:,}.")
    config = make_config(**track.fixed, **track.tested, model=model or track.model)
    device, task, draw = find_device(config), task_of(config), random.SystemRandom().randrange
    with tempfile.TemporaryDirectory() as folder:
        stage(load_policy(config.model), task, Path(folder))
        box = box_of(track, device, Path(folder))
        way, why = find_way(box)
        if way == GUARD:
            raise ValueError(f"A speedrun runs a recipe in Linux namespaces, and there are none here ({why}).")
        for _ in range(seeds):
            seed, words = draw(2**31), text.decode("utf-8", "replace")
            request = {"recipe": words, "fixed": track.fixed | {"seed": seed}, "task": [task.name, task.instruction]}
            cores = os.sched_getaffinity(0)  # the box doesn't let a recipe take more than it begins with
            os.sched_setaffinity(0, sorted(cores)[: 2 if device.type == "cpu" else None])
            try:
                weights, seconds = run(way, box, request, track.seconds)
            finally:
                os.sched_setaffinity(0, cores)
            policy = with_weights(Path(folder, "start"), weights, device)
            new = [problem.to_problem() for problem in generate(track.new, draw(2**31), "test")]
            accuracy = share_right(policy, task, task.problems("test")[: config.eval_problems], config)
            attempt = Attempt(seed, seconds, accuracy, share_right(policy, task, new, config) if new else None)
            if accuracy < track.goal or (new and attempt.on_new < track.goal - SLACK):
                raise Rejected(f"{attempt} The goal is {track.goal:.0%}.")
            yield attempt


def stage(policy: Policy, task: Task, folder: Path) -> None:
    """Write what the box has: the start model, and problems to train on without their worked answers, but for a few."""
    start, problems = folder / "start", folder / "problems"
    policy.model.save_pretrained(start)
    policy.tokenizer.save_pretrained(start)
    for file in start.iterdir():
        file.chmod(0o644)  # the box may have another user
    problems.mkdir()
    for split in ("train", "validation"):
        shown, rest = task.problems(split)[:EXAMPLES], task.problems(split)[EXAMPLES:]
        lines = [json.dumps(asdict(problem)) for problem in [*shown, *(replace(p, answer="") for p in rest)]]
        (problems / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def box_of(track: Track, device: torch.device, folder: Path) -> Box:
    box = candidate.box(device, track.memory_bytes)
    gpus = [path for path in box.devices if path[-1].isdigit()]
    if len(gpus) > 1:
        raise ValueError(f"A speedrun is for one GPU, and there are {len(gpus)}: start a container that sees one.")
    more = {"OMP_NUM_THREADS": "8" if gpus else "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    more |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    modules = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py"))]
    modules = tuple(name for name in modules if not name.startswith(LEFT_OUT))
    limits = box.limits | {"CPU": 8 * track.seconds, "FSIZE": 1 << 30, "folder_bytes": 1 << 30}
    folders = {name: folder / name for name in ("start", "problems")}
    variables = lambda place: box.variables(place) | more  # noqa: E731
    return replace(box, modules=modules, code=CODE, variables=variables, limits=limits, folders=folders)


def run(way: str, box: Box, request: dict[str, Any], most_seconds: float) -> tuple[Any, float]:
    """The weights that come out of a box, and the seconds from its start until all of them were here."""
    began = time.perf_counter()
    with Child(way, box) as child:
        try:
            send(child.connection, encode(request), most_seconds)
            data = receive(child.connection, most_seconds)
            seconds = time.perf_counter() - began
            return decode(data), seconds
        except TimeoutError:
            raise Rejected(f"The recipe returned no weights within {most_seconds:,} seconds.") from None
        except (EOFError, OSError):
            raise Rejected(f"The recipe ended without weights. {child.close()}") from None
        except Unreadable as error:
            raise Rejected(f"The recipe returned something else than weights: {error}.") from None


def with_weights(start: Path, weights: Any, device: torch.device) -> Policy:
    """The start model with other weights. Raises Rejected unless they are its own, by name and shape, and finite."""
    policy = load_policy(str(start), device)
    own = dict(policy.model.named_parameters())
    if not isinstance(weights, dict) or weights.keys() != own.keys():
        raise Rejected("The recipe returned the weights of another model.")
    for name, parameter in own.items():
        new = weights[name]
        if not isinstance(new, torch.Tensor) or new.shape != parameter.shape or not new.isfinite().all():
            raise Rejected(f"The recipe returned weights that don't fit the start model, or aren't finite: {name}.")
        parameter.data.copy_(new)
    return policy


def share_right(policy: Policy, task: Task, problems: list[Problem], config: TrainConfig) -> float:
    """The share of problems whose greedy answer is right."""
    engine = make_engine(policy, config.engine, getattr(torch, config.dtype), config.compile)
    answers = answer_problems(policy, engine, task, problems, config.max_new_tokens, progress="test")
    return summarize(answers)[next(iter(task.metrics))]
