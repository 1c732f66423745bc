"""What `bench scale` makes of its measurements, and one real measurement of two processes on a CPU."""

import pytest
import torch

from rlcourse.bench import models
from rlcourse.bench import scale as module
from rlcourse.bench.scale import VARIANTS, scale
from rlcourse.tasks import load_task


def test_efficiency_is_of_so_many_times_one_rank(monkeypatch):
    asked, (each, in_all, overlapped) = [], VARIANTS

    def measured(count, given):
        asked.append((count, given["rows"], given["variant"]))
        speeds = {(1, 32, each): 100.0, (2, 64, each): 190.0, (2, 32, in_all): 150.0, (2, 32, overlapped): 160.0}
        return {"rows": given["rows"], "tokens_per_s": speeds[asked[-1]]}

    monkeypatch.setattr(module, "_on_ranks", measured)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    setup, rows = scale("tiny", 32, 4, [2], 3)
    assert asked == [(1, 32, each), (2, 64, each), (2, 32, in_all), (2, 32, overlapped)]
    found = [(row["variant"], row["gpus"], row["rows"], row["efficiency"]) for row in rows]
    apart = [(each, 1, 32, 1.0), (each, 2, 64, 0.95), (in_all, 1, 32, 1.0), (in_all, 2, 32, 0.75)]
    assert found == [*apart, (overlapped, 2, 32, 0.8)]
    assert setup["shape"] == "tiny" and setup["repeats"] == 3


def test_what_cannot_be_measured_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^There are 2 GPUs, not 4: lower --gpus\.$"):
        scale("tiny", 64, 4, [1, 4], 1)
    with pytest.raises(ValueError, match=r"^8 rows are fewer than 2 groups of 8, one a rank: raise --rows\.$"):
        scale("tiny", 8, 4, [2], 1)


@pytest.mark.thorough
def test_two_processes_are_measured(tmp_path):
    models.write_random_model("tiny", load_task("minigsm"), tmp_path / "model")
    given = {"folder": str(tmp_path), "task": "minigsm", "new_tokens": 4, "repeats": 1, "rows": 16}
    for variant in VARIANTS[1:]:
        row = module._on_ranks(2, given | {"variant": variant})
        assert row["rows"] == 16 and row["tokens_per_s"] == pytest.approx(16 * 4 / row["step_s"])
        assert (row.get("sampling_s", 0) > 0) == (variant == VARIANTS[2])
        assert (row["allreduce_s"] is None) == (variant != VARIANTS[1])
