"""Reading what Nsight Compute prints, where there's no GPU to ask."""

import pytest

from tools.bench.stalls import METRICS, longest, stalls

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def test_the_longest_launch_is_read_with_its_reasons():
    names = ["Kernel Name", *METRICS.values(), STALLED.format("selected"), STALLED.format("long_scoreboard")]
    merge, attend = (
        ["merge", "2,000", "9", "1", "7", "1", "9"],
        ["attend", "92,256.5", "50", "2.7", "43,654", "1", "2.5"],
    )
    found = longest([",".join(f'"{cell}"' for cell in row) for row in (names, [""] * 7, merge, attend)])
    assert found == {
        "us": 92.2565, "issue_active": 50, "warps": 2.7, "instructions": 43654, "long_scoreboard": 2.5, "selected": 1
    }  # fmt: skip
    assert list(found)[-2:] == ["long_scoreboard", "selected"]  # the most important first


def test_without_nsight_compute_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="ncu"):
        stalls()
