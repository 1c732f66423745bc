"""The losses against float64 loops over their definitions, in value and in gradient with respect to the log-probs."""

import math

import pytest
import torch

from rlcourse import advantages as adv
from rlcourse import losses
from rlcourse.config import ALGORITHMS, make_config

NAN = float("nan")
N = 3  # num_generations
LENGTHS = [7, 1, 3, 0, 2, 6]  # full, one token, empty, padded
FINISHED = [False, True, True, True, True, True]
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
ROWS, T = len(LENGTHS), 7
MASK = torch.arange(T) < torch.tensor(LENGTHS)[:, None]


def batch(noise=0.3, seed=1):
    """logprobs, old_logprobs, ref_logprobs, values, old_values [rows, length] float64, with nan where masked."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(ROWS, T, generator=generator, dtype=torch.float64) for _ in range(5)]
    logprobs = -1 - normal[0].abs()
    tensors = logprobs, logprobs + noise * normal[1], logprobs + 0.4 * normal[2], normal[3], normal[3] + 0.3 * normal[4]
    return [x.masked_fill(~MASK, NAN) for x in tensors]


def reference_surrogate(config, logprobs, old, advantages, mask):
    """Each token's loss and its slope in each log-prob of the row, by definition: {(row, t): (loss, {u: slope})}."""
    result = {}
    for i in range(ROWS):
        real = [t for t in range(T) if mask[i][t]]
        log_ratio = {t: logprobs[i][t] - old[i][t] for t in real}
        mean = sum(log_ratio.values()) / max(len(real), 1)
        for t in real:
            a, low, high = advantages[i][t], 1 - config.clip_low, 1 + config.clip_high
            sequence = config.ratio == "sequence"
            r = math.exp(mean if sequence else log_ratio[t])
            slope = {u: r / len(real) for u in real} if sequence else {t: r}  # d r / d logprob
            if config.surrogate == "reinforce":
                loss, gradient = -a * logprobs[i][t], {t: -a}
            elif config.surrogate == "cispo":
                loss, gradient = -min(r, high) * a * logprobs[i][t], {t: -min(r, high) * a}
            elif (a > 0 and r > high) or (a < 0 and r < low):
                loss, gradient = -a * (high if a > 0 else low), {}
            else:
                loss, gradient = -a * r, {u: -a * s for u, s in slope.items()}
            result[i, t] = loss, gradient
    return result


def reference_weight(config, mask, i):
    """What one token of row i weighs in the mean."""
    if config.aggregation == "sequence_mean":
        return 1 / ROWS / sum(mask[i])
    if config.aggregation == "token_mean":
        return 1 / sum(map(sum, mask))
    return 1 / (ROWS * config.max_new_tokens)


