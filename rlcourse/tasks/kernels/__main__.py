"""`python -m rlcourse.tasks.kernels FOLDER` writes the problems that ship in `data/kernels/`, the same each time."""

import sys
from pathlib import Path

from rlcourse.tasks.kernels.problems import computations

# (count, split by structure, seed, lines, share that one launch does not hold at least) of each part of a file. In
# training there are more of the last than in the test, which has them as often as they are drawn.
SHIPPED = {
    "train": [(4000, "train", 1, (2, 5), 0.75)],
    "validation": [(200, "validation", 2, (2, 5), 0.0)],
    "test": [(200, "test", 3, (2, 5), 0.0), (100, "test", 4, (6, 7), 0.0)],
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in SHIPPED.items():
        lines = [str(computation) for part in parts for computation in computations(*part)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
