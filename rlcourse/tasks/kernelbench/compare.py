"""Whether outputs are right: against the reference in double precision, and as exactly as PyTorch has it."""

import copy
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcourse.tasks.kernelbench.cases import as_list, chunk_size, chunks

# Per element, absolute and relative: KernelBench's own.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
# Of a tensor's root mean square error: a multiple of PyTorch's own error, or of a rounding of its deviation. Another
# order of summation stays within; numbers rounded to half precision, or to a tensor core's TF32, don't.
TIMES, ROUNDINGS, LAST_PLACES = 16, 64, 4
MOST_SHOWN = 1 << 25  # bytes of an output that are compared


@dataclass(frozen=True)
class Expected:
    """A trial's right outputs, exact in double precision and eager in the problem's own; and its input tensors."""

    exact: list[Tensor]
    eager: list[Tensor]
    inputs: list[Tensor]

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(exact).all()) for exact in self.exact if exact.is_floating_point())

    @property
    def telling(self) -> bool:
        """Whether it takes the computation to be right: zeros, the outputs' mean and the inputs are wrong."""
        guesses = [[torch.zeros_like(e) for e in self.eager]]
        guesses += [[torch.full_like(e, e.double().mean().to(e.dtype)) for e in self.eager]]
        for item in self.inputs:
            if any(item.numel() == e.numel() for e in self.eager):
                guesses += [[item.to(e.dtype).reshape(e.shape) if item.numel() == e.numel() else e for e in self.eager]]
        return all(fault(guess, self) is not None for guess in guesses)

    def part(self, wanted: list[list[int]]) -> "Expected":
        exact, eager = (list(map(chunks, tensors, wanted)) for tensors in (self.exact, self.eager))
        return Expected(exact, eager, self.inputs)


def expect(reference: torch.nn.Module, inputs: list) -> Expected:
    """Run the reference on copies of the inputs, as it is and, if it can, in double precision."""
    with torch.no_grad():
        eager = as_list(reference(*copied(inputs)))
        try:
            exact = as_list(copy.deepcopy(reference).double()(*copied(inputs, double=True)))
        except (RuntimeError, NotImplementedError, TypeError):  # an operation without double precision
            exact = eager
    return Expected(exact, eager, [item for item in inputs if isinstance(item, Tensor)])


def copied(inputs: list, double: bool = False) -> list:
    copies = [item.clone() if isinstance(item, Tensor) else item for item in inputs]
    return [c.double() if double and isinstance(c, Tensor) and c.is_floating_point() else c for c in copies]


def fault(outputs: list[Tensor], expected: Expected) -> tuple[str, str] | None:
    """(reason, sentence) of what is wrong with the outputs; None if they are right."""
    if len(outputs) != len(expected.eager):
        return "wrong shape", f"{len(outputs)} outputs, expected {len(expected.eager)}"
    for output, exact, eager in zip(outputs, expected.exact, expected.eager, strict=True):
        output = output.to(eager.device)
        if output.shape != eager.shape:
            return "wrong shape", f"the output has shape {list(output.shape)}, expected {list(eager.shape)}"
        if output.dtype != eager.dtype:
            return "wrong dtype", f"the output is {output.dtype}, expected {eager.dtype}"
        if not eager.is_floating_point():
            found = None if torch.equal(output, eager) else ("wrong", "its whole numbers differ")
        else:
            found = of_floats(output, exact.double(), eager)
        if found:
            return found
    return None


def of_floats(output: Tensor, exact: Tensor, eager: Tensor) -> tuple[str, str] | None:
    if not bool(torch.isfinite(output).all()):
        return "not finite", f"{int((~torch.isfinite(output)).sum())} of {output.numel()} numbers are not finite"
    error, tolerance = (output.double() - exact).abs(), TOLERANCE[eager.dtype]
    beyond = int((error > tolerance + tolerance * exact.abs()).sum())
    if beyond:
        return "wrong", f"{beyond} of {output.numel()} numbers are off, by up to {float(error.max()):.3g}"
    epsilon = torch.finfo(eager.dtype).eps
    own = root_mean_square(eager.double() - exact)
    varies = root_mean_square(exact - exact.mean())
    allowed = max(TIMES * own, ROUNDINGS * epsilon * varies, LAST_PLACES * epsilon * root_mean_square(exact))
    mean_error = root_mean_square(error)
    if mean_error > allowed:
        return "precision", f"the error is {mean_error:.2g}, PyTorch's own {own:.2g}: a lower precision was used"
    return None


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def some_chunks(tensor: Tensor) -> list[int]:
    """The numbers of random chunks of a tensor, up to MOST_SHOWN bytes: all chunks of most tensors."""
    size = chunk_size(tensor.numel())
    count = -(-tensor.numel() // size)
    most = max(1, MOST_SHOWN // (size * tensor.element_size()))
    return sorted(random.SystemRandom().sample(range(count), min(count, most)))
