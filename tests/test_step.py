"""The training step as a whole: every gradient that reaches the optimizer, and every metric, against the papers'
formulas (`papers.py`)."""

import time

import pytest
import torch
from papers import FINISHED, LENGTHS, REWARDS, ROWS, Run, assert_follows_the_paper, config_for
from policies import FixedEngine

from rlcourse import learner
from rlcourse import train as module
from rlcourse.config import ALGORITHMS
from rlcourse.learner import Learner


@pytest.fixture(autouse=True)
def _whole_gradients(monkeypatch):
    monkeypatch.setattr(module, "MAX_GRAD_NORM", 1e9)


# The gradients, against the formulas


VARIANTS = {
    "kl": ("grpo", {"kl_coef": 0.2}),
    "kl of ppo": ("ppo", {"kl_coef": 0.2}),
    "truncated": ("grpo", {"leave_out": "truncated"}),
    "truncated, kl": ("dr_grpo", {"leave_out": "truncated", "kl_coef": 0.2}),
    "truncated, ppo": ("ppo", {"leave_out": "truncated"}),
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

    timing = Run(config_for("ppo", kl_coef=0.1), engine_class=Slow).metrics["timing"]
    names = ("rollout", "reward", "reference", "values", "advantages", "update")
    assert timing.keys() == {f"{name}_s" for name in (*names, "step")} | {"tokens_per_s", "peak_memory_bytes"}
    phases = sum(timing[f"{name}_s"] for name in names)
    assert 0.5 * timing["step_s"] < phases <= timing["step_s"] and timing["rollout_s"] >= 0.05
    assert timing["tokens_per_s"] * timing["rollout_s"] == pytest.approx(sum(LENGTHS))
    assert timing["peak_memory_bytes"] > 0


@pytest.mark.parametrize("sleep", [False, True])
def test_the_engine_sleeps_where_it_should(sleep):
    assert Run(config_for(sleep=sleep)).engine.slept == sleep


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_attention_is_off_within_a_step_alone(before, monkeypatch):
    flag, inside, batching = torch.backends.cuda.cudnn_sdp_enabled, [], module.make_batch
    monkeypatch.setattr(module, "make_batch", lambda *arguments: inside.append(flag()) or batching(*arguments))
    kept = flag()
    torch.backends.cuda.enable_cudnn_sdp(before)
    run = Run(config_for())
    assert flag() == before and run.engine.cudnn == inside == [False]
    torch.backends.cuda.enable_cudnn_sdp(kept)
