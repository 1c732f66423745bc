"""The config's model and prompts, for benchmarks that don't measure random weights."""

from rlcourse.config import TrainConfig
from rlcourse.device import find_device
from rlcourse.exact.weights import unknown_part
from rlcourse.policy import Policy, load_policy
from rlcourse.tasks import load_task
from rlcourse.tasks.prompts import PromptSampler


def policy_and_prompts(config: TrainConfig) -> tuple[Policy, list[list[int]]]:
    """The config's model, and the prompts of its first training step.

    Raises ValueError for a model that the fast engine does not know: its figures would be those of another engine.
    """
    task, policy = load_task(config.task), load_policy(config.model, find_device(config))
    if unknown := unknown_part(policy.model):
        raise ValueError(f"The fast engine does not know {unknown}: measure another --model.")
    problems = PromptSampler(task.problems("train"), config.seed).sample(config.num_prompts)
    return policy, [task.prompt(problem, policy) for problem in problems]
