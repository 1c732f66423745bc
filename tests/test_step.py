"""The training step as a whole: every gradient that reaches the optimizer against the formulas of the papers, written
out row by row in float64, and every metric against a mean in plain Python."""

import copy
import math
import time
from functools import lru_cache

import pytest
import torch
from policies import DEVICE, FixedEngine, logprobs_alone, make_policy, rollout_of

from rlcourse import learner
from rlcourse import train as module
from rlcourse.batch import Batch, Completions, plan_minibatches, rows_that_train, rows_together
from rlcourse.config import ALGORITHMS, make_config
from rlcourse.learner import Learner, make_batch
from rlcourse.metrics import Means
from rlcourse.sampling import Sampling
from rlcourse.tasks import MathTask, Problem
from rlcourse.tasks.verify import verify
from rlcourse.train import train_step

GROUP, LIMIT = 4, 7  # completions of a prompt, tokens of a completion
PROMPTS = [[5, 9, 40, 7], [11], list(range(30, 49))]
LENGTHS = [7, 1, 3, 2, 5, 7, 4, 6, 2, 3, 1, 7]  # EOS at once, and no EOS within the limit
FINISHED = [n < LIMIT for n in LENGTHS]
REWARDS = [1.0, 0, 0, 1, 0, 1, 0.5, 0, 1, 1, 1, 1]  # the last group has no signal
ROWS = len(LENGTHS)
ORDER = 35  # seed of the order of rows: one in which each mini-batch has a gradient, and some tokens are clipped


def _completions() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [[*torch.randint(50, 200, (n - 1,), generator=generator).tolist(), 1] for n in LENGTHS]


COMPLETIONS = _completions()


