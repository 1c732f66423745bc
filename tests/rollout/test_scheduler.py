"""The scheduler, by a device that checks each entry that it reads: every completion ends with its own tokens."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import Device, Request, run
from thorough import thinned

from rlcourse.cuda_graphs import SMALLEST, halve
from rlcourse.rollout.blocks import BlockManager
from rlcourse.rollout.scheduler import Scheduler

BLOCK = 4


def ids(length: int, seed: int = 0) -> list[int]:
    """A prompt."""
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(length)]


def cache(usable: int, block_tokens: int = BLOCK) -> tuple[BlockManager, Device]:
    return BlockManager(usable + 1, block_tokens), Device(usable + 1, block_tokens)


@st.composite
def requests(draw) -> Request:
    """Prompts over two tokens, so that many begin alike."""
    prompts = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=4))
    num_generations, max_new_tokens = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    lengths = st.one_of(st.just(1), st.integers(1, max_new_tokens), st.just(max_new_tokens))
    number = len(prompts) * num_generations
    return Request(prompts, num_generations, max_new_tokens, draw(st.lists(lengths, min_size=number, max_size=number)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(requests(), st.sampled_from(["same", "update", "sleep"])), min_size=1, max_size=3),
    st.integers(0, 12),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0, 1, 3, 5]),
    st.sampled_from([1, 3, 7, 1000]),
    st.integers(0, 2**16),
)
def test_every_completion_ends_with_its_tokens(rollouts, spare, slots, every, late, prefill_tokens, seed):
    """Several rollouts over one cache, with its weights updated, or the cache given back, between them."""
    usable = spare + max(-(-(max(map(len, r.prompts)) + r.max_new_tokens - 1) // BLOCK) for r, _ in rollouts)
    version = 0
    blocks, device = cache(usable)
    for request, before in rollouts:
        version += before != "same"
        if before == "sleep":
            blocks, device = cache(usable)
        device.rng.seed(seed)
        run(blocks, device, request, version, slots, every, min(late, every), prefill_tokens)


@pytest.mark.parametrize("seed", thinned(range(120), 4))
def test_long_rollouts_in_little_memory(seed):
    """Larger ones than above, with several prompts that begin alike."""
    rng = random.Random(seed)
    beginning, new = ids(rng.choice([0, 8, 15])), rng.randint(2, 40)
    prompts = [beginning + ids(rng.randint(1, 16), rng.randint(0, 4)) for _ in range(rng.randint(1, 6))]
    generations = rng.randint(1, 8)
    lengths = [
        rng.choice([1, rng.randint(1, new), rng.randint(1, new), new]) for _ in range(len(prompts) * generations)
    ]
    usable = -(-(max(map(len, prompts)) + new - 1) // BLOCK)
    blocks, device = cache(usable + rng.choice([0, 1, 5, usable, 3 * usable]))
    every = rng.randint(1, 8)
    for version in (1, 1, 2):
        request = Request(prompts, generations, new, lengths)
        slots, late, tokens = rng.randint(1, 12), rng.randint(0, every), rng.choice([2, 9, 40, 1000])
        run(blocks, device, request, version, slots, every, late, tokens)
        rng.shuffle(lengths)
        rng.shuffle(prompts)


def test_a_known_prefix_is_not_computed_again_within_a_rollout_nor_in_the_next():
    """But for its last block where it is a whole prompt: without a token to compute there would be no logits."""
    blocks, device = cache(40)
    for begin in (0, 2 * BLOCK):
        run(blocks, device, Request([ids(3 * BLOCK, 1)], 3, 6, [6, 2, 4]))
        assert device.pieces == [(0, begin, 3 * BLOCK)]
    common = ids(2 * BLOCK)
    run(blocks, device, Request([[*common, 1], [*common, 2, 3]], 1, 3, [3, 3]))
    assert device.pieces == [(0, 0, 2 * BLOCK + 1), (1, 2 * BLOCK, 2 * BLOCK + 2)]
    for version, begin in ((0, BLOCK), (1, 0), (1, BLOCK)):  # but for an update of the weights
        run(blocks, device, Request([[*common[:BLOCK], 7]], 1, 3, [3]), version)
        assert device.pieces == [(0, begin, BLOCK + 1)]


@pytest.mark.parametrize("generations", [1, 3])
@pytest.mark.parametrize("prompt", [1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("new", [1, 2, BLOCK + 2])
def test_blocks_for_just_one_completion_are_enough(prompt, new, generations):
    """And one block less is refused before anything is done."""
    needed = -(-(prompt + new - 1) // BLOCK)
    blocks, device = cache(needed)
    request = Request([ids(prompt), ids(prompt, 1)], generations, new, [new, 1, new, new, 1, new][: 2 * generations])
    run(blocks, device, request, every=3)
    assert max(device.live, default=1) == 1 or prompt >= BLOCK
    with pytest.raises(ValueError, match=f"needs {needed} blocks of {BLOCK} tokens, and the cache has {needed - 1}"):
        Scheduler(cache(needed - 1)[0], request.prompts, generations, new, 8)


def test_one_that_shares_its_prompt_is_sent_back_and_ends_with_its_tokens():
    """Four of a group, blocks for the prompt and not for all four answers."""
    blocks, device = cache(9)
    request = Request([ids(2 * BLOCK + 1)], 4, 14, [14, 13, 14, 12])
    run(blocks, device, request)
    assert device.sent_back and 0 not in device.sent_back
    again = [piece for piece in device.pieces if piece[0] in device.sent_back]
    assert again and all(begin == 2 * BLOCK for _, begin, _ in again), "full blocks of the prompt are still there"


def test_one_that_starts_again_may_wait_a_step_for_its_slot():
    """A slot takes one that has ended, for a step, before it takes the one that starts again with all tokens but a few:
    so the host must not reckon that it has them all. One of 100,000 random rollouts."""
    lengths = [9, 9, 8, 9, 2, 9, 3, 9, 3, 2, 2, 2, 1, 9, 3, 9, 1, 1, 3, 3, 9, 2, 9, 2]
    blocks, device = cache(11, 2)
    run(blocks, device, Request([[1], [1, 3, 2], [3, 3]], 8, 9, lengths), slots=2, every=5, late=5)


def test_a_long_prompt_is_prefilled_in_pieces_while_others_decode():
    blocks, device = cache(40)
    run(blocks, device, Request([ids(2), ids(30, 1)], 1, 12, [12, 12]), every=2, prefill_tokens=8)
    assert device.pieces == [(0, 0, 2), (1, 0, 6), (1, 6, 14), (1, 14, 22), (1, 22, 30)]
    assert device.live[:6] == [1] * 6 and device.live[6] == 2


@pytest.mark.parametrize(("every", "late"), [(4, 0), (4, 4), (16, 1)])
def test_no_step_is_done_after_the_longest_that_can_be(every, late):
    """All take the whole limit: the host knows without looking when they end."""
    for completions, steps in ((8, 21), (16, 42)):
        blocks, device = cache(200)
        run(blocks, device, Request([ids(3)], completions, 22, [22] * completions), 0, 8, every, late)
        assert device.live == [8] * steps


@pytest.mark.parametrize("new", [9, 24])
def test_nobody_is_sent_back_where_slots_and_prompts_have_blocks_for_full_lengths(new):
    """As the GPU engine has them without a budget: 60 completions of full length, six slots. No prompt is prefilled
    again, and slots that nobody waits for idle until the host looks, no longer."""
    prompts = [ids(3, seed) for seed in range(2)]
    blocks, device = cache(6 * -(-(3 + new) // BLOCK) + 2)
    run(blocks, device, Request(prompts, 30, new, [new] * 60), slots=6, every=4)
    assert not device.sent_back and len(device.pieces) == len(prompts)
    assert 10 * (new - 1) <= len(device.live) <= 10 * (new - 1 + 4)


def test_a_batch_is_halved():
    assert [halve(256, live) for live in (256, 129, 128, 65, 20, 3, 1)] == [256, 256, 128, 128, 32, 8, 8]
    assert [halve(5, live) for live in (5, 1)] == [5, 5] and halve(9, 1) == 4 < SMALLEST


# What it must not do for nothing: no answer would change, so the device cannot notice


def test_slots_are_sorted_only_when_fewer_are_decoded_and_a_row_is_sent_only_when_it_has_changed(monkeypatch):
    """In a rollout with blocks for all."""
    plans, schedule = [], Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self: plans.append(schedule(self)) or plans[-1])
    lengths = [30, *range(2, 30), 3, 3, 3]
    run(*cache(400), Request([[1, 2, 3], [4, 5]], 16, 30, lengths), slots=32)
    assert plans.pop() is None
    sizes, sent = [32, *(plan.size for plan in plans)], {}
    assert [plan.compact for plan in plans] == [after < before for before, after in pairwise(sizes)]
    assert sizes[-1] < sizes[1] == 32
    for plan in plans:
        assert all(row != sent.get(completion) for completion, row in plan.rows.items())
        sent |= plan.rows


@pytest.mark.parametrize(
    ("running", "available", "room"),
    [(3, 0, True), (4, 8, False), (4, 9, True), (7, 8, False), (7, 9, True), (8, 100, False)],
)
def test_a_completion_may_wait_with_blocks_that_none_in_a_slot_needs(running, available, room):
    """Of four slots, and as many completions ahead of them. Each has one block of the three of its full length."""
    scheduler = Scheduler(BlockManager(401, block_tokens=4), [[1]] * 40, 1, 9, num_slots=4, steps_between_looks=2)
    scheduler.tables = {completion: [completion + 1] for completion in range(running)}
    del scheduler.blocks.free_blocks[available:]
    assert scheduler._room_ahead() == room