def reference_advantages(config, values, old_values):
    """[rows][length] advantages, and the returns of PPO."""
    if config.advantage == "gae":
        expected, returns = {}, {}
        for i, n in enumerate(LENGTHS):
            v = [*old_values[i][:n], 0.0]
            reward = [0.0] * (n - 1) + [REWARDS[i]]
            delta = [reward[t] + config.gamma * v[t + 1] - v[t] for t in range(n)]
            for t in range(n):
                expected[i, t] = sum((config.gamma * config.gae_lambda) ** (u - t) * delta[u] for u in range(t, n))
                returns[i, t] = expected[i, t] + v[t]
        mean = sum(expected.values()) / len(expected)
        std = math.sqrt(sum((a - mean) ** 2 for a in expected.values()) / len(expected))
        return [[(expected.get((i, t), NAN) - mean) / std for t in range(T)] for i in range(ROWS)], returns
    rows = []
    for i, r in enumerate(REWARDS):
        group = REWARDS[i // N * N :][:N]
        mean, others = sum(group) / N, [x for j, x in enumerate(group) if j != i % N]
        std = math.sqrt(sum((x - mean) ** 2 for x in group) / (N - 1))
        rows.append(
            {
                "reward": r,
                "batch_centered": r - sum(REWARDS) / ROWS,
                "leave_one_out": r - sum(others) / len(others),
                "group_centered": r - mean,
                "group_normalized": (r - mean) / (std + 1e-4),
            }[config.advantage]
        )
    return [[a] * T for a in rows], None


def loss_of(config, logprobs, old, mask, rows=slice(None), values=None, old_values=None):
    """The loss as a trainer puts it together, of some rows of the batch: policy loss, value loss or None, clipped."""
    rewards, vloss = torch.tensor(REWARDS, dtype=torch.float64), None
    kwargs = {"rows": ROWS, "tokens": int(mask.sum()), "max_new_tokens": config.max_new_tokens}
    if config.advantage == "gae":
        advantages, returns = adv.gae(
            adv.token_rewards(rewards, mask), old_values, mask, config.gamma, config.gae_lambda
        )
        advantages = adv.whiten(advantages, mask)
        per_token = losses.value_loss(values[rows], old_values[rows], returns[rows], mask[rows], config.value_clip)
        vloss = losses.aggregate(per_token, mask[rows], config.aggregation, **kwargs)
    elif config.advantage in ("reward", "batch_centered"):
        advantages = rewards if config.advantage == "reward" else adv.batch_centered(rewards)
    else:
        advantages = getattr(adv, config.advantage)(rewards, N)
    per_token, clipped = losses.token_loss(
        logprobs[rows],
        old[rows],
        advantages[rows],
        mask[rows],
        surrogate=config.surrogate,
        ratio=config.ratio,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    return losses.aggregate(per_token, mask[rows], config.aggregation, **kwargs), vloss, clipped


NOISE = {"gspo": 1e-3, "cispo": 2.0}  # of the old log-probs: enough to be clipped at, not to be clipped everywhere


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_whole_loss_of_an_algorithm_equals_a_loop_over_its_definition(algorithm):
    config = make_config(algorithm=algorithm, num_generations=N, max_new_tokens=10)
    logprobs, old, _, values, old_values = batch(NOISE.get(algorithm, 0.3))
    mask = MASK & torch.tensor(FINISHED)[:, None] if config.mask_truncated else MASK
    advantages, returns = reference_advantages(config, values.tolist(), old_values.tolist())
    lists = logprobs.tolist(), old.tolist(), advantages, mask.tolist()
    expected, gradient = 0.0, torch.zeros(ROWS, T, dtype=torch.float64)
    for (i, _), (loss, slopes) in reference_surrogate(config, *lists).items():
        weight = reference_weight(config, lists[-1], i)
        expected += weight * loss
        for u, slope in slopes.items():
            gradient[i, u] += weight * slope

    logprobs.requires_grad_()
    values.requires_grad_()
    loss, vloss, clipped = loss_of(config, logprobs, old, mask, values=values, old_values=old_values)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)  # the 1e-8 that whiten adds to the variance
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-6, atol=1e-9)
    assert gradient.ne(0).any()
    if config.surrogate != "reinforce":
        assert clipped.any() and not clipped[mask].all(), "the batch should show both"

    if vloss is not None:
        expected = 0.0
        for (i, t), r in returns.items():
            v, v_old = values[i, t].item(), old_values[i, t].item()
            near = min(max(v, v_old - config.value_clip), v_old + config.value_clip)
            expected += 0.5 * max((v - r) ** 2, (near - r) ** 2) * reference_weight(config, lists[-1], i)
        assert vloss.item() == pytest.approx(expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batches_add_up_to_the_mini_batch(algorithm):
    config = make_config(algorithm=algorithm, num_generations=N, max_new_tokens=10)
    results = []
    for parts in ([slice(0, 6)], [slice(0, 1), slice(1, 4), slice(4, 6)]):
        logprobs, old, _, values, old_values = batch(NOISE.get(algorithm, 0.3))
        logprobs.requires_grad_()
        total = 0.0
        for rows in parts:
            loss, vloss, _ = loss_of(config, logprobs, old, MASK, rows, values, old_values)
            loss = loss if vloss is None else loss + vloss
            loss.backward()
            total += loss.item()
        results.append((total, logprobs.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=0)


def test_gspo_is_the_clipped_objective_of_whole_sequences():
    """Equation 5 of the paper, with autograd through the sequence ratio of equation 7."""
    logprobs, old, *_ = batch(0.1)
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5, 1.5], dtype=torch.float64)
    ours, paper = (logprobs.clone().requires_grad_() for _ in range(2))
    clip = {"clip_low": 0.03, "clip_high": 0.03}
    per_token, clipped = losses.token_loss(ours, old, advantages, MASK, surrogate="clip", ratio="sequence", **clip)
    losses.aggregate(per_token, MASK, "sequence_mean", rows=ROWS, tokens=19, max_new_tokens=T).backward()

    objective = 0.0
    for i, n in enumerate(LENGTHS):
        if n:
            s = ((paper[i, :n] - old[i, :n]).sum() / n).exp()
            objective = objective + torch.min(s * advantages[i], s.clamp(0.97, 1.03) * advantages[i]) / ROWS
    (-objective).backward()
    torch.testing.assert_close(ours.grad, paper.grad.nan_to_num())
    assert per_token.sum(1).div(torch.tensor(LENGTHS).clamp(min=1)).sum().item() / ROWS == pytest.approx(
        -objective.item()
    )
    assert {row.any().item() for row in clipped} == {True, False}
    assert all(row[:n].all() or not row.any() for row, n in zip(clipped, LENGTHS, strict=True))


