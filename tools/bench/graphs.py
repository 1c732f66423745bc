"""Programs timed as CUDA graphs."""

from collections.abc import Callable

import torch

from rlcourse.cuda_graphs import recorded
from rlcourse.measure.timing import measure, seconds
from tools.bench.results import median_and_spread


def graph_seconds(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds and spread of a run captured in a CUDA graph, so that the host has no part in it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with recorded(graph):
        run()

    def replays() -> None:
        for _ in range(20):
            graph.replay()

    took, spread = median_and_spread(measure(lambda: seconds(replays, torch.device("cuda")), repeats, warmup=2))
    return took / 20, spread
