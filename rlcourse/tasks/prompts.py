"""The order in which training goes through the problems."""

from functools import lru_cache

import torch

from rlcourse.tasks.task import Problem


class PromptSampler:
    """Goes through the problems, in a new random order each epoch. Its state is `position`, the number sampled."""

    def __init__(self, problems: list[Problem], seed: int):
        self.problems, self.seed, self.position = problems, seed, 0

    def sample(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        sampled = self.peek(count)
        self.position += count
        return sampled

    def peek(self, count: int) -> list[Problem]:
        """What `sample` would return."""
        return [self._at(self.position + i) for i in range(count)]

    def _at(self, position: int) -> Problem:
        epoch, index = divmod(position, len(self.problems))
        return self.problems[self._permutation(epoch)[index]]

    @lru_cache(maxsize=2)  # noqa: B019 (the object lives as long as the run)
    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.problems), generator=generator).tolist()
