"""Which device computes."""

import pytest
import torch

from rlcourse.config import make_config
from rlcourse.device import find_device, wanted_device


@pytest.mark.parametrize(
    ("settings", "gpu", "kind"),
    [
        *(({}, True, "cuda"), ({}, False, "cpu"), ({"device": "cpu"}, True, "cpu")),
        *(({"device": "cuda"}, False, "cuda"), ({"dtype": "bfloat16"}, False, "cuda")),
    ],
)
def test_auto_is_a_gpu_where_there_is_one_and_where_bfloat16_asks_for_it(settings, gpu, kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert wanted_device(make_config(**settings)) == kind
    if gpu or kind == "cpu":
        assert find_device(make_config(**settings)).type == kind
