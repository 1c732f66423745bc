"""Padded batches of the checks of lesson 02, and what usual mistakes with a mask are called."""

import torch
from torch import Tensor

from rlcourse.course.checks import compare

DIVIDED = "You divided by all places: take the mean over the real tokens."
UNMASKED = "The mask is not used: padding counts."
BY_ROW = "You took the mean over each row first: take one mean over all real tokens."
NAN = "nan: 0 * nan and inf - inf are nan, so pick out the real tokens, or fill the padding, before you compute."


def sample_mask(rows: int, length: int) -> Tensor:
    """A mask with an answer of one token, a full one, and others in between: bool [rows, length]."""
    lengths = torch.randint(2, length, (rows,))
    lengths[0], lengths[-1] = 1, length
    return torch.arange(length) < lengths[:, None]


def junk(tensor: Tensor, mask: Tensor, value: float) -> Tensor:
    """The tensor with `value` in its padding, where nothing may look."""
    return tensor.masked_fill(~mask, value)


def compare_finite(found, expected: Tensor, mistakes: dict[str, Tensor], what: str, atol: float = 1e-5) -> None:
    """`compare`, and a sentence of its own for nan that came from the padding."""
    if found is not None and torch.as_tensor(found).isnan().any():
        raise AssertionError(NAN)
    compare(found, expected, mistakes, what, atol)
