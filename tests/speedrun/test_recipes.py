"""Recipes: their hooks are in the place of the package's functions, and what would do nothing is refused."""

import pytest
import torch

from rlcourse import advantages, train
from rlcourse.policy import load_policy
from rlcourse.speedrun import worker
from rlcourse.tasks import load_task

SMALL = {"steps": 2, "num_prompts": 2, "num_generations": 8, "warmup_steps": 0, "lr": 1e-3}
DR_GRPO = """
import torch
settings = {"advantage": "reward", "algorithm": "grpo", "aggregation": "constant", "schedule": "constant"}

def advantages(rewards, num_generations):
    groups = rewards.view(-1, num_generations)
    return (groups - groups.mean(1, keepdim=True)).flatten()

def loss(logprobs, old_logprobs, advantages, mask):
    return -(logprobs - old_logprobs).exp() * advantages * mask

def reward(answer):
    return float(answer.right)

def schedule(step, steps):
    return 1.0 - step / steps
"""


@pytest.fixture
def trained(monkeypatch):
    """The weights after a recipe; its hooks end with the test."""

    def weights(text: str) -> dict[str, torch.Tensor]:
        with monkeypatch.context() as patch:
            for module, name in ((advantages, "completion_advantages"), (train, "token_loss"), (train, "lr_factor")):
                patch.setattr(module, name, getattr(module, name))
            recipe = worker.read_recipe(text)
            config = worker.config_of(recipe, {"device": "cpu", "model": "embedded", "seed": 4} | SMALL)
            return worker.train(recipe, config, load_task("minigsm").with_settings(config))

    return weights


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_hooks_that_are_dr_grpo_train_as_its_settings_do(trained):
    hooks, settings = trained(DR_GRPO), trained('settings = {"algorithm": "dr_grpo", "schedule": "linear"}')
    assert far(hooks, settings) < 1e-5 < far(hooks, trained(""))  # without the schedule


@pytest.mark.parametrize("hook", worker.HOOKS)
def test_a_hook_that_returns_0_learns_nothing(hook, trained):
    without = DR_GRPO.replace(f"def {hook}(", f"def _{hook}(")
    found = trained(f"{without}\ndef {hook}(*given):\n    return 0 * _{hook}(*given)\n")
    assert far(found, dict(load_policy("embedded").model.named_parameters())) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def advantage(rewards, size): return rewards", "No hook is called advantage: use advantages, loss"),
        ("settings = {'seed': 1}", "The verifier sets seed"),
        ("settings = {'model': 'embedded-kernels'}", "The verifier sets model"),
        ("settings = {'learning_rate': 1}", "learning_rate"),
        ("settings = {'algorithm': 'ppo'}\ndef advantages(rewards, size): return rewards", "does nothing in PPO"),
    ],
)
def test_what_a_recipe_may_not_set_or_would_do_nothing_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        worker.config_of(worker.read_recipe(text), {"model": "embedded", "seed": 0})


def test_a_helper_and_an_import_are_no_hooks():
    assert worker.read_recipe("from math import cos\nfrom json import dumps\ndef _half(x): return x / 2")
