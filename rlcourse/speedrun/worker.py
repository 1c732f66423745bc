"""In the box: train by a recipe, and send the weights to the verifier. Nothing here is trusted.

A recipe is Python with a dictionary `settings`, those of `rlcourse train`, and any of HOOKS, each in place of a part of
the training step:

    advantages(rewards, num_generations)                 [rows] → [rows], group after group
    loss(logprobs, old_logprobs, advantages, mask)       [rows, length] → the loss of each token, 0 where masked
    reward(answer)                                       what one `Answer` earns; `answer.right` is the judge's verdict
    schedule(step, steps)                                the learning rate of a step (from 0) as a share of its peak
"""

import inspect
import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcourse import advantages as advantages_of_package
from rlcourse import train as step_of_package
from rlcourse.collect import answer_rewards
from rlcourse.config import TrainConfig, make_config
from rlcourse.device import find_device
from rlcourse.learner import Learner
from rlcourse.policy import load_policy, low_precision_copy
from rlcourse.rollout import make_engine
from rlcourse.sandbox.wire import decode, encode, receive, send
from rlcourse.tasks import MathTask, Problem
from rlcourse.tasks.prompts import PromptSampler, short_enough

HOOKS = ("advantages", "loss", "reward", "schedule")
MOST_BYTES = (1 << 32) - 1  # of the weights


def main(wire: int) -> None:
    connection, staged = socket.socket(fileno=wire), Path(sys.path[0])
    request = decode(receive(connection))
    recipe = read_recipe(request["recipe"])
    config = config_of(recipe, request["fixed"] | {"model": str(staged / "start")})
    texts = [(staged / "problems" / f"{split}.jsonl").read_text(encoding="utf-8") for split in ("train", "validation")]
    splits = [[Problem(**json.loads(line)) for line in text.splitlines()] for text in texts]
    weights = train(recipe, config, MathTask(*request["task"], *splits, test=[]).with_settings(config))
    send(connection, encode(weights, MOST_BYTES))


def read_recipe(text: str) -> dict[str, Any]:
    """What a recipe defines, by name. Raises ValueError for a function that would do nothing."""
    names = {"__name__": "recipe"}
    exec(compile(text, "recipe", "exec"), names)
    own = {name for name, value in names.items() if inspect.isfunction(value) and value.__module__ == "recipe"}
    if unused := sorted(name for name in own - set(HOOKS) if not name.startswith("_")):
        raise ValueError(f"No hook is called {unused[0]}: use {', '.join(HOOKS)}, or begin a helper's name with _.")
    return names


def config_of(recipe: dict[str, Any], fixed: dict[str, Any]) -> TrainConfig:
    """The config of a recipe's settings and the verifier's. Raises ValueError for one that both set."""
    settings = recipe.get("settings", {})
    if taken := sorted(settings.keys() & fixed.keys()):
        raise ValueError(f"The verifier sets {', '.join(taken)}: leave it out of `settings`.")
    config = make_config(**fixed, **settings)
    if config.advantage == "gae" and "advantages" in recipe:
        raise ValueError("The hook `advantages` does nothing in PPO: leave it out, or choose another algorithm.")
    return config


def train(recipe: dict[str, Any], config: TrainConfig, task: MathTask) -> dict[str, Tensor]:
    """The weights after `config.steps` training steps with the recipe's hooks, by name, in the config's dtype. For the
    rest of this process its functions are in the place of the package's."""
    if advantages := recipe.get("advantages"):
        advantages_of_package.completion_advantages = lambda rewards, _, size: advantages(rewards, size)
    if loss := recipe.get("loss"):
        step_of_package.token_loss = lambda *given, **_: (loss(*given), torch.zeros_like(given[-1]))
    if schedule := recipe.get("schedule"):
        step_of_package.lr_factor = lambda step, config: schedule(step, config.steps)
    reward, device, dtype = recipe.get("reward"), find_device(config), getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    policy = load_policy(config.model, device)
    learner, longest = Learner(policy, config), config.max_prompt_tokens + config.max_new_tokens
    engine = make_engine(policy, config.engine, dtype, config.compile, longest, config.cache_gb, config.sleep)
    prompts = PromptSampler(short_enough(task.problems("train"), task, policy, config), config.seed)
    earned = answer_rewards if reward is None else lambda answers, _: [reward(answer) for answer in answers]
    for step in range(config.steps):
        step_of_package.train_step(learner, engine, task, prompts, step, earned)
    return dict(low_precision_copy(policy.model, dtype).named_parameters())
