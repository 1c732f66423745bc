"""Tasks: where the questions come from and who says whether an answer is right.

A task is anything with the attributes of `Task`. Two ship: `minigsm`, generated problems that need no download, and
`gsm8k`, the public data set. Both are `MathTask`s: lists of problems judged by `rlcourse.tasks.verify`.
"""

from rlcourse.tasks.task import Answer, MathTask, Problem, Split, Task

__all__ = ["Answer", "MathTask", "Problem", "Split", "Task", "load_task"]


def load_task(name: str, data_dir: str | None = None) -> Task:
    """The task called `name`; `data_dir` names a folder of JSON lines to read instead of the usual source.

    Raises ValueError for an unknown name, FileNotFoundError or ValueError for a folder that cannot be used.
    """
    if name == "minigsm":
        from rlcourse.tasks import minigsm

        return minigsm.load(data_dir)
    if name == "gsm8k":
        from rlcourse.tasks import gsm8k

        return gsm8k.load(data_dir)
    raise ValueError(f"Unknown task {name!r}: use minigsm or gsm8k.")
