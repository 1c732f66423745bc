"""A text that cheats is refused by name before it runs, and a right one is not."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cheats import CHEATS
from texts import POINTWISE, ROW_KERNELS, pointwise_cute, pointwise_triton

from rlcourse.tasks.kernelbench import rules

NAMED = {name: cheat for name, cheat in CHEATS.items() if cheat.rule}


@pytest.mark.parametrize("name", NAMED)
def test_a_cheat_that_its_text_betrays_is_refused_by_name(name):
    reason, sentence = rules.check(NAMED[name].text)
    assert reason == NAMED[name].rule, sentence


@pytest.mark.parametrize("name", [name for name in CHEATS if name not in NAMED])
def test_other_cheats_are_left_to_measuring(name):
    assert rules.check(CHEATS[name].text) is None


def test_right_kernels_in_every_language_break_no_rule():
    texts = [pointwise_triton(POINTWISE["gelu"][1]), pointwise_cute("x * 2")]
    assert {rules.check(text) for text in [*texts, *ROW_KERNELS.values()]} == {None}


def test_threads_that_take_turns_while_they_parse_agree():
    """A collection of garbage in the middle of parsing lets another thread go on."""

    def take_turns(*_):
        time.sleep(1e-4)

    before = gc.get_threshold()
    gc.callbacks.append(take_turns)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(rules.check, [pointwise_triton(POINTWISE["gelu"][1])] * 24)) == {None}
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(take_turns)
