"""What a run would be like: a few real steps on a throw-away copy of it, before the hours are paid for."""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcourse.advantages import has_signal
from rlcourse.batch import Completions
from rlcourse.config import TrainConfig
from rlcourse.distributed.world import ALONE
from rlcourse.evaluation import BATCH_ROWS, PASS_K_PROBLEMS, answer_problems
from rlcourse.measure.profiling import peak_memory_bytes
from rlcourse.measure.timing import seconds
from rlcourse.runs import RunFolder
from rlcourse.sampling import GREEDY
from rlcourse.step import train_step
from rlcourse.tasks import Answer
from rlcourse.trainer import Trainer
from rlcourse.watch import before_training

STEPS = 8  # the first compiles and is not timed
# Later steps took 0.8 to 1.3 times as long in 22 runs, as answers grew or shrank and more groups had a signal.
SLOWER = 1.05


def preview(config: TrainConfig, began: float | None = None) -> dict[str, Any]:
    """Load the run's model, take `STEPS` of its steps and answer some of its test problems; keep nothing of it.

    Returns, of the first step's answers, `readings` (see there), the name of the one that is `rewarded`, the `ends` at
    which one stops, mean `length` in tokens, the share that was `cut_off`, and two `samples`; the `warnings` so far;
    `memory_bytes`, the most held; `step_seconds`, and the `seconds` of the whole run by part. Raises what
    `rlcourse.trainer.train` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder), replace(config, log_to="none"))
        run.began = began or run.began
        trainer = Trainer(run, ALONE.device(config))
        greedy, evaluation = evaluation_seconds(trainer)
        parts = trainer.learner, trainer.engine, trainer.judged, trainer.order
        found = [train_step(*parts, step) for step in range(STEPS)]
        saving = seconds(trainer._save, trainer.device)
    took = [metrics["timing"]["step_s"] for metrics, _ in found]
    step, first = SLOWER * statistics.mean(took[1:]), found[0][1]
    groups = [first.answers[i : i + config.num_generations] for i in range(0, config.rows, config.num_generations)]
    saves = 1 + (config.steps - 1) // config.save_every if config.save_every else 1
    parts = {
        "starting": trainer.spent.seconds["starting"],
        "steps": took[0] + (config.steps - 1) * step,
        "evaluation": evaluation,
        "saving": saves * saving,
    }
    return {
        "readings": readings(first, config),
        "rewarded": trainer.headline,
        "ends": [trainer.policy.tokenizer.decode([token]) for token in trainer.policy.eos_ids],
        "length": sum(a.tokens for a in first.answers) / len(first.answers),
        "cut_off": sum(not a.finished for a in first.answers) / len(first.answers),
        "samples": [{"text": a.text, "gold": a.problem.gold, "words": a.verdict.words} for a in first.answers[:2]],
        "warnings": before_training(greedy, groups, config),
        "memory_bytes": peak_memory_bytes(trainer.device),
        "step_seconds": step,
        "seconds": parts,
    }


def evaluation_seconds(trainer: Trainer) -> tuple[list[Answer], float]:
    """Greedy answers to a batch of test problems, and how long all of the run's evaluations will take at that rate."""
    config, task = trainer.config, trainer.task
    problems = task.problems("test")
    limit, few = config.max_new_tokens, problems[: min(BATCH_ROWS, config.eval_problems)]
    greedy: list[list[Answer]] = []

    def answer(count: int, sampling: Any, times: int) -> float:
        asked = few[: max(1, min(BATCH_ROWS // times, count, len(few)))]
        arguments = trainer.policy, trainer.engine, task, asked, limit, sampling, times
        took = seconds(lambda: greedy.extend(answer_problems(*arguments)), trainer.device)
        return took * count / len(asked)

    first = answer(len(few), GREEDY, 1)
    answered = [group[0] for group in greedy]
    again = answer(len(few), GREEDY, 1)  # without compilation
    total = first - again + again * 2 * min(config.eval_problems, len(problems)) / len(few)
    if config.pass_k:
        total += 2 * answer(min(PASS_K_PROBLEMS, config.eval_problems, len(problems)), config.sampling, config.pass_k)
    if config.eval_every:
        validations = 1 + config.steps // config.eval_every
        total += validations * again * min(config.eval_validation, len(task.problems("validation"))) / len(few)
    return answered, total


def readings(completions: Completions, config: TrainConfig) -> list[tuple[str, float, float]]:
    """For the reward and each reading of the answers: its name, the mean, the share of groups where it differs."""
    answers, size = completions.answers, config.num_generations
    rows = [("reward", completions.rewards)]
    for name in answers[0].verdict.metrics:
        values = [a.verdict.metrics[name] for a in answers]
        if name.startswith("accuracy") and None not in values:
            rows.append((name, completions.rewards.new_tensor(values)))
    return [(name, row.mean().item(), has_signal(row, size).float().mean().item()) for name, row in rows]
