"""Which tokens are a sequence, where several stand one after the other, without padding, and may begin alike.

Answers to one prompt begin with the same tokens. As attention is causal, a model does the same with these in each: they
are computed once, in the first of the answers' sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of S sequences stand among the N that are computed.

    table [S, 4] int32, of each sequence: its length; how many of its first tokens it shares; where the sequence that
    computes these begins; and where its own begin. So token p is at `source + p` if p < shared, else at
    `own + p - shared`. length: tokens of the longest, or more. places [N] int64: where each token stands where all S
    sequences are padded to `length`. copies [N] int32: how many of the sequences behind share it.
    """

    table: Tensor
    length: int
    places: Tensor
    copies: Tensor

    @classmethod
    def of(cls, lengths: Tensor, shared: Tensor, length: int) -> "Sequences":
        """Of these lengths [S], none over `length`, on a CPU. shared [S]: the first tokens that each has in common with
        the last one before it that shares none; all that follow the same one share equally many."""
        own = lengths - shared
        starts = own.cumsum(0) - own
        leaders = torch.arange(len(own)).masked_fill(shared > 0, 0).cummax(0)[0]
        followers = leaders.bincount(minlength=len(own)) - 1
        beginning = torch.zeros_like(own).scatter_reduce(0, leaders, shared, "amax")  # what others have of each
        sequence = torch.arange(len(own)).repeat_interleave(own)
        position = torch.arange(len(sequence)) - (starts - shared)[sequence]
        copies = followers[sequence] * (position < beginning[sequence])
        table = torch.stack([lengths, shared, starts[leaders], starts], dim=1)
        return cls(table.int(), length, sequence * length + position, copies.int())

    @classmethod
    def equal(cls, count: int, length: int, device: torch.device) -> "Sequences":
        """`count` sequences of `length` tokens each that share nothing. Without a look from the host, so that a graph
        can capture it."""
        starts = length * torch.arange(count, dtype=torch.int32, device=device)
        zeros = torch.zeros_like(starts)
        table = torch.stack([zeros + length, zeros, starts, starts], dim=1)
        places = torch.arange(count * length, device=device)
        return cls(table, length, places, torch.zeros_like(places, dtype=torch.int32))

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

    def to(self, device: torch.device) -> "Sequences":
        table, places, copies = (tensor.to(device) for tensor in (self.table, self.places, self.copies))
        return Sequences(table, self.length, places, copies)
