"""Recording CUDA graphs. Where there is no GPU, torch's recorder is one that writes down what happens."""

import gc
from contextlib import contextmanager

import pytest
import torch

from rlcourse.cuda_graphs import recorded


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("collects", [False, True])
def test_nothing_is_collected_while_a_graph_is_recorded(monkeypatch, collects, fails):
    seen = []

    @contextmanager
    def recorder(graph, pool, capture_error_mode):
        seen.append((graph, pool, capture_error_mode, gc.isenabled()))
        yield

    monkeypatch.setattr(torch.cuda, "graph", recorder)
    if not collects:
        gc.disable()
    try:
        with recorded("a graph", "a pool"):
            seen.append(gc.isenabled())
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    found = gc.isenabled()
    gc.enable()
    assert seen == [("a graph", "a pool", "thread_local", False), False] and found == collects
