"""Problems in their order, rewards in their rows, and training data that keeps every real token."""

from contextlib import nullcontext

import pytest
import torch
from conftest import DEVICE, make_policy

from rlcourse.config import make_config
from rlcourse.experience import (
    Experience,
    PromptOrder,
    add_advantages,
    collect,
    concatenate,
    in_micro_batches,
    row_advantages,
    trim,
)
from rlcourse.policy import ValueHead, frozen_copy
from rlcourse.rollout import Rollout, make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks import MathTask, Problem
from rlcourse.tasks.verify import verify
from rlcourse.update import Update

NUMBERS = [Problem(str(n), "", str(n)) for n in range(10)]


class NumberPolicy:
    """The prompt of a question is its number and its group is told apart by it; token n reads `#### n`."""

    def prompt(self, question, instruction=""):
        return [int(question)]

    def texts(self, completion_ids, completion_mask):
        return [f"#### {row[0]}" for row in completion_ids.tolist()]


class ScriptedEngine:
    """Answers problem n rightly in the rows of the group that `right[n]` lists; n * 100 + row is its log-prob."""

    def __init__(self, right):
        self.right, self.rounds = right, 0

    def generate(self, prompts, num_generations, max_new_tokens, sampling):
        self.rounds += 1
        ids = [[n if row in self.right.get(n, ()) else -1] for (n,) in prompts for row in range(num_generations)]
        logprobs = [[100.0 * n + row] for (n,) in prompts for row in range(num_generations)]
        ids, logprobs = torch.tensor(ids), torch.tensor(logprobs)
        prompt_ids = torch.tensor([prompt for prompt in prompts for _ in range(num_generations)])
        yes = torch.ones_like(ids, dtype=torch.bool)
        return Rollout(prompt_ids, yes, ids, yes, logprobs, yes[:, 0])


def collected(right, **overrides) -> tuple[Experience, ScriptedEngine]:
    config = make_config(num_prompts=3, num_generations=4, **overrides)
    order = PromptOrder(NUMBERS, seed=0)
    order._permutation = lambda epoch: list(range(10))
    engine = ScriptedEngine(right)
    task = MathTask("numbers", "", NUMBERS, [], [])
    return collect(NumberPolicy(), engine, task, order, config, lambda phase: nullcontext()), engine


def random_rollout(rows: int, width: int, length: int) -> Rollout:
    """Left-padded prompts and right-padded completions of random lengths, none empty."""
    prompt = torch.randint(1, width + 1, (rows, 1))
    completion = torch.randint(1, length + 1, (rows, 1))
    prompt_mask, completion_mask = torch.arange(width).flip(0) < prompt, torch.arange(length) < completion
    return Rollout(
        torch.randint(1, 99, (rows, width)) * prompt_mask,
        prompt_mask,
        torch.randint(1, 99, (rows, length)) * completion_mask,
        completion_mask,
        torch.randn(rows, length) * completion_mask,
        torch.rand(rows) < 0.5,
    )


def real_tokens(rollout: Rollout) -> list[tuple]:
    """All that a rollout says of each row, without padding."""
    return [
        (
            rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist(),
            rollout.completion_ids[row][rollout.completion_mask[row]].tolist(),
            rollout.logprobs[row][rollout.completion_mask[row]].tolist(),
            rollout.finished[row].item(),
        )
        for row in range(len(rollout.finished))
    ]


def padding_is_outside(rollout: Rollout) -> bool:
    prompt, completion = rollout.prompt_mask.long(), rollout.completion_mask.long()
    return bool((prompt.diff(dim=1) >= 0).all() and (completion.diff(dim=1) <= 0).all())


def uneven_rollout(policy) -> Rollout:
    """Of the random model: some completions end, some are cut off."""
    torch.manual_seed(0)
    policy.eos_ids = list(range(0, 300, 9))
    rollout = make_engine(policy, "graph", torch.float32).generate([[5, 9, 40], [11]], 4, 7, Sampling())
    assert 0 < rollout.finished.sum() < 8
    return rollout


