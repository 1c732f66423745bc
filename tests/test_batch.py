"""The one layout of a batch, against plain lists: what is selected, joined and cut keeps every real token."""

import random
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from policies import DEVICE, rollout_of, rows_of

from rlcourse.batch import Batch, Rollout, completion_lengths, concatenate, make_rollout

# Prompts of very different length, one token, EOS at once, no EOS
ROWS = [([5, 6, 7], [8, 9, 1]), ([4], [1]), ([3] * 20, [11, 12, 13, 14]), ([2, 2], [15, 1])]
LOGPROBS = [[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0, -7.0, -8.0], [-9.0, -10.0]]
FINISHED = [True, True, False, True]


def random_rollout(rows: int, seed: int) -> Rollout:
    chance = random.Random(seed)
    pairs = [[[chance.randint(1, 99) for _ in range(chance.randint(1, 9))] for _ in range(2)] for _ in range(rows)]
    logprobs = [[-chance.random() for _ in completion] for _, completion in pairs]
    return rollout_of(pairs, logprobs, [chance.random() < 0.5 for _ in pairs], pad=77)


def assert_tight(rollout: Rollout) -> None:
    """No column is padding in all rows, and nothing stands beyond the completions."""
    assert rollout.ids.shape[1] == (rollout.prompt_lengths + rollout.completion_lengths).max()
    assert rollout.logprobs.shape[1] == rollout.completion_lengths.max()
    assert rollout.logprobs[~rollout.completion_mask].eq(0).all()


@pytest.mark.parametrize("eos_ids", [[1], [1, 2]])
def test_a_completion_ends_with_its_first_eos(eos_ids):
    rows = [[1, 1, 1, 1], [5, 1, 6, 1], [5, 6, 7, 8], [5, 6, 7, 1], [5, 2, 6, 1], [0, 0, 1, 0]]
    expected = []
    for row in rows:
        first = next((t for t, token in enumerate(row) if token in eos_ids), None)
        expected.append(len(row) if first is None else first + 1)
    assert completion_lengths(torch.tensor(rows, device=DEVICE), eos_ids).tolist() == expected


def test_completion_ids_and_mask_are_aligned_with_the_logprobs():
    rollout = rollout_of(ROWS, LOGPROBS, FINISHED, pad=99)
    assert rollout.completion_ids.tolist() == [c + [0] * (4 - len(c)) for _, c in ROWS]
    assert rollout.completion_mask.tolist() == [[t < len(c) for t in range(4)] for _, c in ROWS]
    assert rollout.completion_ids.shape == rollout.logprobs.shape


SELECTIONS = {"slice": slice(1, 3), "indices": [3, 0], "mask": [True, True, False, True], "one": [1]}


@pytest.mark.parametrize("rows", SELECTIONS.values(), ids=SELECTIONS)
def test_a_selection_keeps_the_real_tokens_of_its_rows_and_no_column_of_padding(rows):
    chosen = rollout_of(ROWS, LOGPROBS, FINISHED, pad=99)[rows if isinstance(rows, slice) else torch.tensor(rows)]
    indices = torch.arange(4)[rows if isinstance(rows, slice) else torch.tensor(rows)].tolist()
    assert rows_of(chosen) == [(*ROWS[i], LOGPROBS[i], FINISHED[i]) for i in indices]
    assert_tight(chosen)


def test_concatenate_keeps_every_real_token_in_order():
    rollouts = [random_rollout(2, 0), random_rollout(3, 1), rollout_of([([1], [2])], [[-0.5]])]
    joined = concatenate(rollouts)
    assert rows_of(joined) == [row for rollout in rollouts for row in rows_of(rollout)]
    assert_tight(joined)


@pytest.mark.parametrize("group", [1, 3])
def test_prompts_and_completions_are_joined_without_a_gap(group):
    """Against lists; what stands beyond a completion's length is dropped, and padding is the pad id."""
    chance = random.Random(group)
    prompts = [[chance.randint(1, 50) for _ in range(n)] for n in (2, 17, 1)]
    completions = [[chance.randint(1, 50) for _ in range(5)] for _ in range(3 * group)]
    lengths = [chance.choice([1, 4, 5]) for _ in completions]
    made = torch.tensor(completions, device=DEVICE), torch.tensor(lengths, device=DEVICE), torch.zeros(3 * group, 5)
    rollout = make_rollout(SimpleNamespace(eos_ids=[1], pad_id=99), prompts, *(x.to(DEVICE) for x in made))
    rows = [prompts[i // group] + completions[i][: lengths[i]] for i in range(3 * group)]
    width = max(map(len, rows))
    assert rollout.ids.tolist() == [row + [99] * (width - len(row)) for row in rows]
    assert rollout.prompt_lengths.tolist() == [len(prompts[i // group]) for i in range(3 * group)]


def test_rows_of_a_batch_take_everything_along_and_lose_columns_of_padding():
    rollout = rollout_of(ROWS, LOGPROBS, FINISHED)
    values = {f.name: torch.randn(4, 4, device=DEVICE) for f in fields(Batch)[1:]}
    values["loss_mask"] = rollout.completion_mask
    part = Batch(rollout, **values)[torch.tensor([3, 0], device=DEVICE)]
    assert rows_of(part.rollout) == [(*ROWS[i], LOGPROBS[i], FINISHED[i]) for i in (3, 0)]
    for name, value in values.items():
        assert torch.equal(getattr(part, name), value[[3, 0], :3]), name
    bare = Batch(rollout, values["advantages"], values["loss_mask"])[torch.tensor([1], device=DEVICE)]
    assert bare.ref_logprobs is None and bare.values is None and bare.returns is None
    assert bare.advantages.shape == (1, 1)
