"""The figures are drawn without a display, hold what they are given, and say what their axes are."""

import pytest
from matplotlib.figure import Figure

from rlcourse.measure.plots import FINE_TUNING, draw_roofline, plot_run, seed_band
from rlcourse.measure.roofline import Machine, Work

MEASURED = {"accuracy": ".1%"}


def curve(algorithm, *accuracies):
    seeds = [
        {"variant": f"seed {seed}", "evals": [{"step": 5 * i, "accuracy": a} for i, a in enumerate(values)]}
        for seed, values in enumerate(accuracies)
    ]
    return {"name": algorithm, "results": seeds}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved while the test ran."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    return figures


def test_band_runs_from_the_worst_to_the_best_seed_over_the_steps_that_all_have():
    seeds = curve("grpo", [0.4, 0.6], [0.1, 0.9, 0.7], [0.4, 0.75])["results"]
    steps, low, mean, high = seed_band(seeds)
    assert (steps, low, high) == ([0, 5], [0.1, 0.6], [0.4, 0.9])
    assert mean == pytest.approx([0.3, 0.75])


def test_run_figure_shows_accuracy_reward_length_and_entropy(tmp_path, drawn):
    metrics = [{"step": s, "reward": 0.1 * s, "length": 30.0 + s, "entropy": 1.0 / s} for s in range(1, 8)]
    plot_run(metrics, [{"step": 0, "accuracy": 0.25}, {"step": 5, "accuracy": 0.5}], tmp_path / "r.png", MEASURED)
    accuracy, reward, length, entropy = drawn[0].axes
    assert list(accuracy.lines[0].get_ydata()) == [25, 50]
    assert list(reward.lines[0].get_ydata()) == pytest.approx([0.1 * s for s in range(1, 8)])
    assert reward.lines[1].get_ydata()[-1] == pytest.approx(0.5)  # mean of the last five: 0.3 .. 0.7
    assert list(length.lines[0].get_xdata()) == list(range(1, 8))
    assert entropy.lines[0].get_ydata()[1] == 0.5
    assert all(axes.get_title() and axes.get_ylabel() for axes in drawn[0].axes)


def test_the_figure_of_fine_tuning_shows_the_loss_that_is_learned_and_that_held_out(tmp_path, drawn):
    metrics, evals = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], [{"step": 0, "loss": 3.5}]
    plot_run(metrics, evals, tmp_path / "r.png", {}, FINE_TUNING)
    [loss] = drawn[0].axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[3.0, 2.0], [3.0, 2.5], [3.5]]


def test_a_roofline_rises_with_the_bytes_and_is_flat_behind_the_ridge():
    axes = Figure().subplots()
    machine = Machine("box", "float32", bytes_per_s=1e9, flops_per_s=1e11)
    points = [("decode", Work({"a": 1e9}, {"a": 2e9}), 4.0), ("update", Work({"a": 1e9}, {"a": 1e12}), 20.0)]
    draw_roofline(axes, machine, points)
    roof, ridge, *dots = axes.lines
    assert roof.get_xdata()[1] == 100 and ridge.get_xdata() == [100, 100]
    assert [y / x for x, y in zip(roof.get_xdata()[:2], roof.get_ydata()[:2], strict=True)] == pytest.approx([1, 1])
    assert roof.get_ydata()[1] == roof.get_ydata()[2] == 100
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == [(2, 0.5), (1000, 50)]
    assert [dot.get_label() for dot in dots] == ["decode: 25% of the roof", "update: 50% of the roof"]
