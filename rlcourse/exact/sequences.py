"""Which tokens are a sequence, where several stand one after the other, without padding, and may begin alike, as
answers to one prompt do. As attention is causal, these tokens are computed once, in the first of the answers'
sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of S sequences stand among the N that are computed. table [S, 4] int32, of each sequence: its
    length; how many of its first tokens it shares; where the sequence that computes these begins; and where its own
    begin. So token p is at `source + p` if p < shared, else at `own + p - shared`. length: tokens of the longest, or
    more. places [N] int64: where each token stands where all S sequences are padded to `length`. copies [N] int32: how
    many of the sequences behind share it."""

    table: Tensor
    length: int
    places: Tensor
    copies: Tensor

    @classmethod
    def of(cls, lengths: Tensor, shared: Tensor, length: int, device: torch.device) -> "Sequences":
        """On `device`, of these lengths [S], none over `length`. shared [S]: the first tokens that each has in common
        with the last one before it that shares none, equally many for all that follow the same one. Both are on a CPU.
        """
        own = lengths - shared
        starts = own.cumsum(0) - own
        leaders = torch.arange(len(own)).masked_fill(shared > 0, 0).cummax(0)[0]
        followers = leaders.bincount(minlength=len(own)) - 1
        beginning = torch.zeros_like(own).scatter_reduce(0, leaders, shared, "amax")  # what others have of each
        table = torch.stack([lengths, shared, starts[leaders], starts], dim=1).int().to(device)
        # What has a number for each token is made where it is wanted: there are many, and the host has other work.
        tokens, of_each = int(own.sum()), torch.stack([own, starts - shared, followers, beginning]).to(device)
        own, before, followers, beginning = of_each
        sequence = torch.arange(len(own), device=device).repeat_interleave(own, output_size=tokens)
        position = torch.arange(tokens, device=device) - before[sequence]
        copies = followers[sequence] * (position < beginning[sequence])
        return cls(table, length, sequence * length + position, copies.int())

    def __len__(self) -> int:
        return len(self.table)

    @property
    def positions(self) -> Tensor:
        """[N] int64: each token's in its sequence."""
        return self.places % self.length

    def find(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """Where these tokens of these sequences stand, int64 of one shape."""
        _, shared, source, own = self.table[sequences].long().unbind(-1)
        return positions + torch.where(positions < shared, source, own - shared)
