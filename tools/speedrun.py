"""Verify a recipe with three seeds and record it: `python -m tools.speedrun RECIPE --by NAME [--gsm8k --model MODEL]`.

`data/measurements/DEVICE/speedrun-RECIPE.json` then has a row for each seed; `python -m tools.readme` adds its line to
docs/speedrun.md.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from rlcourse.speedrun import verifier
from tools.records import write_record

SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--by", required=True, help="whose recipe it is")
    parser.add_argument("--gsm8k", action="store_true")
    parser.add_argument("--model", help="--gsm8k: the start model, a folder or a name")
    options = parser.parse_args()
    track = verifier.GSM8K if options.gsm8k else verifier.EMBEDDED
    attempts = list(verifier.verify(options.recipe, track, options.model, SEEDS))
    print(*attempts, verifier.in_short(attempts), sep="\n")
    setup = {"goal": track.goal, "model": options.model or track.model, "by": options.by}
    results = [{"variant": f"seed {attempt.seed}"} | asdict(attempt) for attempt in attempts]
    print(write_record(f"speedrun-{options.recipe.stem}", setup, results))


if __name__ == "__main__":
    main()
