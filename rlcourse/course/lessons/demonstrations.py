"""Demonstrations of uneven quality on `minigsm`, as text found on the web would be. A model that imitates them does
each of their mistakes some of the time, so reinforcement learning has something to choose from."""

import random
from dataclasses import dataclass

from rlcourse.tasks.minigsm import GeneratedProblem, solve, work

THINK = "Let me think."
CHECK = "Let me check:"
ANSWER = "The answer is"
SLIPS = (-10, -2, -1, 1, 2, 10)  # what a slip adds to a result: a lost carry, or being off by one or two


@dataclass(frozen=True)
class Mix:
    """How the demonstrations are mixed; all but `longest` are probabilities, and the first three add up to 1."""

    worked: float = 0.35  # steps, then #### N
    guess: float = 0.50  # #### N without a step
    prose: float = 0.15  # steps, then "The answer is N."
    think: float = 0.30  # a guess begins with "Let me think."
    check: float = 0.20  # a step is followed by a check
    again: float = 0.50  # "Let me think." or a check is repeated, each time
    longest: int = 6  # repetitions at most
    slip: float = 0.05  # a worked answer has a wrong calculation and goes on with its result


def demonstration(problem: GeneratedProblem, rng: random.Random, mix: Mix) -> str:
    """One demonstration of an answer to the problem, its kind and flaws drawn from rng."""
    kind = rng.choices(("worked", "guess", "prose"), (mix.worked, mix.guess, mix.prose))[0]
    if kind == "guess":
        return "\n".join([THINK] * repetitions(rng, mix.think, mix) + [f"#### {problem.gold}"])
    lines = []
    calculations = solve(problem.steps, problem.numbers, draw_slip(problem, rng, mix.slip))
    for step, calculation in zip(problem.steps, calculations, strict=True):
        lines.append(work(step, calculation))
        lines += [f"{CHECK} {calculation}."] * repetitions(rng, mix.check, mix)
    result = calculations[-1].result
    lines.append(f"{ANSWER} {result}." if kind == "prose" else f"#### {result}")
    return "\n".join(lines)


def repetitions(rng: random.Random, begin: float, mix: Mix) -> int:
    """How often a line is written: not at all with probability 1 - begin, then once more with probability `again`."""
    count = int(rng.random() < begin)
    while 0 < count < mix.longest and rng.random() < mix.again:
        count += 1
    return count


def draw_slip(problem: GeneratedProblem, rng: random.Random, probability: float) -> dict[int, int]:
    """With this probability a slip for `solve` (place of a step: error), one that lets the later steps be done."""
    if rng.random() >= probability:
        return {}
    slips = [{place: error} for place in range(1, problem.level + 1) for error in SLIPS]
    return rng.choice([slip for slip in slips if solve(problem.steps, problem.numbers, slip) is not None])
