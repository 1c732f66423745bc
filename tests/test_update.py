"""The update as a whole: the gradient that reaches the optimizer, against loops over single rows in float64."""

import copy

import pytest
import torch
from conftest import DEVICE, make_policy

from rlcourse.config import ALGORITHMS, make_config
from rlcourse.experience import Experience, add_advantages
from rlcourse.policy import ValueHead, frozen_copy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.tasks.verify import verify
from rlcourse.update import Update, lr_factor

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36]]
GROUP = 4
MAX_NEW_TOKENS = 7


def config_for(algorithm: str = "dr_grpo", **overrides):
    sizes = {"num_prompts": 3, "num_generations": GROUP, "max_new_tokens": MAX_NEW_TOKENS, "max_grad_norm": 1e9}
    return make_config("laptop", algorithm=algorithm, warmup_steps=0, **(sizes | overrides))


def roll_out(policy, sampling=None) -> Experience:
    """Rows of differing lengths, some cut off, with rewards that differ within groups but for the last."""
    torch.manual_seed(0)
    policy.eos_ids = list(range(0, 300, 9))
    engine = make_engine(policy, "graph", torch.float32)
    rollout = engine.generate(PROMPTS, GROUP, MAX_NEW_TOKENS, sampling or Sampling())
    assert not rollout.finished.all()
    assert len(rollout.lengths.unique()) > 2
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 1, 0.5, 0, 1, 1, 1, 1], device=DEVICE)
    verdict = verify("#### 1", "1")
    return Experience(rollout, [None] * 12, [""] * 12, [verdict] * 12, rewards, groups_with_signal=2 / 3)


def gradient(policy, experience, config, value_head=None, reference=None) -> dict[str, torch.Tensor]:
    """The gradient that the optimizer is given in the first of the update's steps."""
    add_advantages(experience, policy, reference, value_head, config)
    update = Update(policy, value_head, config)
    seen = {}

    def step():
        if not seen:
            named = {"policy": policy.model} | ({"value": value_head} if value_head else {})
            for name, module in named.items():
                seen.update({f"{name}.{n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})

    update.optimizer.step = step
    update(experience, 0)
    return seen


def row_logprobs(model64, rollout, row: int, sampling=None) -> torch.Tensor:
    """Log-probs of one row's tokens: no padding, no batch, float64."""
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
    completion = rollout.completion_ids[row][rollout.completion_mask[row]]
    logits = model64(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    if sampling is not None:
        logits = logits / sampling.temperature
        kept = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kept, float("-inf"))
    return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]


def by_hand(policy, experience, algorithm: str) -> dict[str, torch.Tensor]:
    """The gradient of the algorithm's loss on fresh samples, where the ratio is 1, so that clipping does nothing."""
    model = copy.deepcopy(policy.model).double()
    rollout, rewards = experience.rollout, experience.rewards.double()
    lengths = rollout.lengths.tolist()
    loss = 0.0
    for row in range(12):
        group = rewards[row // GROUP * GROUP : row // GROUP * GROUP + GROUP]
        others = (group.sum() - rewards[row]) / (GROUP - 1)
        advantage = {
            "reinforce": rewards[row],
            "reinforce_baseline": rewards[row] - rewards.mean(),
            "rloo": rewards[row] - others,
            "dr_grpo": rewards[row] - group.mean(),
        }.get(algorithm, (rewards[row] - group.mean()) / (group.std() + 1e-4))
        counted = not (algorithm == "dapo" and not rollout.finished[row])
        kept_lengths = [n for n, done in zip(lengths, rollout.finished, strict=True) if algorithm != "dapo" or done]
        weight = {
            "grpo": 1 / (12 * lengths[row]),
            "gspo": 1 / (12 * lengths[row]),
            "dapo": counted / sum(kept_lengths),
            "cispo": 1 / sum(lengths),
        }.get(algorithm, 1 / (12 * MAX_NEW_TOKENS))
        loss = loss - weight * advantage * row_logprobs(model, rollout, row).sum()
    loss.backward()
    return {f"policy.{name}": p.grad for name, p in model.named_parameters()}


def assert_same_gradient(actual, expected):
    assert actual.keys() == expected.keys()
    scale = max(g.abs().max().item() for g in expected.values())
    assert scale > 1e-4
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, atol=2e-4 * scale, rtol=0, msg=name)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])
def test_the_first_gradient_is_that_of_the_algorithms_formula(algorithm):
    policy = make_policy()
    experience = roll_out(policy)
    expected = by_hand(policy, experience, algorithm)
    assert_same_gradient(gradient(policy, experience, config_for(algorithm)), expected)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "ppo"])
@pytest.mark.parametrize("micro_batch_rows", [1, 5])
def test_gradient_accumulation_changes_nothing(algorithm, micro_batch_rows):
    policy = make_policy()
    experience = roll_out(policy)
    torch.manual_seed(1)
    head = ValueHead(32).to(DEVICE) if algorithm == "ppo" else None
    reference = frozen_copy(make_policy(seed=5).model)
    options = {"kl_coef": 0.1}
    whole = gradient(policy, experience, config_for(algorithm, **options), head, reference)
    policy.model.zero_grad()
    parts = gradient(
        policy, experience, config_for(algorithm, micro_batch_rows=micro_batch_rows, **options), head, reference
    )
    assert_same_gradient(parts, {name: g.double() for name, g in whole.items()})