def test_the_sequence_ratio_is_the_geometric_mean_of_the_token_ratios():
    logprobs, old, *_ = batch()
    token = losses.importance_ratio(logprobs, old, MASK, "token")
    sequence = losses.importance_ratio(logprobs, old, MASK, "sequence")
    for i, n in enumerate(LENGTHS):
        ratios = [math.exp(logprobs[i, t] - old[i, t]) for t in range(n)]
        assert token[i, :n].tolist() == pytest.approx(ratios)
        assert sequence[i, :n].tolist() == pytest.approx([math.prod(ratios) ** (1 / n)] * n if n else [])
    assert token[~MASK].eq(0).all() and sequence[~MASK].eq(0).all()


def test_the_sequence_ratio_keeps_the_advantages_of_tokens_apart():
    """GSPO-token, equation 14: only the token with an advantage is moved."""
    logprobs, old, *_ = batch(0.01)
    logprobs.requires_grad_()
    advantages = torch.zeros(ROWS, T, dtype=torch.float64)
    advantages[0, 2] = 1.0
    switches = {"surrogate": "clip", "ratio": "sequence", "clip_low": 0.2, "clip_high": 0.2}
    losses.token_loss(logprobs, old, advantages, MASK, **switches)[0].sum().backward()
    assert logprobs.grad.nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("surrogate", ["reinforce", "clip", "cispo"])
def test_a_token_of_positive_advantage_becomes_more_probable(surrogate):
    """On the policy that sampled, every surrogate has the gradient -A: descent raises what was good."""
    logprobs = torch.full((2, 1), -1.0, requires_grad=True)
    switches = {"surrogate": surrogate, "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
    ones = torch.ones(2, 1, dtype=torch.bool)
    loss, clipped = losses.token_loss(logprobs, logprobs.detach(), torch.tensor([2.0, -3.0]), ones, **switches)
    loss.sum().backward()
    assert logprobs.grad.flatten().tolist() == [-2.0, 3.0]
    assert not clipped.any()


def test_the_clip_takes_the_gradient_away_where_it_says_so():
    ratios = torch.tensor([[1.5, 1.25, 1.1, 0.9, 0.7], [1.5, 1.25, 1.1, 0.9, 0.7]])
    logprobs = ratios.log().requires_grad_()
    everywhere = torch.ones(2, 5, dtype=torch.bool)
    switches = {"surrogate": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.28}
    loss, clipped = losses.token_loss(logprobs, torch.zeros(2, 5), torch.tensor([1.0, -1.0]), everywhere, **switches)
    loss.sum().backward()
    assert clipped.tolist() == [[True, False, False, False, False], [False, False, False, False, True]]
    assert logprobs.grad.eq(0).equal(clipped)


@pytest.mark.parametrize(
    ("surrogate", "advantages", "expected"),
    [
        ("clip", 1.0, [False, False, False, True, True]),
        ("clip", -1.0, [True, False, False, False, False]),
        ("clip", 0.0, [False] * 5),  # there is no gradient that the clip could take away
        ("cispo", 1.0, [False, False, False, True, True]),
        ("cispo", 0.0, [False, False, False, True, True]),  # the weight is capped whatever it weighs
    ],
)
def test_a_token_is_clipped_beyond_the_bound_and_not_on_it(surrogate, advantages, expected):
    ratios = torch.tensor([[0.25, 0.5, 1.0, 1.75, 4.0]], dtype=torch.float64)
    switches = {"surrogate": surrogate, "ratio": "token", "clip_low": 0.5, "clip_high": 0.5}
    everywhere, zero = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.float64)
    _, clipped = losses.token_loss(ratios.log(), zero, torch.tensor([advantages]), everywhere, **switches)
    assert clipped.tolist() == [expected]
    nothing = switches | {"clip_low": 0.0, "clip_high": 0.0}
    assert not losses.token_loss(zero, zero, torch.tensor([advantages]), everywhere, **nothing)[1].any()


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
def test_the_mean_over_one_token_is_the_token(how):
    value, mask = torch.tensor([[3.0]]), torch.ones(1, 1, dtype=torch.bool)
    assert losses.aggregate(value, mask, how, rows=1, tokens=1, max_new_tokens=1).item() == 3