def prompt_of(row: int) -> list[int]:
    return PROMPTS[row // GROUP]


class Prompts:
    """The same problems at each step, or those of the given rounds, one after the other."""

    def __init__(self, problems=range(3)):
        self.left = list(problems)

    def sample(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        return [Problem(str(n), "", "1") for n in taken]


class OddLength(MathTask):
    """Right is a text of odd length."""

    def verify(self, text, gold):
        return verify("#### 1" if len(text) % 2 else "#### 2", gold)


TASK = OddLength("numbers", "", [], [], [])


@pytest.fixture(autouse=True)
def _whole_gradients(monkeypatch):
    monkeypatch.setattr(module, "MAX_GRAD_NORM", 1e9)


def config_for(algorithm: str = "dr_grpo", **overrides):
    sizes = {"num_prompts": 3, "num_generations": GROUP, "max_new_tokens": LIMIT, "minibatches": 1}
    sizes |= {"steps": 10}
    dynamic = {"dynamic_sampling": False} if algorithm == "dapo" else {}  # the last group is to stay
    return make_config(algorithm=algorithm, warmup_steps=0, **(sizes | dynamic | overrides))


@lru_cache
def exact_logprobs(seed: int, sampling: Sampling) -> list[torch.Tensor]:
    """Of all rows under the policy with this seed, in float64."""
    model = make_policy(seed).model.double()
    with torch.no_grad():
        return [logprobs_alone(model, prompt_of(i), COMPLETIONS[i], sampling) for i in range(ROWS)]


def sampler_logprobs(sampling: Sampling, noise: float = 0.0) -> list[list[float]]:
    """Those of the policy, plus a fixed noise: a sampler that rounds otherwise than the trainer."""
    generator = torch.Generator().manual_seed(9)
    rows = exact_logprobs(0, sampling)
    return [(row.cpu() + noise * torch.randn(len(row), generator=generator)).tolist() for row in rows]


class Run:
    """One training step with all that can be seen of it.

    steps: for each optimizer step the weights before it and the gradients it was given; orders: the order of the rows
    in each epoch; plus the metrics, the completions that trained, the learner and the engine.
    """

    def __init__(
        self, config, noise=0.0, rewards=REWARDS, step=0, change=lambda learner: None, engine_class=FixedEngine
    ):
        policy = make_policy()
        policy.prompts = lambda questions, *_: [PROMPTS[int(question)] for question in questions]
        policy.texts = lambda ids, mask: ["x"] * len(ids)
        self.config, self.steps, self.orders = config, [], []
        torch.manual_seed(3)
        self.learner = Learner(policy, config, make_policy(seed=5).model)
        if self.learner.value_head is not None:
            torch.nn.init.normal_(self.learner.value_head.output.weight, std=0.5)
        change(self.learner)
        self.sampler = sampler_logprobs(config.sampling, noise)
        rows = list(zip(COMPLETIONS, self.sampler, FINISHED, strict=True))
        self.engine = engine_class({tuple(p): rows[i * GROUP :][:GROUP] for i, p in enumerate(PROMPTS)})
        self.before = self._modules()
        torch.manual_seed(ORDER)  # anew: above, a policy may have been made, or log-probs been at hand
        optimizer_step, randperm = self.learner.optimizer.step, torch.randperm

        def stepped():
            self.steps.append((self._modules(), self.gradient()))
            optimizer_step()

        def ordered(*arguments, **settings):
            self.orders.append(randperm(*arguments, **settings))
            return self.orders[-1]

        self.learner.optimizer.step = stepped
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randperm", ordered)
            self.metrics, self.completions = train_step(
                self.learner, self.engine, TASK, Prompts(), step, lambda answers, config: list(rewards)
            )

    def _modules(self) -> dict[str, torch.nn.Module]:
        """Copies in float64 of all that learns."""
        named = {"policy": self.learner.policy.model, "value": self.learner.value_head}
        return {name: copy.deepcopy(m).double() for name, m in named.items() if m is not None}

    def gradient(self) -> dict[str, torch.Tensor]:
        modules = {"policy": self.learner.policy.model, "value": self.learner.value_head}
        return {
            f"{name}.{n}": p.grad.clone()
            for name, m in modules.items()
            if m is not None
            for n, p in m.named_parameters()
            if p.grad is not None
        }

    def minibatches(self) -> list[list[int]]:
        """The rows of each optimizer step: every epoch's order cut into parts as even as they can be."""
        return [
            part.tolist() for order in self.orders for part in order.chunk(self.config.minibatches)
        ]  # 12 rows divide evenly into the mini-batches used here


def per_row(modules, config, rows=range(ROWS)) -> dict[int, torch.Tensor]:
    return {i: logprobs_alone(modules["policy"], prompt_of(i), COMPLETIONS[i], config.sampling) for i in rows}


def row_values(modules, i: int) -> torch.Tensor:
    head, ids = modules["value"], torch.tensor([prompt_of(i) + COMPLETIONS[i]], device=DEVICE)
    hidden = modules["policy"].model(ids).last_hidden_state[0, len(prompt_of(i)) - 1 : -1]
    return head.output(torch.tanh(head.hidden(hidden)))[:, 0]


class Paper:
    """What the papers say, in float64 and row by row, of a run that has been seen: its losses and metrics."""

    def __init__(self, run: Run, algorithm: str):
        self.run, self.config, self.algorithm = run, run.config, algorithm
        with torch.no_grad():
            self.old = dict(enumerate(exact_logprobs(0, run.config.sampling)))
            self.ref = dict(enumerate(exact_logprobs(5, run.config.sampling)))
            self.sampler = {i: torch.tensor(x, dtype=torch.float64, device=DEVICE) for i, x in enumerate(run.sampler)}
            self.rewards = list(REWARDS)
            self.advantages = self._of_tokens() if algorithm == "ppo" else self._of_rows()
        self.policy_losses, self.value_losses, self.clipped = [], [], []

    def _of_rows(self) -> dict[int, torch.Tensor]:
        result = {}
        for i, r in enumerate(self.rewards):
            group = self.rewards[i // GROUP * GROUP :][:GROUP]
            mean, others = sum(group) / GROUP, [x for j, x in enumerate(group) if j != i % GROUP]
            std = math.sqrt(sum((x - mean) ** 2 for x in group) / (GROUP - 1))
            advantage = {
                "reinforce": r,
                "reinforce_baseline": r - sum(self.rewards) / ROWS,
                "rloo": r - sum(others) / (GROUP - 1),
                "dr_grpo": r - mean,
            }.get(self.algorithm, (r - mean) / (std + 1e-4))
            result[i] = torch.full_like(self.old[i], advantage)
        return result

    def _of_tokens(self) -> dict[int, torch.Tensor]:
        """GAE (Schulman et al. 2015, equation 16), whitened over all tokens."""
        self.values = {i: row_values(self.run.before, i) for i in range(ROWS)}
        gamma, decay = learner.GAMMA, learner.GAMMA * learner.GAE_LAMBDA
        advantages, self.returns = {}, {}
        for i in range(ROWS):
            reward = torch.zeros_like(self.sampler[i])
            reward[-1] = self.rewards[i]
            after = torch.cat([self.values[i][1:], torch.zeros(1, device=DEVICE)])
            delta = reward + gamma * after - self.values[i]
            n = len(delta)
            advantages[i] = torch.stack([sum(decay ** (u - t) * delta[u] for u in range(t, n)) for t in range(n)])
            self.returns[i] = advantages[i] + self.values[i]
        every = torch.cat(list(advantages.values()))
        return {i: (a - every.mean()) / (every.var(unbiased=False) + 1e-8).sqrt() for i, a in advantages.items()}

    def weights(self, i: int) -> torch.Tensor:
        """Truncated importance weights for the sampler."""
        ratio = self.old[i] - self.sampler[i]
        level, cap = self.config.sampler_correction, module.SAMPLER_CAP
        if level == "off":
            return torch.ones_like(ratio)
        return (ratio if level == "token" else torch.full_like(ratio, ratio.sum().item())).exp().clamp(max=cap)

    def gradient(self, modules, rows: list[int]) -> dict[str, torch.Tensor]:
        """The gradient of the loss of a mini-batch at the weights of `modules`."""
        a, config, loss = self.algorithm, self.config, 0.0
        counted = {i: config.mask_truncated is False or FINISHED[i] for i in rows}
        tokens = sum(LENGTHS[i] for i in rows if counted[i])
        for i, logprobs in per_row(modules, config, rows).items():
            if not counted[i]:
                continue
            n, advantage, log_ratio = LENGTHS[i], self.advantages[i], logprobs - self.old[i]
            low, high = 1 - config.clip_low, 1 + config.clip_high
            weight = {"grpo": 1 / (len(rows) * n), "gspo": 1 / (len(rows) * n)}.get(a, 1 / (len(rows) * LIMIT))
            weight = 1 / tokens if a in ("dapo", "cispo", "ppo") else weight
            ratio = log_ratio.mean().exp().expand(n) if a == "gspo" else log_ratio.exp()
            if a in ("reinforce", "reinforce_baseline", "rloo"):
                losses, clipped = -advantage * logprobs, torch.zeros(n)
            elif a == "cispo":
                losses, clipped = -ratio.detach().clamp(max=high) * advantage * logprobs, ratio > high
            else:
                free, bound = ratio * advantage, ratio.clamp(low, high) * advantage
                losses, clipped = -torch.minimum(free, bound), bound < free
            if not self._without_gradient(i):
                self.policy_losses += losses.tolist()
                self.clipped += clipped.tolist()
            loss = loss + weight * (self.weights(i) * losses).sum()
            if config.kl_coef:
                d = logprobs - self.ref[i]
                loss = loss + config.kl_coef * weight * ((-d).exp() - 1 + d).sum()
            if a == "ppo":
                values, old = row_values(modules, i), self.values[i]
                near = torch.minimum(torch.maximum(values, old - module.VALUE_CLIP), old + module.VALUE_CLIP)
                errors = torch.maximum((values - self.returns[i]) ** 2, (near - self.returns[i]) ** 2) / 2
                self.value_losses += errors.tolist()
                loss = loss + module.VALUE_COEF * errors.sum() / tokens
        for learning in modules.values():
            learning.zero_grad()
        loss.backward()
        return {f"{name}.{n}": p.grad for name, m in modules.items() for n, p in m.named_parameters()}

    def _without_gradient(self, i: int) -> bool:
        computed = self.algorithm == "ppo" or self.config.kl_coef
        return not computed and not self.advantages[i].any()

    def metrics(self) -> dict[str, float]:
        """After `gradient` of every step."""

        def mean(values):
            values = list(values)
            return sum(values) / len(values)

        sampler = torch.cat(list(self.sampler.values()))
        training = [i for i in range(ROWS) if not self._without_gradient(i)]
        if self.config.mask_truncated and self.algorithm != "ppo" and not self.config.kl_coef:
            # With values or a KL all rows are computed.
            training = [i for i in training if FINISHED[i]]
        gap = torch.cat([(self.old[i] - self.sampler[i]).abs() for i in training])
        ratio = torch.cat([self.old[i].exp() / self.sampler[i].exp() for i in training])
        found = {
            "entropy": -sampler.mean().item(),
            "policy_loss": mean(self.policy_losses),
            "clip_fraction": mean(self.clipped),
            "mismatch_mean": gap.mean().item(),
            "mismatch_max": gap.max().item(),
            "sampler_ratio_mean": ratio.mean().item(),
            "sampler_ratio_max": ratio.max().item(),
        }
        if self.algorithm == "ppo":
            found["value_loss"] = mean(self.value_losses)
        if self.config.kl_coef is not None:
            d = sampler - torch.cat(list(self.ref.values()))
            found["kl"] = ((-d).exp() - 1 + d).mean().item()
        return found


def assert_same_gradient(actual, expected, tolerance=2e-4):
    assert actual.keys() == expected.keys()
    for part in ("policy", "value"):
        mine = {name: g for name, g in expected.items() if name.startswith(part)}
        scale = max((g.abs().max().item() for g in mine.values()), default=1.0)
        assert scale > 1e-5
        for name, value in mine.items():
            torch.testing.assert_close(actual[name].double(), value.double(), atol=tolerance * scale, rtol=0, msg=name)


def assert_follows_the_paper(config, algorithm: str, noise: float = 0.0) -> Run:
    """Every gradient of the step, the mean of their norms, and every metric."""
    run = Run(config, noise)
    paper, norms = Paper(run, algorithm), []
    minibatches = run.minibatches()
    assert len(run.steps) == len(minibatches) == config.inner_epochs * config.minibatches
    for (modules, gradient), rows in zip(run.steps, minibatches, strict=True):
        expected = paper.gradient(modules, rows)
        assert_same_gradient(gradient, expected)
        norms.append(math.sqrt(sum(g.square().sum().item() for g in expected.values())))
    assert run.metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    for name, value in paper.metrics().items():
        assert run.metrics[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name
    return run


# Mini-batches, and the rows that train


def binary_batch() -> Batch:
    """Row i has 2^i tokens, so that a number of tokens says which rows they are of; even rows train."""
    rollout = rollout_of([([3] * (9 - i), [7] * 2**i) for i in range(7)])
    advantages = torch.tensor([[1.0], [0.0]], device=DEVICE).repeat(4, 1)[:7] * rollout.completion_mask
    return Batch(rollout, advantages, rollout.completion_mask)


@pytest.mark.parametrize(("minibatches", "micro_batch_tokens"), [(1, 60), (3, 1), (3, 10_000)])
def test_a_share_counts_the_whole_minibatch_of_which_only_rows_that_train_are_computed(minibatches, micro_batch_tokens):
    batch = binary_batch()
    config = make_config(
        minibatches=minibatches, inner_epochs=4, micro_batch_tokens=micro_batch_tokens, max_new_tokens=99, num_prompts=7
    )
    torch.manual_seed(0)
    plan = plan_minibatches(batch, config)
    assert len(plan) == 4 * minibatches
    splits = set()
    for epoch in range(4):
        found = []
        for minibatch in plan[epoch * minibatches :][:minibatches]:
            rows = [i for i in range(7) if minibatch.share["tokens"] >> i & 1]
            assert minibatch.share == {"rows": len(rows), "tokens": sum(2**i for i in rows), "max_new_tokens": 99}
            assert abs(len(rows) - 7 / minibatches) < 1
            computed = [piece.tolist() for piece in minibatch.micro_batches]
            flat = [i for piece in computed for i in piece]
            assert sorted(flat) == [i for i in rows if i % 2 == 0]
            lengths = [int(batch.rollout.prompt_lengths[i]) + 2**i for i in flat]
            assert lengths == sorted(lengths)  # rows of like length together
            assert [len(piece) for piece in computed] == rows_together(lengths, micro_batch_tokens)
            found += rows
            splits.add((epoch, tuple(sorted(rows))))
        assert sorted(found) == list(range(7))
    if minibatches > 1:
        assert len({rows for _, rows in splits}) > minibatches  # every epoch is cut up anew


def test_the_rows_that_train_are_those_with_a_gradient():
    batch = binary_batch()
    even = [i % 2 == 0 for i in range(7)]
    assert rows_that_train(batch, make_config()).tolist() == even
    assert rows_that_train(batch, make_config(kl_coef=0.1)).all()
    assert rows_that_train(batch, make_config(kl_coef=0)).tolist() == even
    valued = Batch(batch.rollout, batch.advantages, batch.loss_mask, None, batch.advantages, batch.advantages)
    assert rows_that_train(valued, make_config()).all()
    masked = Batch(batch.rollout, batch.advantages, batch.loss_mask & (torch.arange(7, device=DEVICE) > 3)[:, None])
    assert rows_that_train(masked, make_config()).tolist() == [i in (4, 6) for i in range(7)]


# The batch


def completions_of(rewards=REWARDS, logprobs=None) -> Completions:
    rollout = rollout_of([(prompt_of(i), COMPLETIONS[i]) for i in range(ROWS)], logprobs, FINISHED)
    return Completions(rollout, [None] * ROWS, torch.tensor(rewards, device=DEVICE))


def test_everything_in_a_batch_is_a_constant():
    config = config_for("ppo", kl_coef=0.1)
    batch = make_batch(Learner(make_policy(), config), completions_of())
    tensors = [batch.advantages, batch.ref_logprobs, batch.values, batch.returns]
    assert not any(x.requires_grad for x in tensors) and all(x.shape == (ROWS, LIMIT) for x in tensors)
    assert all(x[~batch.rollout.completion_mask].eq(0).all() for x in tensors)


# Means


def test_a_mean_over_parts_is_that_of_all_their_tokens():
    means, mask = Means(), torch.tensor([[True, True], [True, False]])
    means.add("a", torch.tensor([[1.0, 2.0], [6.0, math.nan]]), mask)
    means.add("a", torch.tensor([[11.0]]), torch.tensor([[True]]))
    means.add("b", torch.tensor([[-3.0]]), torch.tensor([[True]]))
    means.add("c", torch.tensor([[5.0]]), torch.tensor([[False]]))
    means.add("d", torch.tensor([[True, False]]), torch.tensor([[True, True]]))
    assert (means.mean("a"), means.max("a")) == (5.0, 11.0)
    assert (means.mean("b"), means.max("b")) == (-3.0, 0.0)
    assert means.mean("c") is None and means.max("c") is None and means.mean("e") is None
    assert means.mean("d") == 0.5


# The gradients, against the formulas


VARIANTS = {
    "kl": ("grpo", {"kl_coef": 0.2}),
    "kl of ppo": ("ppo", {"kl_coef": 0.2}),
    "truncated": ("grpo", {"mask_truncated": True}),
    "truncated, kl": ("dr_grpo", {"mask_truncated": True, "kl_coef": 0.2}),
    "truncated, ppo": ("ppo", {"mask_truncated": True}),
    "measured alone": ("dr_grpo", {"kl_coef": 0}),
    "temperature and top-k": ("dr_grpo", {"temperature": 0.6, "top_k": 60}),
    "top-p": ("rloo", {"top_p": 0.9}),
    "correction by token": ("grpo", {"sampler_correction": "token"}),
    "correction by sequence": ("rloo", {"sampler_correction": "sequence"}),
}


@pytest.mark.parametrize(("algorithm", "options"), VARIANTS.values(), ids=VARIANTS)
def test_the_gradient_of_each_option_is_that_of_its_formula(algorithm, options, monkeypatch):
    monkeypatch.setattr(module, "SAMPLER_CAP", 1.1)  # so that some weights reach it
    assert_follows_the_paper(config_for(algorithm, **options), algorithm, noise=0.2)


SEVERAL = {
    "ppo": {"lr": 1e-2, "kl_coef": 0.2},
    "grpo": {"lr": 1e-2, "sampler_correction": "token"},
    "dr_grpo": {"lr": 1e-2, "clip_low": 0.1, "clip_high": 0.3},
    "dapo": {"lr": 1e-2},
    "gspo": {"lr": 1e-4, "clip_low": 6e-2, "clip_high": 4e-2},
    "cispo": {"lr": 3e-2},
}


@pytest.mark.parametrize("algorithm", SEVERAL)
def test_every_gradient_of_several_epochs_and_minibatches_is_that_of_the_formula(algorithm, monkeypatch):
    """The ratio is to the policy before the first update, and the clips come into play. Gradients are accumulated."""
    monkeypatch.setattr(learner, "VALUE_LR", 0.1)
    for name, value in {"VALUE_CLIP": 0.02, "VALUE_COEF": 2.0}.items():
        monkeypatch.setattr(module, name, value)
    for name, value in {"GAMMA": 0.97, "GAE_LAMBDA": 0.9}.items():
        monkeypatch.setattr(learner, name, value)
    config = config_for(algorithm, inner_epochs=2, minibatches=3, micro_batch_tokens=50, **SEVERAL[algorithm])
    run = assert_follows_the_paper(config, algorithm, noise=0.3)
    assert 0 < run.metrics["clip_fraction"] < 1


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in SEVERAL])
def test_the_gradient_on_fresh_samples_is_that_of_the_algorithms_formula(algorithm):
    run = assert_follows_the_paper(config_for(algorithm), algorithm)
    assert run.metrics["clip_fraction"] == 0


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("algorithm", ["gspo", "ppo"])
def test_the_first_update_has_a_ratio_of_exactly_1_whatever_the_sampler_rounds(algorithm, minibatches, monkeypatch):
    """lr 0 makes every update the first one. Nothing is clipped even if the clip leaves no room at all."""
    monkeypatch.setattr(learner, "VALUE_LR", 0.0)
    options = {"minibatches": minibatches, "micro_batch_tokens": 40}
    options |= dict.fromkeys(("lr", "clip_low", "clip_high"), 0.0)
    exact, noisy = (Run(config_for(algorithm, **options), noise) for noise in (0.0, 0.01))
    assert noisy.metrics["clip_fraction"] == exact.metrics["clip_fraction"] == 0.0
    for (_, one), (_, other) in zip(exact.steps, noisy.steps, strict=True):
        assert all(torch.equal(other[name], gradient) for name, gradient in one.items())


# What is only measured


def test_groups_without_signal_leave_the_weights_alone_and_are_measured_all_the_same():
    run = Run(config_for("dr_grpo", kl_coef=0), rewards=[1.0] * ROWS)
    assert run.metrics["grad_norm"] == 0 and run.metrics["groups_without_signal"] == 1
    assert [run.metrics[n] for n in ("policy_loss", "clip_fraction", "mismatch_mean", "mismatch_max")] == [None] * 4
    whole = Run(config_for("dr_grpo", kl_coef=0))
    for name in ("entropy", "kl"):
        assert run.metrics[name] == whole.metrics[name] > 0
    before = run.before["policy"].state_dict()
    after = run.learner.policy.model.state_dict()
    assert all(torch.equal(before[name].float(), value.float()) for name, value in after.items())


def test_the_names_of_the_metrics_are_the_same_in_every_step():
    for algorithm, options in [("grpo", {}), ("ppo", {"kl_coef": 0.1})]:
        config = config_for(algorithm, **options)
        one, other = Run(config), Run(config, rewards=[0.0] * ROWS)
        assert one.metrics.keys() == other.metrics.keys()
        assert one.metrics["timing"].keys() == other.metrics["timing"].keys()
        assert ("value_loss" in one.metrics, "kl" in one.metrics) == ((algorithm == "ppo"),) * 2


@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, 8), ({"minibatches": 3}, 8 + 8), ({"minibatches": 3, "inner_epochs": 2}, 8 + 2 * 8), ({"kl_coef": 0.1}, 12)],
)
def test_rows_without_a_gradient_are_not_computed(options, rows, monkeypatch):
    """With several updates there is one pass for the old log-probs; it leaves them out too."""
    seen, original = [], Learner.logprobs_and_values

    def counting(self, rollout):
        seen.append(len(rollout.finished))
        return original(self, rollout)

    monkeypatch.setattr(Learner, "logprobs_and_values", counting)
    Run(config_for("grpo", **options))
    assert sum(seen) == rows


