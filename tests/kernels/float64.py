"""An operation's results and gradients beside those of a formula in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from launching import run
from torch import Tensor

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}  # of a result that is rounded once


@dataclass
class Case:
    """What an operation takes, and a formula in float64 for what it gives: its results and then the arguments number
    `changed`. grads: of the results; where there are some, the gradients of the first `leaves` arguments are compared.
    near: by how many roundings a number may be off, and by how many of the largest number, for sums of rounded parts;
    floor: by how much if it is a float32, or if all should be 0. reference: gives the results, or the first of them, on
    a CPU."""

    operation: Callable
    arguments: tuple
    formula: Callable
    reference: Callable | None = None
    grads: tuple = ()
    leaves: int = 1
    changed: tuple[int, ...] = ()
    near: tuple[float, float] = (1.05, 0.002)
    floor: float = 0.0

    def ours(self, **order) -> list[Tensor]:
        """By the kernels. Nothing may be written between the rows of an argument."""
        found = run(self.with_gradients if self.grads else self.operation, *self.arguments, *self.grads, **order)
        changed = [self.arguments[i] for i in self.changed]
        for rows in (t for t in changed if t._base is not None):
            beside = torch.ones(rows._base.shape, dtype=torch.bool)
            beside.as_strided(rows.shape, rows.stride(), rows.storage_offset()).fill_(False)
            assert rows._base[beside].isnan().all(), "written between the rows"
        return [*results(found), *changed]

    def with_gradients(self, *tensors, function: Callable | None = None):
        """Results and gradients by autograd, of the operation or of another function."""
        count = len(tensors) - len(self.grads)
        leaves = [t.detach().requires_grad_() for t in tensors[: self.leaves]]
        found = results((function or self.operation)(*leaves, *tensors[self.leaves : count]))
        grads = torch.autograd.grad(found[: len(self.grads)], leaves, tensors[count:])
        return *(f.detach() for f in found), *grads

    def exact(self) -> list[Tensor]:
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in self.arguments]
        if not self.grads:
            return list(results(self.formula(*wide)))
        return list(self.with_gradients(*wide, *(g.double() for g in self.grads), function=self.formula))

    def check(self, found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
        for ours, right in zip(found, exact, strict=True):
            assert ours.shape == right.shape and torch.equal(ours.isnan(), right.isnan())
            if not ours.is_floating_point():
                assert torch.equal(ours, right)
            elif ours.numel():
                step, size = ROUNDING[ours.dtype], right.nan_to_num(0.0, 0.0, 0.0).abs()
                # In bfloat16, too, a number that should be 0 was computed in float32.
                floor = self.floor if ours.dtype == torch.float32 or not size.any() else 0.0
                off = (ours.double() - right).nan_to_num(0.0).abs()
                allowed = step * (self.near[0] * size + self.near[1] * size.max()) + floor
                assert (off <= allowed).all(), f"off by {(off / step / size).nan_to_num().max():.2f} roundings"


def results(found) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else () if found is None else (found,)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype, in float64; its gradient is that of x."""
    return x + (x.to(dtype).double() - x).detach()
