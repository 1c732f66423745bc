"""The layers' training pass as two CUDA graphs, forward and backward: for batches so small that a GPU computes a layer
faster than the host launches its kernels. A graph knows its memory by address: what changes from call to call is copied
to where it reads. All graphs share one pool of memory, since what a forward pass keeps is used up by its backward pass
before another begins."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcourse.cuda_graphs import recorded
from rlcourse.exact import CAPTURED_BYTES
from rlcourse.exact.layers import angles_at, attention, layer_backward, layer_pass, parameter_gradients
from rlcourse.exact.products import one_chain
from rlcourse.exact.sequences import Sequences
from rlcourse.exact.weights import FusedWeights, Layer

MOST_TOKENS = 16384  # of a batch that is captured
PAIRS = 32  # of graphs that are kept; the one used longest ago goes first


Pair = tuple[Sequences, Callable[[], None], Callable[[], None]]  # both passes over tokens that stand as these say


class CapturedLayers:
    """What `layers.trunk` computes after the embedding, with the same bits. Batches come in few sizes (`model.pack`);
    the first of each is left to `trunk`, which also loads and plans what must not happen under capture."""

    def __init__(self, model, weights: FusedWeights):
        self.weights = weights
        own = [[p for parts in Layer.sources(layer) for p in parts] for layer in model.model.layers]
        self.parameters = [p for layer in own for p in layer]
        self.sizes = [[len(p) for p in layer] for layer in own]
        self.hidden, fit = weights.layers[0].down.shape[0], tokens_that_fit(weights, self.parameters)
        self.tokens = min(MOST_TOKENS, fit)  # of a batch, at most
        self.step = fit // 512  # of which their number should be a multiple: so a small model comes in few sizes
        self.pairs: dict[tuple[int, int, int], Pair] = {}  # by tokens, sequences and the longest one's length
        self.seen: set[tuple[int, int, int]] = set()
        self.x: Tensor | None = None  # [4, tokens, d]: x before and after the layers, and their gradients
        # Of each layer's fused weights, and of its parameters, parts of those: held here, or autograd would keep them.
        self.gradients: list[list[Tensor | None]] = []
        self.parts: list[Tensor] = []
        self.pool = torch.cuda.graph_pool_handle() if weights.embedding.is_cuda else None
        self.calls = 0

    def ready(self, n: int, sequences: Sequences) -> bool:
        """Whether a batch of n tokens is for a graph: a small one, of a size that has been seen, with gradients. After
        a large one none is, and the graphs' memory is given back: the host keeps up with such a run."""
        if not torch.is_grad_enabled():
            return False
        if n > self.tokens:
            self.tokens, self.x, self.gradients, self.parts = 0, None, [], []
            self.pairs.clear()
            return False
        key = (n, len(sequences), sequences.length)
        known = key in self.seen
        self.seen.add(key)
        return known

    def __call__(self, x: Tensor, sequences: Sequences, parameters: list[Tensor]) -> Tensor:
        """x [N, d] after the layers, differentiable in `Layer.sources` of all. The backward pass comes before the next
        call."""
        key = (len(x), len(sequences), sequences.length)
        pair = self.pairs.pop(key, None) or self._capture(len(x), sequences)
        while len(self.pairs) >= PAIRS:
            del self.pairs[next(iter(self.pairs))]
        self.pairs[key] = pair  # at the end: used last
        return Replayed.apply(x, self, pair, sequences, *parameters)

    @torch.no_grad()
    def _capture(self, n: int, sequences: Sequences) -> Pair:
        if self.x is None:
            self.x = torch.empty(4, self.tokens, self.hidden, device=self.weights.embedding.device)
            for layer, sizes in zip(self.weights.layers, self.sizes, strict=True):
                held = [None if w is None else torch.empty_like(w, dtype=torch.float32) for w in vars(layer).values()]
                self.gradients.append(held)
                self.parts += parameter_gradients(held, sizes)
        weights, (before, after, d_before, d_after), kept = self.weights, self.x[:, :n], []
        there = Sequences(sequences.table.clone(), sequences.length, sequences.places.clone(), sequences.copies.clone())
        attend = partial(attention, sequences=there)

        def forward() -> None:
            x, angles = before, angles_at(weights, there.positions)
            for layer in weights.layers:
                x, saved = layer_pass(weights, layer, x, angles, attend)
                kept.append((saved, angles))
            after.copy_(x)

        def backward() -> None:
            gradient = d_after
            for layer, into in zip(reversed(weights.layers), reversed(self.gradients), strict=True):
                saved, angles = kept.pop()
                gradient, fused = layer_backward(weights, layer, saved, gradient, there, angles, into)
                for held, found in zip(into, fused, strict=True):
                    if found is not None and found.data_ptr() != held.data_ptr():  # of a norm or a bias
                        held.copy_(found)
            d_before.copy_(gradient)

        with one_chain():  # as in `trunk`; the backward pass has no order to keep to
            first = self._captured(forward)
        return there, first, self._captured(backward)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """What replays `run`; on a CPU, which has no graphs, `run` itself."""
        if self.pool is None:
            return run
        graph = torch.cuda.CUDAGraph()
        with recorded(graph, self.pool):
            run()
        return graph.replay


class Replayed(torch.autograd.Function):
    """`CapturedLayers` of x [N, d], differentiable in x and the parameters."""

    @staticmethod
    def forward(ctx, x: Tensor, layers: CapturedLayers, pair: Pair, sequences: Sequences, *parameters) -> Tensor:
        there, forward, backward = pair
        for name in ("table", "places", "copies"):
            getattr(there, name).copy_(getattr(sequences, name))
        layers.x[0, : len(x)].copy_(x)
        forward()
        layers.calls += 1
        ctx.settings = layers, backward, layers.calls
        return layers.x[1, : len(x)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        layers, backward, call = ctx.settings
        if call != layers.calls:
            raise RuntimeError("A captured pass forgets what it kept when the next begins: go backward before that.")
        layers.x[3, : len(gradient)].copy_(gradient)
        backward()
        layers.calls += 1  # what it kept is used up
        return layers.x[2, : len(gradient)].clone(), None, None, None, *layers.parts


def tokens_that_fit(weights: FusedWeights, parameters: list[Tensor]) -> int:
    """How many tokens there may be, so that what layers keep of them and the gradients of these parameters take no more
    than `CAPTURED_BYTES`; 0 for a large model, whose GPU the host keeps up with."""
    d, inner = weights.layers[0].down.shape
    numbers = 2 * (weights.heads + weights.kv_heads) * weights.head_dim + 2 * inner
    token = len(weights.layers) * (8 * (d + d // 32) + 4 * weights.heads + 2 * numbers)
    return max(0, int(CAPTURED_BYTES - 4 * sum(p.numel() for p in parameters)) // token)
