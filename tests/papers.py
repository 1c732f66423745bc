"""The training step against the papers: a step with all that can be seen of it, and what it should have been, by the
formulas, row by row in float64, with every metric a mean in plain Python."""

import copy
import math
from functools import lru_cache

import pytest
import torch
from policies import DEVICE, FixedEngine, logprobs_alone, make_policy

from rlcourse import learner
from rlcourse import train as training
from rlcourse.config import make_config
from rlcourse.dist import ALONE, full_tensor
from rlcourse.learner import Learner
from rlcourse.policy import ValueHead
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
    """The same problems at each step and round."""

    def sample(self, count):
        return [Problem(str(n), "", "1") for n in range(count)]


class RandomHead(ValueHead):
    """One whose values are not all 0 at the start."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size)
        torch.nn.init.normal_(self.output.weight, std=0.5)


class OddLength(MathTask):
    """Right is a text of odd length."""

    def verify(self, text, gold):
        return verify("#### 1" if len(text) % 2 else "#### 2", gold)


TASK = OddLength("numbers", "", [], [], [])


def config_for(algorithm: str = "dr_grpo", **overrides):
    sizes = {"num_prompts": 3, "num_generations": GROUP, "max_new_tokens": LIMIT, "minibatches": 1}
    sizes |= {"steps": 10}
    dynamic = {"leave_out": "truncated"} if algorithm == "dapo" else {}  # the last group is to stay
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
    """One training step. steps: for each optimizer step the weights before it and the gradients it was given; orders:
    the order of the rows in each epoch."""

    def __init__(self, config, noise=0.0, rewards=REWARDS, step=0, engine_class=FixedEngine, world=ALONE):
        policy, start = (world.load(lambda _, seed=seed: make_policy(seed), torch.device(DEVICE)) for seed in (0, 5))
        policy.prompts = lambda questions, *_: [PROMPTS[int(question)] for question in questions]
        policy.texts = lambda ids, mask: ["x"] * len(ids)
        self.config, self.steps, self.orders = config, [], []
        torch.manual_seed(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(learner, "ValueHead", RandomHead)
            self.learner = Learner(policy, config, start.model, world)
        self.sampler = sampler_logprobs(config.sampling, noise)
        rows = list(zip(COMPLETIONS, self.sampler, FINISHED, strict=True))
        self.engine = engine_class({tuple(p): rows[i * GROUP :][:GROUP] for i, p in enumerate(PROMPTS)})
        engine, task = world.shared(self.engine, TASK)
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
                self.learner, engine, task, Prompts(), step, lambda answers, config: list(rewards)
            )

    def _modules(self) -> dict[str, torch.nn.Module]:
        """Copies in float64 of all that learns, unless it's sharded."""
        both = {"policy": self.learner.policy.model, "value": self.learner.value_head}
        return {name: copy.deepcopy(m).double() for name, m in both.items() if m is not None and not self.config.shard}

    def gradient(self) -> dict[str, torch.Tensor]:
        modules = {"policy": self.learner.policy.model, "value": self.learner.value_head or torch.nn.Module()}
        named = {f"{name}.{n}": p for name, m in modules.items() for n, p in m.named_parameters()}
        return {name: full_tensor(p.grad.clone()) for name, p in named.items() if p.grad is not None}

    def minibatches(self) -> list[list[int]]:
        """The rows of each optimizer step: 12, which divide evenly into the mini-batches used here."""
        return [part.tolist() for order in self.orders for part in order.chunk(self.config.minibatches)]


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
        """GAE (Schulman et al. 2015, equation 16), whitened over all tokens that train."""
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
        every = torch.cat([a for i, a in advantages.items() if FINISHED[i] or not self.config.mask_truncated])
        return {i: (a - every.mean()) / (every.var(unbiased=False) + 1e-8).sqrt() for i, a in advantages.items()}

    def weights(self, i: int) -> torch.Tensor:
        """Truncated importance weights for the sampler."""
        ratio = self.old[i] - self.sampler[i]
        level, cap = self.config.sampler_correction, training.SAMPLER_CAP
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
                near = torch.minimum(torch.maximum(values, old - training.VALUE_CLIP), old + training.VALUE_CLIP)
                errors = torch.maximum((values - self.returns[i]) ** 2, (near - self.returns[i]) ** 2) / 2
                self.value_losses += errors.tolist()
                loss = loss + training.VALUE_COEF * errors.sum() / tokens
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


def assert_same_gradient(actual, expected):
    assert actual.keys() == expected.keys()
    for part in ("policy", "value"):
        mine = {name: g for name, g in expected.items() if name.startswith(part)}
        scale = max((g.abs().max().item() for g in mine.values()), default=1.0)
        assert scale > 1e-5
        for name, value in mine.items():
            torch.testing.assert_close(actual[name].double(), value.double(), atol=2e-4 * scale, rtol=0, msg=name)


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
