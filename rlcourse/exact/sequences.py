"""Which of N tokens are a sequence: one follows the other, without padding between them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """bounds [S + 1] int32: sequence s is tokens bounds[s] to bounds[s + 1]; length: tokens of the longest, or more;
    places [N] int64: where each token stands where all S sequences are padded to `length`."""

    bounds: Tensor
    length: int
    places: Tensor

    @classmethod
    def of(cls, lengths: Tensor, length: int) -> "Sequences":
        """Sequences of these lengths [S], none over `length`."""
        real = torch.arange(length, device=lengths.device) < lengths[:, None]
        return cls(F.pad(lengths.cumsum(0), (1, 0)).int(), length, real.flatten().nonzero()[:, 0])

    @classmethod
    def equal(cls, count: int, length: int, device: torch.device) -> "Sequences":
        """`count` sequences of `length` tokens each. Without a look from the host, so that a graph can capture it."""
        bounds = length * torch.arange(count + 1, dtype=torch.int32, device=device)
        return cls(bounds, length, torch.arange(count * length, device=device))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def positions(self) -> Tensor:
        """[N] int64: each token's in its sequence."""
        return self.places % self.length
