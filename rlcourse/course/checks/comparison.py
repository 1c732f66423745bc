"""What a function returned, compared with what it should have returned, and with what usual mistakes give."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def as_tensor(found, what: str = "the result") -> Tensor:
    """What a function returned, as a tensor. Raises AssertionError for what is none."""
    if found is None:
        raise AssertionError(f"{what} is None: is there a `return`?")
    try:
        return torch.as_tensor(found).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"{what} should be a tensor, not {type(found).__name__}") from None


def compare(
    found,
    expected: Tensor | float | list[int],
    mistakes: Mapping[str, Tensor | float | list[int]] | None = None,
    what: str = "the result",
    atol: float = 1e-5,
    not_finite: str = "",
) -> None:
    """Raise AssertionError unless `found` is `expected` in shape and, to `atol` + 1e-5 relative, in value. mistakes:
    results of usual mistakes by the sentence that names them; where several fit, the card names each. not_finite: the
    sentence for nan and infinity."""
    found = as_tensor(found, what)
    expected = exactly(expected)
    if not same(found, expected, atol) and (fit := [s for s, v in (mistakes or {}).items() if same(found, v, atol)]):
        single = [sentence for sentence in fit if "mistakes are left" not in sentence]
        raise AssertionError(" Or: ".join(single or fit[:1]))
    if not expected.dtype.is_floating_point and expected.dtype != torch.bool and found.dtype.is_floating_point:
        raise AssertionError(f"{what} has dtype {found.dtype}, expected whole numbers: {expected.dtype}")
    if found.shape != expected.shape:
        raise AssertionError(f"{what} has shape {list(found.shape)}, expected {list(expected.shape)}")
    if not same(found, expected, atol):
        if not torch.isfinite(found).all() and torch.isfinite(expected).all():
            usual = f"{what} has values that are not finite: a division or a log of zero, an overflow, or inf - inf?"
            raise AssertionError(not_finite or usual)
        if expected.numel() > 12:
            worst = (found.double() - expected.double()).abs().argmax().item()
            i = tuple(int(k) for k in torch.unravel_index(torch.tensor(worst), expected.shape))
            raise AssertionError(f"{what} is wrong: at {list(i)} got {found[i]:.5g}, expected {expected[i]:.5g}")
        raise AssertionError(f"{what} is {rounded(found)}, expected {rounded(expected)}")


def compare_all(found, expected: Sequence, mistakes: Mapping, names: Sequence[str], atol: float = 1e-5) -> None:
    """For a function that returns several tensors, of these names; `mistakes` are as many each."""
    if not isinstance(found, tuple | list) or len(found) != len(names):
        raise AssertionError(f"the result should be {len(names)} tensors: {', '.join(names)}")
    for part, name in enumerate(names):
        compare(found[part], expected[part], {said: wrong[part] for said, wrong in mistakes.items()}, name, atol)


def same(a: Tensor | float, b: Tensor | float, atol: float) -> bool:
    a, b = exactly(a), exactly(b)
    both = torch.promote_types(a.dtype, b.dtype)  # a float is no integer, and none of its digits is cut off
    return a.shape == b.shape and torch.allclose(a.to(both), b.to(both), rtol=1e-5, atol=atol)


def exactly(value: Tensor | float) -> Tensor:
    """A value as a tensor that keeps all digits of a float."""
    return torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def rounded(tensor: Tensor):
    if tensor.dtype.is_floating_point:
        tensor = (tensor.double() * 1e4).round() / 1e4
    return tensor.tolist()
