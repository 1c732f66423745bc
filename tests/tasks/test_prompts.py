"""The order of the problems: each once an epoch, the same from any position on."""

from dataclasses import replace

import pytest
import torch
from policies import make_policy

from rlcourse.config import make_config
from rlcourse.tasks import MathTask, Problem
from rlcourse.tasks.prompts import PromptSampler, short_enough

NUMBERS = [Problem(str(n), "", str(n)) for n in range(10)]


def numbers(sampler: PromptSampler, count: int) -> list[int]:
    return [int(problem.gold) for problem in sampler.sample(count)]


def test_a_prompt_whose_answer_may_exceed_the_positions_is_refused_unless_it_is_left_out():
    policy, problems = make_policy(), [Problem("1+1?", "", "2"), Problem("Tom has 3 apples " * 5, "", "3")]
    task = MathTask("toy", "", problems, [], [])
    short, long = map(len, policy.prompts([problem.question for problem in problems]))
    config = make_config(num_prompts=1, max_prompt_tokens=long, max_new_tokens=256 - short)
    with pytest.raises(
        ValueError, match=f"of {256 - short + long} tokens exceed the model's 256 positions: lower max_"
    ):
        short_enough(problems, task, policy, config)
    assert short_enough(problems, task, policy, replace(config, max_prompt_tokens=short)) == problems[:1]


def test_every_problem_comes_once_an_epoch_in_another_order():
    sampler = PromptSampler(NUMBERS, seed=3)
    epochs = [[n for _ in range(5) for n in numbers(sampler, 2)] for _ in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({*map(tuple, [*epochs, list(range(10))])}) == 5


@pytest.mark.parametrize("position", [0, 4, 9, 10, 17])
def test_the_order_goes_on_from_a_position_as_if_it_had_never_stopped(position):
    sampler = PromptSampler(NUMBERS, seed=3)
    sampled = sampler.sample(position + 12)
    resumed = PromptSampler(NUMBERS, seed=3)
    resumed.position = position
    assert resumed.sample(12) == sampled[position:] and resumed.position == position + 12


def test_the_seed_makes_the_order_and_torchs_random_state_does_not():
    torch.manual_seed(1)
    first = PromptSampler(NUMBERS, seed=3).sample(10)
    torch.manual_seed(2)
    expected = torch.rand(3)
    torch.manual_seed(2)
    assert PromptSampler(NUMBERS, seed=3).sample(10) == first
    assert torch.equal(torch.rand(3), expected)
    assert len({tuple(numbers(PromptSampler(NUMBERS, seed), 10)) for seed in range(5)}) == 5


def test_an_epoch_of_one_seed_is_not_another_epoch_of_the_next_seed():
    """Seeds that are added to the epoch would make seed 4 the run of seed 3, an epoch late."""
    first, second = (numbers(PromptSampler(NUMBERS, seed), 40) for seed in (3, 4))
    epochs = [{tuple(sampled[start : start + 10]) for start in range(0, 40, 10)} for sampled in (first, second)]
    assert not epochs[0] & epochs[1]