def test_every_problem_comes_once_an_epoch_in_another_order():
    order = PromptOrder(NUMBERS, seed=3)
    first, second = ([p.gold for _ in range(5) for p in order.take(2)] for _ in range(2))
    assert sorted(first) == sorted(second) == [str(n) for n in range(10)] and first != second


def test_steps_that_straddle_an_epoch_lose_and_repeat_nothing():
    order = PromptOrder(NUMBERS, seed=3)
    taken = [p.gold for _ in range(10) for p in order.take(3)]  # three epochs
    assert all(sorted(taken[start : start + 10]) == [str(n) for n in range(10)] for start in (0, 10, 20))


@pytest.mark.parametrize("position", [0, 4, 9, 10, 17])
def test_the_order_goes_on_from_a_position_as_if_it_had_never_stopped(position):
    order = PromptOrder(NUMBERS, seed=3)
    taken = order.take(position + 12)
    resumed = PromptOrder(NUMBERS, seed=3)
    resumed.position = position
    assert resumed.take(12) == taken[position:] and resumed.position == position + 12


def test_the_seed_makes_the_order_and_torchs_random_state_does_not():
    torch.manual_seed(1)
    first = PromptOrder(NUMBERS, seed=3).take(10)
    torch.manual_seed(2)
    assert PromptOrder(NUMBERS, seed=3).take(10) == first != PromptOrder(NUMBERS, seed=4).take(10)


@pytest.mark.parametrize("seed", range(5))
def test_trim_keeps_every_real_token_and_no_column_of_padding(seed):
    torch.manual_seed(seed)
    rollout = random_rollout(3, width=9, length=12)
    trimmed = trim(rollout)
    assert real_tokens(trimmed) == real_tokens(rollout) and padding_is_outside(trimmed)
    assert trimmed.prompt_ids.shape[1] == rollout.prompt_mask.sum(1).max()
    assert trimmed.completion_ids.shape[1] == trimmed.logprobs.shape[1] == rollout.lengths.max()


def test_trim_on_the_device_keeps_every_real_token():
    torch.manual_seed(0)
    rollout = random_rollout(3, width=9, length=12)
    moved = Rollout(**{name: value.to(DEVICE) for name, value in vars(rollout).items()})
    assert real_tokens(trim(moved)) == real_tokens(rollout) and padding_is_outside(trim(moved))


def test_concatenate_keeps_every_real_token_in_order():
    torch.manual_seed(0)
    rollouts = [random_rollout(2, 3, 8), random_rollout(3, 7, 4), random_rollout(1, 1, 1)]
    joined = concatenate(rollouts)
    assert real_tokens(joined) == [row for rollout in rollouts for row in real_tokens(rollout)]
    assert padding_is_outside(joined)


def test_each_reward_reaches_the_row_that_earned_it():
    experience, _ = collected({0: [1], 1: [0, 3], 2: []})
    assert experience.rewards.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert [p.gold for p in experience.problems] == list("000011112222")
    assert [v.strict for v in experience.verdicts] == [r == 1 for r in experience.rewards.tolist()]
    assert experience.texts[1] == "#### 0" and experience.texts[7] == "#### 1"
    assert experience.rollout.logprobs[:, 0].tolist() == [0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203]
    assert experience.groups_with_signal == pytest.approx(2 / 3)


def test_the_reward_scheme_of_the_config_is_used():
    experience, _ = collected({0: [1]}, reward_correct=2.0, reward_format=0.25)
    assert experience.rewards.tolist()[:4] == [0.25, 2, 0.25, 0.25]


def test_dynamic_sampling_keeps_only_groups_with_signal_when_there_are_enough():
    right = {0: [0, 1, 2, 3], 1: [2], 2: [], 3: [], 4: [0, 1], 5: [1, 2, 3]}
    experience, engine = collected(right, dynamic_sampling=True)
    assert engine.rounds == 2
    assert [p.gold for p in experience.problems] == list("111144445555")
    assert experience.rewards.tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert experience.rollout.logprobs[:, 0].tolist() == [100 * n + row for n in (1, 4, 5) for row in range(4)]
    assert experience.groups_with_signal == pytest.approx(1 / 3)  # of the groups first drawn


