"""Which device computes, and settings of torch that are given back."""

import pytest
import torch

from rlcourse.config import make_config
from rlcourse.device import find_device, wanted_device


@pytest.mark.parametrize("gpu", [True, False])
def test_auto_is_a_gpu_where_there_is_one(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert find_device(make_config()).type == ("cuda" if gpu else "cpu")
    assert find_device(make_config(device="cpu")).type == "cpu"


def test_bfloat16_asks_for_a_gpu_by_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert wanted_device(make_config(dtype="bfloat16")) == "cuda"
    assert wanted_device(make_config(device="cuda")) == "cuda" and wanted_device(make_config()) == "cpu"
