"""Supervised fine-tuning from scratch: how the embedded model that ships in `data/minigsm/model/` was made, in about 12
minutes on two CPU cores: `python -m tools.embedded.minigsm [--output FOLDER]`.

A small Qwen2 learns to continue a question with a demonstration: first worked answers alone, then, for a short while,
uneven ones (`rlcourse/course/lessons/demonstrations.py`). So it knows how to work a problem out and often doesn't:
RL starts from there.

Its batches are padded, unlike those of `rlcourse sft`: packed ones would round differently, and so make another model.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from rlcourse.course.lessons.demonstrations import ANSWER, CHECK, THINK, Mix, demonstration
from rlcourse.course.lessons.warm_start import Pairs, as_pair, by_length, random_policy, train_on
from rlcourse.files import try_empty_folder, try_folder
from rlcourse.policy import Policy
from rlcourse.tasks.minigsm import GeneratedProblem, sample
from tools.embedded import save_halved
from tools.embedded.tokenizer import train_tokenizer

TOKENIZER_BYTES = 1_000_000  # more than a tokenizer of this size has


WORKED = Mix(worked=1, guess=0, prose=0, think=0, check=0, slip=0)  # every answer worked out, none with a flaw
GUESSED = {1: 0.35, 2: 0.55, 3: 0.65, 4: 0.75}  # share of guesses by level: people skip the working when it is long
IN_WORDS, MONEY_IN_WORDS = 0.2, 0.7  # share of worked answers that end in words, more of them when asked for dollars


def uneven_mix(problem: GeneratedProblem) -> Mix:
    """The mixture for a problem: the longer its working the more guesses, and money mostly in words."""
    guess = GUESSED[problem.level]
    words = MONEY_IN_WORDS if "dollars" in problem.question else IN_WORDS
    return Mix(worked=(1 - guess) * (1 - words), guess=guess, prose=(1 - guess) * words)


@dataclass(frozen=True)
class Stage:
    """A part of the training: steps, peak learning rate, and the mixture of demonstrations for a problem."""

    name: str
    steps: int
    lr: float
    warmup_steps: int
    mix_of: Callable[[GeneratedProblem], Mix]


@dataclass(frozen=True)
class Recipe:
    """The recipe of the embedded model: learn to calculate from clean answers, then pick up habits from uneven ones."""

    worked_steps: int = 1000
    uneven_steps: int = 100
    rows: int = 128  # demonstrations a step
    seed: int = 1
    vocab_size: int = 576
    size: dict[str, int] = field(default_factory=dict)  # in place of `warm_start.SIZE`

    @property
    def stages(self) -> list[Stage]:
        return [
            Stage("worked", self.worked_steps, lr=2e-3, warmup_steps=50, mix_of=lambda problem: WORKED),
            Stage("uneven", self.uneven_steps, lr=4e-4, warmup_steps=10, mix_of=uneven_mix),
        ]


def minigsm_texts(n: int = 20_000, seed: int = 7) -> Iterator[str]:
    """What the tokenizer of the embedded model is trained on: questions and answers of n problems, words around them.

    The problems are of the sft split alone. The words are the names of the roles and the phrases of the demonstrations.
    """
    rng = random.Random(seed)
    for i in range(n):
        problem = sample(rng, "sft").to_problem()
        yield problem.question
        yield problem.answer
        if i % 10 == 0:  # often enough to become tokens
            yield f"system\nuser\nassistant\n{THINK}\n{CHECK} {ANSWER} "


def new_policy(recipe: Recipe) -> Policy:
    """A Qwen2 model with random weights, and a tokenizer trained on the task's texts."""
    tokenizer = train_tokenizer(minigsm_texts(), recipe.vocab_size)
    return random_policy(tokenizer, recipe.seed, max_position_embeddings=512, **recipe.size)


def demonstrations(policy: Policy, rows: int, rng: random.Random, mix_of: Callable[[GeneratedProblem], Mix]) -> Pairs:
    """Fresh prompts and their demonstrations, shortest first."""
    problems = (sample(rng, "sft") for _ in range(rows))
    return by_length([as_pair(policy, p.question, demonstration(p, rng, mix_of(p))) for p in problems])


def sft(recipe: Recipe, output: str | Path) -> float:
    """Train the embedded model by the recipe and write it to `output` in bfloat16; returns the last loss, nats a token.

    Raises ValueError when `output` holds something already, OSError when it cannot be written to, RuntimeError when the
    loss stops being finite. Ctrl-C writes what there is.
    """
    output = Path(output).expanduser()
    try_empty_folder(output, "choose another --output")
    policy = new_policy(recipe)
    model_bytes = 2 * sum(parameter.numel() for parameter in policy.model.parameters())
    try_folder(output, "choose another --output", model_bytes + TOKENIZER_BYTES)
    try:
        for number, stage in enumerate(recipe.stages):
            loss = run_stage(policy, stage, recipe.rows, random.Random(recipe.seed + number))
    except KeyboardInterrupt:
        save_halved(policy, output)
        tqdm.write(f"Stopped early. The model as it is now is in {output}.")
        raise
    save_halved(policy, output)
    return loss


def run_stage(policy: Policy, stage: Stage, rows: int, rng: random.Random) -> float:
    """Train on `rows` fresh demonstrations a step, AdamW, the learning rate falling to a twentieth; the last loss."""
    parameters = policy.model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    loss = float("nan")
    bar = tqdm(range(stage.steps), desc=stage.name, unit="step", dynamic_ncols=True)
    for step in bar:
        rate = min(1.0, (step + 1) / stage.warmup_steps) * max(0.05, 1.0 - step / stage.steps)
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * rate
        loss = train_on(policy, demonstrations(policy, rows, rng, stage.mix_of))
        if not math.isfinite(loss):
            raise RuntimeError(f"The loss of step {step + 1} is not finite: nothing was saved.")
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss:.3f}")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/embedded", help="an empty folder, or one that is not there")
    output = parser.parse_args().output
    loss = sft(Recipe(), output)
    print(f"Loss {loss:.3f} nats a token. The model is in {output}: `rlcourse eval --model {output}` measures it.")


if __name__ == "__main__":
    main()