def test_gradient_checkpointing_changes_nothing():
    from rlcourse.policy import checkpoint_activations

    policy = make_policy()
    experience = roll_out(policy)
    plain = gradient(policy, experience, config_for())
    policy.model.zero_grad()
    checkpoint_activations(policy.model)
    assert policy.model.model.layers[0].gradient_checkpointing
    assert_same_gradient(gradient(policy, experience, config_for()), {n: g.double() for n, g in plain.items()})


def test_top_k_and_temperature_of_sampling_are_applied_in_the_gradient():
    policy = make_policy()
    sampling = Sampling(temperature=0.8, top_k=6)
    experience = roll_out(policy, sampling)
    model = copy.deepcopy(policy.model).double()
    rewards, loss = experience.rewards.double(), 0.0
    for row in range(12):
        advantage = rewards[row] - rewards[row // GROUP * GROUP : row // GROUP * GROUP + GROUP].mean()
        loss = loss - advantage * row_logprobs(model, experience.rollout, row, sampling).sum() / (12 * MAX_NEW_TOKENS)
    loss.backward()
    expected = {f"policy.{name}": p.grad for name, p in model.named_parameters()}
    actual = gradient(policy, experience, config_for(temperature=0.8, top_k=6))
    assert_same_gradient(actual, expected)


def test_ppo_follows_its_formulas():
    """Value head at a random point; GAE, whitening, clipped value loss and token mean written out for each row."""
    policy = make_policy()
    experience = roll_out(policy)
    torch.manual_seed(1)
    head = ValueHead(32).to(DEVICE)
    torch.nn.init.normal_(head.output.weight, std=0.5)
    config = config_for("ppo", gamma=0.97, gae_lambda=0.9)
    model, head64 = copy.deepcopy(policy.model).double(), copy.deepcopy(head).double()
    rollout = experience.rollout
    logprobs, values, advantages, returns = [], [], [], []
    for row in range(12):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        completion = rollout.completion_ids[row][rollout.completion_mask[row]]
        output = model.model(torch.cat([prompt, completion])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        values.append(head64.output(torch.tanh(head64.hidden(output)))[:, 0])
        logprobs.append(row_logprobs(model, rollout, row))
        value = [*values[-1].tolist(), 0.0]
        row_advantages, last = [], 0.0
        for t in reversed(range(len(completion))):
            reward = experience.rewards[row].item() if t == len(completion) - 1 else 0.0
            last = reward + 0.97 * value[t + 1] - value[t] + 0.97 * 0.9 * last
            row_advantages.insert(0, last)
        advantages.append(torch.tensor(row_advantages, device=DEVICE, dtype=torch.float64))
        returns.append(advantages[-1] + values[-1].detach())
    every = torch.cat(advantages)
    white = (every - every.mean()) / (every.var(unbiased=False) + 1e-8).sqrt()
    errors = 0.5 * (torch.cat(values) - torch.cat(returns)) ** 2
    loss = (-white * torch.cat(logprobs)).mean() + config.value_coef * errors.mean()
    loss.backward()
    expected = {f"policy.{n}": p.grad for n, p in model.named_parameters()}
    expected |= {f"value.{n}": p.grad for n, p in head64.named_parameters()}
    assert_same_gradient(gradient(policy, experience, config, head), expected)


def test_the_kl_in_the_reward_lowers_the_reward_of_what_the_reference_finds_unlikely():
    policy = make_policy()
    experience = roll_out(policy)
    reference = make_policy(seed=5).model
    config = config_for(kl_coef=0.1, kl_in="reward")
    add_advantages(experience, policy, reference, None, config)
    mask = experience.rollout.completion_mask
    rewards = []
    for row in range(12):
        own = row_logprobs(copy.deepcopy(policy.model).double(), experience.rollout, row)
        other = row_logprobs(copy.deepcopy(reference).double(), experience.rollout, row)
        rewards.append(experience.rewards[row].double() - 0.1 * (own - other).sum())
    groups = torch.stack(rewards).view(3, GROUP)
    expected = (groups - groups.mean(1, keepdim=True)).flatten()[:, None] * mask
    torch.testing.assert_close(experience.advantages.double(), expected, atol=1e-4, rtol=0)


def test_groups_without_signal_leave_the_weights_alone():
    policy = make_policy()
    experience = roll_out(policy)
    experience.rewards = torch.ones_like(experience.rewards)
    before = copy.deepcopy(policy.model.state_dict())
    config = config_for("dr_grpo")
    add_advantages(experience, policy, None, None, config)
    measured = Update(policy, None, config)(experience, 0)
    assert measured["grad_norm"] == 0
    assert [measured[name] for name in ("entropy", "mismatch_mean", "mismatch_max", "policy_loss")] == [None] * 4
    assert all(torch.equal(before[name], value) for name, value in policy.model.state_dict().items())


def test_minibatches_and_inner_epochs_take_their_steps_and_the_clip_comes_into_play():
    policy = make_policy()
    experience = roll_out(policy)
    config = config_for("grpo", inner_epochs=3, minibatches=2, lr=1e-2)
    add_advantages(experience, policy, None, None, config)
    update = Update(policy, None, config)
    steps = []
    original = update.optimizer.step
    update.optimizer.step = lambda: (steps.append(1), original())
    measured = update(experience, 0)
    assert len(steps) == 6
    assert measured["clip_fraction"] > 0
    assert measured["mismatch_max"] < 1e-4  # taken before the first optimizer step alone


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5]), ("cosine", [0.5, 1, 1, 0.853553, 0.5])],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule, expected):
    config = make_config("laptop", steps=6, warmup_steps=2, schedule=schedule)
    assert [lr_factor(step, config) for step in range(5)] == pytest.approx(expected)
