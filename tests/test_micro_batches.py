"""Mini-batches, the rows of them that train, and which go through the model together, against a search of all ways to
cut them."""

import itertools
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from policies import DEVICE, rollout_of

from rlcourse.batch import Batch, batches_of, micro_batches, rows_that_train, rows_together
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


def binary_batch() -> Batch:
    """Row i has 2^i tokens, so that a number of tokens says which rows they are of; even rows train."""
    rollout = rollout_of([([3] * (9 - i), [7] * 2**i) for i in range(7)])
    advantages = torch.tensor([[1.0], [0.0]], device=DEVICE).repeat(4, 1)[:7] * rollout.completion_mask
    return Batch(rollout, advantages, rollout.completion_mask)


def test_the_rows_that_train_are_those_with_a_gradient():
    batch = binary_batch()
    even = [i % 2 == 0 for i in range(7)]
    assert rows_that_train(batch, make_config()).tolist() == even
    assert rows_that_train(batch, make_config(kl_coef=0.1)).all()
    assert rows_that_train(batch, make_config(kl_coef=0)).tolist() == even
    valued = Batch(batch.rollout, batch.advantages, batch.loss_mask, None, batch.advantages, batch.advantages)
    assert rows_that_train(valued, make_config()).all()
    masked = Batch(batch.rollout, batch.advantages, batch.loss_mask & (torch.arange(7, device=DEVICE) > 3)[:, None])
    assert rows_that_train(masked, make_config()).tolist() == [i in (4, 6) for i in range(7)]
