"""Gradients by autograd in float64, right or with a usual mistake, and how many numbers a function keeps at once."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def by_autograd(hidden, head, targets, a, b, temperature, chunk, mistake: str = "") -> tuple[Tensor, Tensor]:
    """Gradients of sum a log p + b sum entropy by autograd in float64, all logits at once; or what a mistake gives."""
    hidden, head = (t.double().requires_grad_() for t in (hidden, head))
    logits = hidden @ head.T / (1.0 if mistake == "temperature" else temperature)
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    if mistake == "no H":
        entropy = -((logp.exp() * logp).detach() * logits).sum(-1)  # its slope is -p log p
    sign = {"sign": -1.0, "log p alone": 0.0}.get(mistake, 1.0)
    of_tokens = a.double() * logp.gather(1, targets[:, None])[:, 0] + sign * b * entropy
    n = len(hidden)
    some = {"short": slice(n // chunk * chunk), "last": slice((n - 1) // chunk * chunk, n)}.get(mistake, slice(n))
    return torch.autograd.grad(of_tokens[some].sum() * (temperature if mistake == "inner" else 1.0), (hidden, head))


def norm_gradients(x: Tensor, weight: Tensor, g: Tensor, eps: float, mistake: str = "") -> tuple[Tensor, Tensor]:
    """Of a norm with 1 + weight over the last dimension of x [rows, heads, d], by autograd in float64."""
    x, weight, g = x.double().requires_grad_(), weight.double().requires_grad_(), g.double()
    scale = (x.square().mean(-1, keepdim=True) + (0.0 if mistake == "eps" else eps)).rsqrt()
    if mistake == "held still":
        scale = scale.detach()
    factor = weight if mistake == "no one" else 1 + weight
    dx, dw = torch.autograd.grad((x * scale * factor * g).sum(), (x, weight))
    if mistake in ("hers", "all heads"):
        along = (g * x).sum(-1, keepdim=True) if mistake == "hers" else (g * factor * x).sum((-2, -1), keepdim=True)
        dx = (scale * g * factor - x * scale**3 * along / x.shape[-1]).detach()
    return dx, dw


class Numbers(TorchDispatchMode):
    """The most numbers of one tensor that an operation makes, `largest`, and of all that exist at once, `at_once`."""

    def __init__(self):
        super().__init__()
        self.largest, self.at_once, self.alive = 0, 0, {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.dtype != torch.uint8:  # what a result is packed into
                memory = tensor.untyped_storage()
                self.largest = max(self.largest, tensor.numel())
                self.alive[memory._cdata] = StorageWeakRef(memory), memory.nbytes() // tensor.element_size()
        if sum(count for _, count in self.alive.values()) > self.at_once:  # perhaps: some of it may be gone
            self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
            self.at_once = max(self.at_once, sum(count for _, count in self.alive.values()))
        return made

    def check(self, largest: int, at_once: int) -> None:
        if self.largest > largest:
            raise AssertionError(f"The largest tensor has {self.largest:,} numbers: more than a chunk's logits.")
        if self.at_once > at_once:
            raise AssertionError(f"There are {self.at_once:,} numbers at once: what keeps them, a list or autograd?")
