"""The order in which training goes through the problems."""

from functools import lru_cache

import torch

from rlcourse.config import TrainConfig
from rlcourse.files import digest_of
from rlcourse.policy import Policy, check_positions
from rlcourse.tasks.task import Problem, Task, prompts_of


def short_enough(problems: list[Problem], task: Task, policy: Policy, config: TrainConfig) -> list[Problem]:
    """The problems whose prompts fit `max_prompt_tokens`. Raises ValueError if they are too few for a step, or too long
    with their completions for the model's positions."""
    limit, needed = config.max_prompt_tokens, config.num_prompts
    if len(problems) < needed:
        raise ValueError(f"There are {len(problems)} training problems, fewer than num_prompts {needed}: lower it.")
    prompts = prompts_of(task, problems, policy)
    kept = [problem for problem, prompt in zip(problems, prompts, strict=True) if len(prompt) <= limit]
    if len(kept) < needed:
        raise ValueError(
            f"Only {len(kept)} of {len(problems)} training problems have at most {limit} prompt tokens, fewer than "
            f"num_prompts {needed}: raise max_prompt_tokens."
        )
    check_positions(policy.model, max(n for n in map(len, prompts) if n <= limit) + config.max_new_tokens)
    return kept


def fingerprint(task: Task, policy: Policy) -> str:
    """The same for the same problems in the same order, asked in the same words and tokens."""
    every = [problem for split in ("train", "validation", "test") for problem in task.problems(split)]
    return digest_of([task.prompt(every[0], policy), *((problem.question, problem.gold) for problem in every)])


class PromptSampler:
    """Samples problems in a new random order each epoch. Its state is `position`, the number sampled so far."""

    def __init__(self, problems: list[Problem], seed: int):
        self.problems, self.seed, self.position = problems, seed, 0

    def sample(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        places = [divmod(self.position + i, len(self.problems)) for i in range(count)]
        self.position += count
        return [self.problems[self._permutation(epoch)[index]] for epoch, index in places]

    @lru_cache(maxsize=2)  # noqa: B019 (the object lives as long as the run)
    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.problems), generator=generator).tolist()
