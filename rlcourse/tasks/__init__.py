"""Tasks: where questions come from and who judges answers. A task is anything with the attributes of `Task`. `--task
mypackage.mytask:task` names one of your own: the task, or a function that makes it."""

import importlib
import os
import re
import sys
from typing import Any

from rlcourse.tasks.task import (
    Answer,
    Attempt,
    Judgement,
    MathTask,
    Problem,
    Split,
    Task,
    in_format,
    mean_metrics,
    prompts_of,
)

__all__ = [
    "TASKS", "Answer", "Attempt", "Judgement", "MathTask", "Problem", "Split", "Task", "check_task_name",
    "in_format", "load_task", "mean_metrics", "object_at", "overlaps", "prompts_of", "task_of",
]  # fmt: skip

TASKS = {
    "minigsm": "rlcourse.tasks.gsm8k:load_minigsm",  # generated problems that need no download
    "gsm8k": "rlcourse.tasks.gsm8k:load",  # the public data set
    "math": "rlcourse.tasks.math:load",  # harder problems whose answers are expressions
    "kernelbench": "rlcourse.tasks.kernelbench.task:load",  # GPU kernels, which are run
    "kernels": "rlcourse.tasks.kernels.task:load",  # programs of a small language that a laptop can judge
}
NEEDED = ("name", "metrics", "problems", "prompt", "judge")


def check_task_name(name: str) -> None:
    """Raise ValueError unless `name` is a task that ships or `module:object`, maybe with `@folder`."""
    name = name.partition("@")[0]
    if name not in TASKS and not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise ValueError(f"Unknown task {name!r}: use {', '.join(TASKS)}, or module:object for one of your own.")


def load_task(name: str) -> Task:
    """The task called `name`, or the one at `module:object`, which may be a function that makes it from the folder in
    `name@folder`. Raises ValueError if there is no such task or it reads no folder; FileNotFoundError or ValueError for
    a bad folder."""
    check_task_name(name)
    name, _, folder = name.partition("@")
    found = object_at(TASKS.get(name, name))
    if callable(found):
        found = found(folder or None)
    elif folder:
        raise ValueError(f"{name} is a task already and reads no folder: name a function of a folder that makes one.")
    missing = [attribute for attribute in NEEDED if not hasattr(found, attribute)]
    if missing:
        raise ValueError(f"{name} is not a task: it has no {' and no '.join(missing)} (see rlcourse/tasks/task.py).")
    if not found.metrics:
        raise ValueError(f"{name} measures nothing: name one of its metrics at least (see rlcourse/tasks/task.py).")
    return found


def task_of(config: Any) -> Task:
    """The config's task, with its rewards and worked examples. Raises what `load_task` does, and ValueError for
    examples of a task that has none."""
    task = load_task(config.task)
    if isinstance(task, MathTask):
        return task.with_settings(config)
    if config.examples:
        raise ValueError(f"Task {config.task} has no worked examples: use --examples 0.")
    return task


def overlaps(task: Task) -> dict[str, str]:
    """Warnings, by kind, of problems that are both trained on and tested."""
    found, known = {}, {problem.question for problem in task.problems("train")}
    for split in ("validation", "test"):
        problems = task.problems(split)
        if shared := [problem.question for problem in problems if problem.question in known]:
            found[f"{split}_overlap"] = (
                f"{len(shared):,} of {len(problems):,} {split} problems of {task.name} are also trained on, so they "
                f"say nothing about new ones: take them out of one of the two. The first: “{shared[0][:100]}”"
            )
    return found


def object_at(place: str) -> Any:
    """The object at `module:object`; the current folder is searched, too. Raises ValueError if it isn't there."""
    module, _, path = place.partition(":")
    if os.getcwd() not in sys.path:  # where the `rlcourse` command doesn't look
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports isn't
        raise ValueError(f"There is no module {module!r}: run in the folder that holds it, or install it.") from None
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ValueError(f"There is no {attribute!r} in {module}: --task names module:object.")
        found = getattr(found, attribute)
    return found
