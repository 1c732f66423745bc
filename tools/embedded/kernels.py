"""The recipe of the small model in `data/kernels/model/`: `python -m tools.embedded.kernels FOLDER`.

It takes about eight minutes. With torch 2.13 and one thread of an AMD EPYC it made the very weights that ship.

A Qwen2 of 0.8 million parameters learns to repeat a computation as a program. Demonstrations are what a careless
programmer would leave behind: nearly always eager, now and then with a launch that goes on or a value that is kept, and
mostly checked by the compiler, never by a clock. So the model knows what the words do, and has no idea what is fast.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcourse.course.lessons.warm_start import imitate, kernel_policy
from rlcourse.policy import Policy
from rlcourse.tasks.kernels.language import (
    INPUTS,
    CompileError,
    Computation,
    Line,
    Statement,
    compile_program,
    eager,
)
from tools.embedded import save_halved
from tools.embedded.computations import computations


@dataclass(frozen=True)
class Habits:
    """How often a demonstration departs from the eager program; probabilities by statement, but for `unchecked`."""

    join: float = 0.12  # the launch goes on
    keep: float = 0.4  # where it goes on, the value is kept
    lose: float = 0.01  # where it ends, the value is kept, and so lost
    slip: float = 0.01  # one operand is another name
    skip: float = 0.01  # the line is left out
    side: float = 0.01  # the launch goes to the other stream
    unchecked: float = 0.1  # of a program: it stands even if the compiler refuses it


@dataclass(frozen=True)
class Stage:
    """A part of the training: steps, peak learning rate, longest computation, and the habits (None: eager alone)."""

    steps: int
    lr: float
    longest: int
    habits: Habits | None


@dataclass(frozen=True)
class Recipe:
    """Copy short programs, copy long ones, then pick up habits."""

    sittings: tuple[tuple[Stage, ...], ...] = (
        (Stage(100, 3e-3, 2, None), Stage(200, 3e-3, 4, None), Stage(300, 3e-3, 7, None)),
        (Stage(350, 2e-3, 7, None), Stage(350, 1e-3, 7, Habits())),
    )
    problems: int = 6000
    refused: float = 0.3  # share of them in which one launch does not hold all lines
    rows: int = 32  # demonstrations a step
    seed: int = 1
    size: dict[str, int] = field(default_factory=dict)  # in place of `warm_start.SIZE`


def demonstration(computation: Computation, rng: random.Random, habits: Habits | None) -> list[Statement]:
    """A program for the computation, with the habits' departures from eager, each drawn by itself."""
    if habits is None:
        return eager(computation)
    must_compile = rng.random() >= habits.unchecked
    while True:
        program = departed(computation, rng, habits)
        if not program:
            continue
        try:
            compile_program(program, computation)
        except CompileError:
            if must_compile:
                continue
        return program


def departed(computation: Computation, rng: random.Random, habits: Habits) -> list[Statement]:
    """The eager program with departures; whether it compiles is not looked at."""
    names = [*INPUTS, *(line.name for line in computation.lines)]
    program: list[Statement] = []
    for line in computation.lines:
        if rng.random() < habits.skip:
            continue
        if rng.random() < habits.slip:
            at = rng.randrange(len(line.args))
            line = Line(line.name, line.op, (*line.args[:at], rng.choice(names), *line.args[at + 1 :]))
        last = line.name == "y"
        ends = last or rng.random() >= habits.join
        keeps = not last and rng.random() < (habits.lose if ends else habits.keep)
        begins = not program or program[-1].ends
        program.append(Statement(line, ends, keeps, side=begins and rng.random() < habits.side))
    return program


def run_stage(policy: Policy, stage: Stage, problems: Sequence[Computation], rows: int, rng: random.Random) -> float:
    """Train on fresh demonstrations of the stage; the last loss, nats per token."""
    short = [computation for computation in problems if len(computation.lines) <= stage.longest]
    return imitate(
        policy, short, stage.steps, stage.lr, rows, rng, lambda problem: demonstration(problem, rng, stage.habits)
    )


def sft(recipe: Recipe) -> Policy:
    """The model of the recipe. Each sitting draws alike, and leaves the weights as a file in bfloat16 holds them."""
    problems = computations(recipe.problems, "train", recipe.seed, (2, 7), recipe.refused)
    policy = kernel_policy(recipe.seed, **recipe.size)
    for stages in recipe.sittings:
        rng = random.Random(recipe.seed)
        for stage in stages:
            run_stage(policy, stage, problems, recipe.rows, rng)
        for parameter in policy.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return policy


def main() -> None:
    """Write the model of the recipe, with the seed that may follow the folder, to a new folder."""
    folder, *seed = sys.argv[1:]
    recipe = replace(Recipe(), seed=int(seed[0])) if seed else Recipe()
    save_halved(sft(recipe), Path(folder))


if __name__ == "__main__":
    main()