GARBAGE = [NAN, float("inf"), float("-inf")]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("surrogate", ["reinforce", "clip", "cispo"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_masked_tokens_get_no_loss_and_no_gradient(surrogate, ratio, garbage):
    clean = [x.masked_fill(~MASK, 0.0) for x in batch()[:3]]
    dirty = [x.masked_fill(~MASK, garbage) for x in clean]
    results = []
    for logprobs, old, advantages in (clean, dirty):
        logprobs = logprobs.clone().requires_grad_()
        switches = {"surrogate": surrogate, "ratio": ratio, "clip_low": 0.2, "clip_high": 0.2}
        loss, clipped = losses.token_loss(logprobs, old, advantages, MASK, **switches)
        loss.sum().backward()
        assert loss[~MASK].eq(0).all() and not clipped[~MASK].any() and logprobs.grad[~MASK].eq(0).all()
        results.append((loss, logprobs.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_values_get_no_loss_and_no_gradient(garbage):
    _, _, returns, values, old_values = (x.masked_fill(~MASK, garbage) for x in batch())
    values.requires_grad_()
    loss = losses.value_loss(values, old_values, returns, MASK, 0.2)
    loss.sum().backward()
    assert loss[~MASK].eq(0).all() and values.grad[~MASK].eq(0).all()
    assert values.grad[MASK].ne(0).any() and loss.isfinite().all() and values.grad.isfinite().all()


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "constant"])
def test_aggregate_ignores_what_is_masked_and_survives_an_empty_batch(how):
    x = torch.ones(ROWS, T).masked_fill(~MASK, NAN).requires_grad_()
    kwargs = {"rows": ROWS, "tokens": int(MASK.sum()), "max_new_tokens": 10}
    total = losses.aggregate(x, MASK, how, **kwargs)
    total.backward()
    # 5 of 6 rows have tokens; 19 tokens; 6 x 10 would fit
    assert total.item() == pytest.approx({"sequence_mean": 5 / 6, "token_mean": 1.0, "constant": 19 / 60}[how])
    assert x.grad[~MASK].eq(0).all() and x.grad[MASK].gt(0).all()
    assert losses.aggregate(x, torch.zeros_like(MASK), how, rows=ROWS, tokens=0, max_new_tokens=10).item() == 0


def test_the_constant_of_dr_grpo_does_not_depend_on_lengths():
    """A token weighs 1 / (rows * max_new_tokens) whatever else is in the batch; under GRPO, less in a long answer."""
    weights = {}
    for how in ("constant", "sequence_mean", "token_mean"):
        x = torch.zeros(ROWS, T, requires_grad=True)
        losses.aggregate(x, MASK, how, rows=ROWS, tokens=19, max_new_tokens=10).backward()
        weights[how] = [round(1 / x.grad[i, 0].item(), 3) for i in range(ROWS) if LENGTHS[i]]
    assert weights == {"constant": [60] * 5, "sequence_mean": [42, 6, 18, 12, 36], "token_mean": [19] * 5}


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (1.1, 0.405, -0.9),  # within the clip
        (1.5, 0.32, 0.0),  # towards the return by more than the clip: as bad as 1.2, and nothing pulls it further
        (0.5, 1.125, -1.5),  # away from the return: nothing holds it there
        (3.0, 0.5, 1.0),  # past the return
    ],
)
def test_value_loss_is_the_larger_of_the_plain_and_the_clipped_error(value, loss, gradient):
    """The value was 1, the return is 2, the clip 0.2."""
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    found = losses.value_loss(values, one, 2 * one, one.bool(), 0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(loss) and values.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("cap", [0.8, 1.5, 1e9])
@pytest.mark.parametrize("level", ["off", "token", "sequence"])
def test_the_sampler_is_corrected_for_by_a_truncated_ratio(level, cap):
    logprobs, sampler, *_ = batch()
    logprobs.requires_grad_()
    weights = losses.sampler_correction(logprobs, sampler, MASK, level, cap)
    for i, n in enumerate(LENGTHS):
        ratios = [math.exp(logprobs[i, t].item() - sampler[i, t].item()) for t in range(n)]
        expected = {"off": [1.0] * n, "token": ratios, "sequence": [math.prod(ratios)] * n}[level]
        expected = [min(weight, cap) for weight in expected] if level != "off" else expected
        assert weights[i].tolist() == pytest.approx(expected + [1.0] * (T - n))
    assert not weights.requires_grad


@pytest.mark.parametrize("level", ["off", "token", "sequence"])
def test_a_sampler_that_is_the_policy_needs_no_correction(level):
    logprobs, *_ = batch()
    assert losses.sampler_correction(logprobs, logprobs, MASK, level, 2.0).eq(1).all()


class TestKL:
    """Means over a vocabulary of five tokens, summed exactly."""

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64)
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)

    def mean(self, estimator):
        """The estimator's mean over the policy, and the mean of its gradient as a loss on sampled tokens."""
        logits = self.logits.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        estimate = losses.kl_estimate(logprobs, self.reference, estimator)
        probabilities = logprobs.detach().exp()  # who samples is not differentiated
        (gradient,) = torch.autograd.grad((probabilities * estimate).sum(), logits)
        return (probabilities * estimate.detach()).sum(), gradient

    def divergence(self, forward):
        """KL(policy || reference), or with `forward` KL(reference || policy), and its gradient."""
        logits = self.logits.clone().requires_grad_()
        p, q = logits.log_softmax(-1), self.reference
        kl = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
        return kl.detach(), torch.autograd.grad(kl, logits)[0]

    @pytest.mark.parametrize("estimator", ["k1", "k3"])
    def test_k1_and_k3_are_unbiased(self, estimator):
        torch.testing.assert_close(self.mean(estimator)[0], self.divergence(forward=False)[0])

    def test_k2_is_biased_and_k3_never_negative(self):
        assert (self.mean("k2")[0] - self.divergence(forward=False)[0]).abs() > 0.01
        assert losses.kl_estimate(self.logits.log_softmax(-1), self.reference, "k3").min() >= 0

    def test_gradients_as_a_loss(self):
        torch.testing.assert_close(self.mean("k1")[1], torch.zeros(5, dtype=torch.float64))
        torch.testing.assert_close(self.mean("k2")[1], self.divergence(forward=False)[1])
        torch.testing.assert_close(self.mean("k3")[1], self.divergence(forward=True)[1])

    def test_a_token_twice_as_probable_as_under_the_reference(self):
        half, quarter = torch.tensor([0.5, 0.25]).double().log()
        found = {name: losses.kl_estimate(half, quarter, name).item() for name in ("k1", "k2", "k3")}
        assert found == pytest.approx({"k1": 0.6931472, "k2": 0.2402265, "k3": 0.1931472}, abs=1e-7)

    def test_k3_of_a_policy_close_to_its_reference_does_not_round_away(self):
        """exp(-d) - 1 + d is exact to a float of 1, and all of k3 is about as large at d = 0.001."""
        d = torch.tensor([1e-3, -1e-3, 3e-3])
        found = losses.kl_estimate(d, torch.zeros(3), "k3")
        torch.testing.assert_close(found.double(), (-d.double()).exp() - 1 + d.double(), rtol=1e-3, atol=0)


def test_unknown_names_are_refused():
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="use token or sequence"):
        losses.importance_ratio(x, x, mask, "word")
    with pytest.raises(ValueError, match="use reinforce, clip or cispo"):
        losses.token_loss(x, x, x, mask, surrogate="ppo", ratio="token", clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="use sequence_mean, token_mean or constant"):
        losses.aggregate(x, mask, "mean", rows=1, tokens=1, max_new_tokens=1)
    with pytest.raises(ValueError, match="use off, token or sequence"):
        losses.sampler_correction(x, x, mask, "word", 2.0)
    with pytest.raises(ValueError, match="use k1, k2 or k3"):
        losses.kl_estimate(x, x, "k4")