# What a step reports


def test_a_step_reports_its_number_its_learning_rate_and_what_trained():
    run = Run(config_for("grpo", schedule="linear", lr=1e-3), step=4)
    assert run.metrics["step"] == 5 and run.metrics["lr"] == pytest.approx(1e-3 * (1 - 4 / 10))
    assert run.completions.rewards.tolist() == REWARDS
    assert run.metrics["reward"] == pytest.approx(sum(REWARDS) / ROWS)
    assert run.metrics["truncated"] == pytest.approx(FINISHED.count(False) / ROWS)
    assert run.metrics["length"] == pytest.approx(sum(LENGTHS) / ROWS)


def test_the_phases_of_a_step_are_timed_and_the_rate_counts_all_sampled_tokens():
    class Slow(FixedEngine):
        def generate(self, *arguments):
            time.sleep(0.05)
            return super().generate(*arguments)

    timing = Run(config_for("grpo"), engine_class=Slow).metrics["timing"]
    names = ("rollout", "reward", "advantages", "update")
    assert timing.keys() == {f"{name}_s" for name in (*names, "step")} | {"tokens_per_s", "peak_memory_bytes"}
    phases = sum(timing[f"{name}_s"] for name in names)
    assert 0.5 * timing["step_s"] < phases <= timing["step_s"] and timing["rollout_s"] >= 0.05
    assert timing["tokens_per_s"] * timing["rollout_s"] == pytest.approx(sum(LENGTHS))
    assert timing["peak_memory_bytes"] > 0


@pytest.mark.parametrize("sleep", [False, True])
def test_the_engine_sleeps_during_the_update_where_it_should(sleep, monkeypatch):
    done, original = [], module.make_batch

    class Watched(FixedEngine):
        def generate(self, *arguments):
            done.append("rollout")
            return super().generate(*arguments)

        def sleep(self):
            done.append("sleep")

    def batching(*arguments):
        done.append("batch")
        return original(*arguments)

    monkeypatch.setattr(module, "make_batch", batching)
    Run(config_for(sleep=sleep), engine_class=Watched)
    assert done == (["rollout", "sleep", "batch"] if sleep else ["rollout", "batch"])


def test_cudnn_attention_is_off_within_a_step_alone():
    flag = torch.backends.cuda.cudnn_sdp_enabled
    kept, inside = flag(), []
    try:
        for before in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(before)

            def look(learner):
                learner.policy.model.model.register_forward_hook(lambda *_: inside.append(flag()))

            run = Run(config_for(), change=look)
            assert flag() == before and run.engine.cudnn == [False]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)
    # logprobs_alone runs the hooked copies as well, outside of the step
    assert not inside[-1]
