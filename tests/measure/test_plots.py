"""The figures are drawn without a display, hold what they are given, and say what their axes are."""

import pytest
from matplotlib.figure import Figure

from rlcourse.measure.plots import plot_run, seed_band

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
