"""Which rows go through the model together: as many tokens as a budget allows, counted with their padding."""

from torch import Tensor

from rlcourse.distributed.world import ALONE, Alone, World


def micro_batches(rows: Tensor, lengths: Tensor, most_tokens: int, world: Alone | World = ALONE) -> tuple[Tensor, ...]:
    """The rows in order of length, cut by `rows_together`; of several ranks those of this one, maybe none.

    rows: indices int64 [n] into lengths [rows], the tokens of each.
    """
    rows = world.deal(rows[lengths[rows].argsort(stable=True)])
    return rows.split(rows_together(lengths[rows].tolist(), most_tokens)) if len(rows) else ()


def rows_together(lengths: list[int], most_tokens: int) -> list[int]:
    """How many rows each micro-batch has, of rows with these lengths, the shortest first.

    n rows padded to their longest are n x longest tokens: `most_tokens` at most, but a row that is longer goes alone.
    The fewest micro-batches that this allows, and of such cuts the one with the fewest tokens.
    """
    best = [(0, 0, 0)]  # of the first n rows: micro-batches, tokens, and how many rows the last micro-batch has
    for n, longest in enumerate(lengths, start=1):
        most = min(n, max(1, most_tokens // longest))
        best.append(min((best[n - k][0] + 1, best[n - k][1] + k * longest, k) for k in range(1, most + 1)))
    counts, left = [], len(lengths)
    while left:
        counts.append(best[left][2])
        left -= counts[-1]
    return counts[::-1]
