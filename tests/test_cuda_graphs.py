"""Recording CUDA graphs. Where there is no GPU, torch's recorder is one that writes down what happens."""

import gc
from contextlib import contextmanager, suppress

import pytest
import torch

from rlcourse.cuda_graphs import recorded


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_a_graph_is_recorded(monkeypatch, fails):
    seen = []

    @contextmanager
    def recorder(graph, pool, capture_error_mode):
        seen.append((graph, pool, capture_error_mode))
        yield

    monkeypatch.setattr(torch.cuda, "graph", recorder)
    with suppress(RuntimeError), recorded("a graph", "a pool"):
        assert not gc.isenabled()
        if fails:
            raise RuntimeError
    assert gc.isenabled() and seen == [("a graph", "a pool", "thread_local")]
