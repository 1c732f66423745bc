"""How good a policy is on held-out problems: the task's metrics on greedy answers, and pass@k from samples."""

import math
from typing import Any

import torch

from rlcourse.collect import judge
from rlcourse.config import TrainConfig
from rlcourse.device import find_device, without_cudnn_attention
from rlcourse.dist import ALONE, OneProcess
from rlcourse.distributed import check_launch, start_world
from rlcourse.interrupts import progress_bar, say
from rlcourse.policy import Policy, check_positions, load_policy
from rlcourse.rollout import RolloutEngine, make_engine
from rlcourse.sampling import GREEDY, Sampling
from rlcourse.tasks import Answer, Problem, Task, mean_metrics, overlaps, prompts_of, task_of

BATCH_ROWS = 256  # completions generated at once, at most
PASS_K_PROBLEMS = 64  # test problems for pass@k


def answer_problems(
    policy: Policy,
    engine: RolloutEngine,
    task: Task,
    problems: list[Problem],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    num_generations: int = 1,
    progress: str | None = None,
    seed: int = 0,
) -> list[list[Answer]]:
    """`num_generations` answers to each problem, in their order. Sampling has a random state of its own, begun with
    `seed`: an evaluation never changes the training that follows. progress: the label of a progress bar, if any. Raises
    ValueError without problems or positions for one, RuntimeError if probabilities aren't finite."""
    if not problems:
        raise ValueError("There are no problems to answer.")
    prompts = prompts_of(task, problems, policy)
    check_positions(policy.model, max(map(len, prompts)) + max_new_tokens)  # the longest would come last
    order = sorted(range(len(problems)), key=lambda i: len(prompts[i]))  # so that there is little padding
    batches = math.ceil(len(problems) / max(1, BATCH_ROWS // num_generations))
    size = math.ceil(len(problems) / batches)
    answers: list[list[Answer]] = [[] for _ in problems]
    devices = [policy.device] if policy.device.type == "cuda" else []
    bar = progress_bar(progress, len(problems), "problem", leave=False)
    with torch.random.fork_rng(devices), without_cudnn_attention(), bar:
        torch.manual_seed(seed)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            # All batches have the same number of rows: one CUDA graph serves all.
            filled = batch + batch[-1:] * (size - len(batch))
            rollout = engine.generate([prompts[i] for i in filled], num_generations, max_new_tokens, sampling)
            if not rollout.logprobs.isfinite().all():
                raise RuntimeError("The model's probabilities are not finite: use an earlier checkpoint.")
            rollout = rollout[: len(batch) * num_generations]
            judged = judge(policy, task, [problems[i] for i in batch], rollout, training=False)
            for place, i in enumerate(batch):
                answers[i] = judged[place * num_generations : (place + 1) * num_generations]
            bar.update(len(batch))
    return answers


def answer_test(
    policy: Policy, engine: RolloutEngine, task: Task, config: TrainConfig, when: str = ""
) -> tuple[list[list[Answer]], list[list[Answer]]]:
    """Greedy answers to the config's test problems, and `pass_k` samples of the first few of them, if any."""
    problems = task.problems("test")[: config.eval_problems]
    greedy = answer_problems(policy, engine, task, problems, config.max_new_tokens, progress=f"test {when}".strip())
    if not config.pass_k:
        return greedy, []
    asked = policy, engine, task, problems[:PASS_K_PROBLEMS], config.max_new_tokens
    return greedy, answer_problems(*asked, config.sampling, config.pass_k, f"pass@k {when}".strip(), config.seed)


def summarize_test(greedy: list[list[Answer]], sampled: list[list[Answer]]) -> dict[str, Any]:
    """What greedy answers say, pass@k of the sampled ones, and the first few greedy answers as `samples`."""
    result = {"problems": len(greedy)} | summarize(greedy)
    if sampled:
        result |= mean_pass_at_k(sampled)
    few = [a for a, *_ in greedy[:8]]
    samples = [{"question": a.problem.question, "gold": a.problem.gold, "text": a.text, "right": a.right} for a in few]
    return result | {"samples": samples}


def evaluate(config: TrainConfig) -> dict[str, Any]:
    """What `rlcourse eval` does: measure the config's model on the test problems. `metrics` has their formats."""
    with start_world() as world:
        check_launch(config, trains=False)
        policy, engine, task = load_all(config, world)
        for text in overlaps(task).values() if world.rank == 0 else ():
            say(text)
        return summarize_test(*answer_test(policy, engine, task, config)) | {"metrics": task.metrics}


def load_all(config: TrainConfig, world: OneProcess = ALONE) -> tuple[Policy, RolloutEngine, Task]:
    """Policy, engine and task of a config, on its device."""
    device, dtype = find_device(config), getattr(torch, config.dtype)
    world.setup(device, config)
    policy = load_policy(config.model, device)
    engine = make_engine(policy, config.engine, dtype, config.compile, cache_gb=config.cache_gb)
    return policy, *world.shared(engine, task_of(config))


def summarize(answers: list[list[Answer]]) -> dict[str, float | None]:
    """Means over all answers: the task's metrics, finished, tokens; the first of the metrics by level, too."""
    flat = [answer for group in answers for answer in group]
    summary = mean_metrics(flat)
    headline = next(iter(summary))
    summary["finished"] = sum(a.finished for a in flat) / len(flat)
    summary["tokens"] = sum(a.tokens for a in flat) / len(flat)
    for level in sorted({a.problem.level for a in flat if a.problem.level is not None}):
        summary[f"{headline}_level_{level}"] = mean_metrics([a for a in flat if a.problem.level == level])[headline]
    return summary


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k answers is right, if they are drawn from `samples` with `right` right ones.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def mean_pass_at_k(answers: list[list[Answer]]) -> dict[str, float]:
    """pass@1, pass@2, pass@4, ... up to the samples there are, averaged over problems."""
    samples = len(answers[0])
    ks = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    right = [sum(answer.right for answer in group) for group in answers]
    return {f"pass@{k}": sum(pass_at_k(samples, c, k) for c in right) / len(right) for k in ks}
