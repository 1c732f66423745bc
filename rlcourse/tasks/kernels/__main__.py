"""`python -m rlcourse.tasks.kernels FOLDER` writes the problems that ship in `data/kernels/`, the same each time."""

import sys
from pathlib import Path

from rlcourse.tasks.kernels.language import Computation
from rlcourse.tasks.kernels.problems import computations

# (split by structure, count, seed, lines, share that one launch does not hold at least) of each part of a file. In
# training there are more of the last than in the test, which has them as often as they are drawn. The problems of the
# validation are others than those of the training, of structures that may be the same.
SHIPPED = {
    "train": [("train", 4000, 1, (2, 5), 0.6)],
    "validation": [("train", 300, 2, (2, 5), 0.0)],
    "test": [("test", 200, 3, (2, 5), 0.0), ("test", 100, 4, (6, 7), 0.0)],
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[Computation] = set()
    for name, parts in SHIPPED.items():
        drawn = [c for split, count, *rest in parts for c in computations(count, split, *rest) if c not in seen]
        seen.update(drawn)
        (folder / f"{name}.txt").write_text("".join(f"{computation}\n" for computation in drawn), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
