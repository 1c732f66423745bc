"""Work on a GPU recorded once and replayed: the host starts one graph instead of hundreds of kernels."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

EAGER_RUNS = 1  # before a graph is captured: what is loaded and compiled then must not happen under capture
CAPTURED_GRAPHS = 32  # graphs kept; the one used longest ago goes first
SMALLEST = 8  # slots of the smallest batch that `halve` makes


def halve(size: int, live: int) -> int:
    """The smallest half, quarter, ... of `size` that holds the live slots: few sizes, where each costs a graph."""
    while size > SMALLEST and live <= size // 2:
        size //= 2
    return size


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What's done within becomes the graph. The garbage collector waits: what it frees may void the recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        # Another thread may write a checkpoint meanwhile, and its calls must not void the recording.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


class CudaGraphs:
    """Functions that read and write the same memory at each call, by key: run eagerly at first, then captured."""

    def __init__(self):
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}  # and what the function returned
        self.eager_runs: dict[Hashable, int] = {}

    def run(self, key: Hashable, function: Callable[[], Tensor | None]) -> Tensor | None:
        """Call `function`, or replay it. A tensor that it returns is the same one each time, with new numbers."""
        if key not in self.graphs:
            self.eager_runs[key] = self.eager_runs.get(key, 0) + 1
            if self.eager_runs[key] <= EAGER_RUNS:
                return function()
            while len(self.graphs) >= CAPTURED_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            graph = torch.cuda.CUDAGraph()
            with recorded(graph):
                output = function()
            self.graphs[key] = graph, output
        self.graphs[key] = graph, output = self.graphs.pop(key)  # moved to the end: used last
        graph.replay()
        return output
