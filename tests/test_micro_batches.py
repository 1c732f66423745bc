"""Which rows go through the model together, against a search of all ways to cut them."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcourse.batch import batches_of, micro_batches, rows_together
from rlcourse.config import make_config
from rlcourse.distributed.world import World

BUDGETS = st.integers(1, 60)


def joined(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def tokens(piece: list[int]) -> int:
    return len(piece) * max(piece)


def best_cut(lengths: list[int], most_tokens: int) -> tuple[int, int]:
    """The fewest micro-batches, and then tokens, of all ways to cut the list that keep to the budget."""
    found = []
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [len(lengths)]
        pieces = [lengths[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        if all(tokens(piece) <= most_tokens or len(piece) == 1 for piece in pieces):
            found.append((len(pieces), sum(map(tokens, pieces))))
    return min(found)


def pieces_of(lengths: list[int], most_tokens: int) -> list[list[int]]:
    rest = iter(lengths)
    pieces = [[*itertools.islice(rest, count)] for count in rows_together(lengths, most_tokens)]
    assert list(rest) == []
    return pieces


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9).map(sorted), BUDGETS)
def test_a_cut_is_the_best_that_keeps_to_the_budget(lengths, most_tokens):
    pieces = pieces_of(lengths, most_tokens)
    assert joined(pieces) == lengths
    assert all(tokens(piece) <= most_tokens or len(piece) == 1 for piece in pieces)
    assert (len(pieces), sum(map(tokens, pieces))) == best_cut(lengths, most_tokens)


@pytest.mark.parametrize(
    ("lengths", "most_tokens", "counts"),
    [
        ([], 10, []),
        ([5, 5, 5, 5], 10, [2, 2]),
        ([5, 5, 5, 5], 9, [1, 1, 1, 1]),
        ([2, 3, 11, 12], 10, [2, 1, 1]),  # a row longer than the budget goes alone
        ([1, 5, 5, 5], 15, [1, 3]),  # and not 3 and 1, which keeps to the budget, too
        ([3] * 7, 10**9, [7]),
    ],
)
def test_cuts_by_hand(lengths, most_tokens, counts):
    assert rows_together(lengths, most_tokens) == counts


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), BUDGETS, st.integers(1, 4), st.randoms())
def test_every_row_is_in_one_micro_batch_of_one_rank(lengths, most_tokens, ranks, random):
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    tensors = torch.tensor(rows), torch.tensor(lengths)
    shares = [[p.tolist() for p in micro_batches(*tensors, most_tokens, World(r, ranks))] for r in range(ranks)]
    dealt = [*map(joined, shares)]
    assert sorted(joined(dealt)) == sorted(rows)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    sizes = [[lengths[row] for row in of_rank] for of_rank in dealt]
    turns = [n for n in joined(itertools.zip_longest(*sizes)) if n is not None]
    assert turns == sorted(turns)  # dealt in turn, in order of length
    for share, of_rank in zip(shares, sizes, strict=True):
        assert [len(piece) for piece in share] == rows_together(of_rank, most_tokens)
    if ranks == 1:
        assert [p.tolist() for p in micro_batches(*tensors, most_tokens)] == shares[0]


def test_rows_of_one_length_stay_in_their_order():
    rows, lengths = torch.tensor([4, 0, 3, 1]), torch.tensor([5, 5, 1, 5, 2])
    assert [piece.tolist() for piece in micro_batches(rows, lengths, 10)] == [[4, 0], [3, 1]]
    assert micro_batches(rows[:0], lengths, 10) == ()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), BUDGETS, st.randoms())
def test_a_packed_pass_gets_answers_to_one_prompt_together_and_pays_for_the_prompt_once(lengths, most_tokens, random):
    group = random.randint(1, 4)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    prompts, answers = map(torch.tensor, zip(*lengths, strict=True))
    rollout = SimpleNamespace(prompt_lengths=prompts, completion_lengths=answers, lengths=prompts + answers)
    config = make_config(micro_batch_tokens=most_tokens, num_generations=group, advantage="reward")
    pieces = [piece.tolist() for piece in batches_of(torch.tensor(rows), rollout, config, packed=True)]
    assert joined(pieces) == sorted(rows)

    def cost(piece: list[int]) -> int:
        first = {row // group: row for row in reversed(piece)}  # which row brings its group's prompt
        return sum(lengths[row][1] for row in piece) + sum(lengths[row][0] for row in first.values())

    assert all(cost(piece) <= most_tokens or len(piece) == 1 for piece in pieces)
    assert all(cost([*a, b[0]]) > most_tokens for a, b in itertools.pairwise(pieces))  # each is as full as it can be
    ranks = [batches_of(torch.tensor(rows), rollout, config, True, World(rank, 2)) for rank in range(2)]
    assert sorted(joined([p.tolist() for share in ranks for p in share])) == sorted(rows)
    padded = batches_of(torch.tensor(rows), rollout, config, packed=False)
    assert [p.tolist() for p in padded] == [
        p.tolist() for p in micro_batches(torch.tensor(rows), prompts + answers, most_tokens)
    ]
