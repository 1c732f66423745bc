"""The problems in `data/kernels/`: `python -m tools.embedded.problems FOLDER` writes them, the same each time."""

import sys
from pathlib import Path

from rlcourse.tasks.kernels.language import Computation
from rlcourse.tasks.kernels.problems import computations

# (split by structure, count, seed, lines, least share that does not fit one launch) for each part of a file. Training
# has more of those than the test, which has as many as are drawn. Validation has other problems than training, but may
# share structures with it.
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
