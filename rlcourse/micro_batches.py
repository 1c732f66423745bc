"""Which rows go through the model together: as many tokens as a budget allows, counted with their padding."""

from torch import Tensor

from rlcourse.distributed.world import ALONE, Alone, World


def micro_batches(rows: Tensor, lengths: Tensor, most_tokens: int, world: Alone | World = ALONE) -> tuple[Tensor, ...]:
    """The rows in order of length, cut by `rows_together`; of several ranks those of this one, maybe none. All ranks
    call it.

    rows: indices int64 [n] into lengths [rows], the tokens of each.
    """
    rows = world.deal(rows[lengths[rows].argsort(stable=True)])
    return world.level(rows.split(rows_together(lengths[rows].tolist(), most_tokens)) if len(rows) else ())


def rows_together(lengths: list[int], most_tokens: int) -> list[int]:
    """How many rows each micro-batch has, of rows with these lengths, the shortest first.

    n rows padded to their longest are n x longest tokens: `most_tokens` at most, but a row that is longer goes alone.
    The fewest micro-batches that this allows, and of such cuts the one with the fewest tokens.
    """
    best = [(0, 0, 0)]  # of the first n rows: micro-batches, tokens, and how many rows the last micro-batch has
    most = [0]  # by number of micro-batches: how many of the first rows they can hold
    for n, longest in enumerate(lengths, start=1):
        first = n - min(n, max(1, most_tokens // longest))  # where the last micro-batch may begin, or later, as long
        before = best[first][0]  # as those before it are no more
        found = min((best[m][1] + (n - m) * longest, n - m) for m in range(first, most[before] + 1))
        best.append((before + 1, *found))
        most[before + 1 :] = [n]
    counts, left = [], len(lengths)
    while left:
        counts.append(best[left][2])
        left -= counts[-1]
    return counts[::-1]
