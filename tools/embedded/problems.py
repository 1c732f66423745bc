"""The problems in `data/`: `python -m tools.embedded.problems FOLDER` writes them, the same bytes each time."""

import json
import sys
from pathlib import Path

from rlcourse.tasks.kernels.language import Computation
from rlcourse.tasks.minigsm import generate
from tools.embedded.computations import computations

MINIGSM = {"train": (4000, 1), "validation": (500, 2), "test": (1000, 3)}  # problems in the file, seed
# (split by structure, count, seed, lines, least share that does not fit one launch) for each part of a file. Training
# has more of those than the test, which has as many as are drawn. Validation has other problems than training, but may
# share structures with it.
KERNELS = {
    "train": [("train", 4000, 1, (2, 5), 0.6)],
    "validation": [("train", 300, 2, (2, 5), 0.0)],
    "test": [("test", 200, 3, (2, 5), 0.0), ("test", 100, 4, (6, 7), 0.0)],
}


def write_minigsm(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, (n, seed) in MINIGSM.items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
            for problem in (generated.to_problem() for generated in generate(n, seed, split)):
                record = {"question": problem.question, "answer": problem.answer, "level": problem.level}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_kernels(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[Computation] = set()
    for name, parts in KERNELS.items():
        drawn = [c for split, count, *rest in parts for c in computations(count, split, *rest) if c not in seen]
        seen.update(drawn)
        (folder / f"{name}.txt").write_text("".join(f"{computation}\n" for computation in drawn), encoding="utf-8")


if __name__ == "__main__":
    write_minigsm(Path(sys.argv[1], "minigsm"))
    write_kernels(Path(sys.argv[1], "kernels"))
