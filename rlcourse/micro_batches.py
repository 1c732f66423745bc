"""Which rows go through the model together: as many tokens as a budget allows."""

from torch import Tensor

from rlcourse.batch import Rollout
from rlcourse.config import TrainConfig
from rlcourse.distributed.world import ALONE, World


def batches_of(
    rows: Tensor, rollout: Rollout, config: TrainConfig, packed: bool, world: World = ALONE
) -> tuple[Tensor, ...]:
    """These rows of the rollout, int64 [n], in micro-batches of `config.micro_batch_tokens`.

    packed: they are for a pass that leaves out padding and computes a prompt once for all answers that it has of it
    (`rlcourse.exact`). So those stay together, where a padded pass wants rows of one length.
    """
    if not packed:
        return micro_batches(rows, rollout.lengths, config.micro_batch_tokens, world)

    def cut(rows: Tensor) -> list[int]:
        prompts, answers = rollout.prompt_lengths[rows].tolist(), rollout.completion_lengths[rows].tolist()
        groups = (rows // config.num_generations).tolist()  # rows are group-major
        return packed_together(groups, prompts, answers, config.micro_batch_tokens)

    return world.split_rows(rows.sort().values, cut)


def packed_together(groups: list[int], prompts: list[int], answers: list[int], most_tokens: int) -> list[int]:
    """How many rows each micro-batch has, of rows in this order: as many as fit, but a longer one goes alone.

    A row is its answer's tokens, and the first of its group in a micro-batch its prompt's, too.
    """
    counts, tokens = [], 0
    for i, (group, prompt, answer) in enumerate(zip(groups, prompts, answers, strict=True)):
        more = answer if counts and groups[i - 1] == group else prompt + answer
        if counts and tokens + more <= most_tokens:
            counts[-1], tokens = counts[-1] + 1, tokens + more
        else:
            counts.append(1)
            tokens = prompt + answer
    return counts


def micro_batches(rows: Tensor, lengths: Tensor, most_tokens: int, world: World = ALONE) -> tuple[Tensor, ...]:
    """For a pass with padding: the rows in order of length, cut by `rows_together`; of several ranks those of this one,
    maybe none. All ranks call it.

    rows: indices int64 [n] into lengths [rows], the tokens of each.
    """
    rows = rows[lengths[rows].argsort(stable=True)]
    return world.split_rows(rows, lambda some: rows_together(lengths[some].tolist(), most_tokens))


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
