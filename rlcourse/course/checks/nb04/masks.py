"""Masks of answers and the places of their tokens, for the checks of lesson 04."""

import torch
from torch import Tensor


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    """bool [rows, width], True on the first tokens of each row."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def tokens(mask: Tensor) -> list[tuple[int, int]]:
    """Places of the tokens that count."""
    return [tuple(place) for place in mask.nonzero().tolist()]