def test_dynamic_sampling_gives_up_after_some_rounds_and_keeps_what_it_found():
    experience, engine = collected({7: [3]}, dynamic_sampling=True)
    assert engine.rounds == 4
    assert [p.gold for p in experience.problems] == list("777700001111")


def test_dynamic_sampling_draws_once_where_every_group_has_signal():
    _, engine = collected({n: [0] for n in range(10)}, dynamic_sampling=True)
    assert engine.rounds == 1


@pytest.mark.parametrize(("mask_truncated", "has_gradient"), [(True, False), (False, True)])
def test_mask_truncated_gives_truncated_rows_no_gradient(mask_truncated, has_gradient):
    """Rewards differ among the truncated rows of a group alone, so that all other advantages can be set to zero."""
    policy = make_policy()
    rollout = uneven_rollout(policy)
    config = make_config(num_prompts=2, num_generations=4, max_new_tokens=7, mask_truncated=mask_truncated)
    rewards = torch.arange(8, device=DEVICE).float()
    experience = Experience(rollout, NUMBERS[:8], [""] * 8, [verify("", "1")] * 8, rewards, 1.0)
    add_advantages(experience, policy, None, None, config)
    experience.advantages[rollout.finished] = 0.0
    assert experience.advantages.ne(0).any()
    assert (Update(policy, None, config)(experience, 0)["grad_norm"] > 0) == has_gradient


def test_mask_truncated_trains_the_whole_completions_of_the_others():
    policy = make_policy()
    rollout = uneven_rollout(policy)
    config = make_config(num_prompts=2, num_generations=4, mask_truncated=True)
    experience = Experience(rollout, [], [], [], torch.arange(8, device=DEVICE).float(), 1.0)
    add_advantages(experience, policy, None, None, config)
    for row, done in enumerate(rollout.finished.tolist()):
        assert experience.loss_mask[row].sum() == (rollout.lengths[row] if done else 0)


@pytest.mark.parametrize("rows", [1, 3, 128])
def test_micro_batches_of_any_size_give_the_same_logprobs_and_values(rows):
    policy = make_policy()
    rollout = uneven_rollout(policy)
    torch.manual_seed(1)
    head = ValueHead(32).to(DEVICE)
    torch.nn.init.normal_(head.output.weight)
    config = make_config(micro_batch_rows=rows)
    logprobs, values = in_micro_batches(policy.model, rollout, config, head)
    torch.testing.assert_close(logprobs, rollout.logprobs, atol=1e-4, rtol=0)
    for row in range(8):
        ids = torch.cat([rollout.prompt_ids[row][rollout.prompt_mask[row]], rollout.completion_ids[row]])
        length, prompt = rollout.lengths[row], rollout.prompt_mask[row].sum()
        with torch.no_grad():
            expected = head(policy.model.model(ids[None]).last_hidden_state[0, prompt - 1 : prompt - 1 + length])
        torch.testing.assert_close(values[row, :length], expected, atol=1e-4, rtol=0)


def test_a_reference_is_measured_on_the_tokens_that_were_sampled():
    policy = make_policy()
    experience = Experience(uneven_rollout(policy), [], [], [], torch.arange(8, device=DEVICE).float(), 1.0)
    config = make_config(num_prompts=2, num_generations=4, reference=True)
    add_advantages(experience, policy, frozen_copy(policy.model), None, config)
    torch.testing.assert_close(experience.ref_logprobs, experience.rollout.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("reward", [1, 0, 0, 0, 1, 1, 1, 1]),
        ("batch_centered", [0.375, -0.625, -0.625, -0.625, 0.375, 0.375, 0.375, 0.375]),
        ("leave_one_out", [1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0]),
        ("group_centered", [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]),
        ("group_normalized", [1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0]),
    ],
)
def test_the_config_names_the_advantage(advantage, expected):
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
    config = make_config(num_generations=4, advantage=advantage)
    assert row_advantages(rewards, config).tolist() == pytest.approx(expected, abs=1e-3)
