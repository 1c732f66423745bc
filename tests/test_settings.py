"""Each setting by itself: what its type, range or form lets through."""

import math
from dataclasses import fields

import pytest

from rlcourse.config import TrainConfig
from rlcourse.settings import field_type

FIELDS = {f.name: f for f in fields(TrainConfig)}
NUMBERS = [f for f in FIELDS.values() if field_type(f) in (int, float)]
NO_NUMBERS = [math.nan, math.inf, -math.inf, 1e30, -1e30, 10**400, "1", True, None, [1], 1j]
# Some bounds again, by hand: the largest and smallest that work, and the nearest beyond them.
BOUNDS = {
    "kl_coef": ([0, 1000], [-1e-9, 1001]),
    "temperature": ([0.01, 100], [0, 0.001, -1, 101]),
    "top_p": ([1e-9, 1], [0, -0.5, 1.01]),
    "clip_low": ([0, 1], [-0.1, 5]),
    "reward_format": ([-1000, 1000], [-1001, 1001]),
    "eval_validation": ([1, 10**9], [0, -3]),
    "pass_k": ([0, 1024], [-1, 1025]),
    "seed": ([0, 2**31 - 1], [-1, 2**31, 10**22]),
}


def refusal(**setting) -> str:
    """The sentence with which a setting is refused."""
    [name] = setting
    with pytest.raises(ValueError) as caught:
        TrainConfig.check_settings(setting)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} must be ") and sentence.endswith(".")
    assert "\n" not in sentence and len(sentence) < 200
    return sentence


@pytest.mark.parametrize("f", NUMBERS, ids=lambda f: f.name)
def test_a_number_has_a_range_and_is_one(f):
    assert f.metadata["within"]
    for value in NO_NUMBERS:
        if value is not None or f.default is not None:
            refusal(**{f.name: value})
    if field_type(f) is int:
        refusal(**{f.name: 2.0})


@pytest.mark.parametrize("name", BOUNDS)
def test_a_range_holds_its_ends_and_nothing_beyond(name):
    good, bad = BOUNDS[name]
    kind = field_type(FIELDS[name])
    for value in good:
        found = TrainConfig.check_settings({name: kind(value)})[name]
        assert found == value and type(found) is kind
    for value in bad:
        assert f"must be {FIELDS[name].metadata['within']}, not " in refusal(**{name: kind(value)})


@pytest.mark.parametrize("text", ["", "  ", "a\nb", "a\0b", "\x1b[31m", "\udcff", 7, True, ["x"]])
def test_a_text_is_one_that_can_be_printed(text):
    for name in ("model", "name"):
        refusal(**{name: text})


@pytest.mark.parametrize("name", ["../../x", "/x/y", "a/b", "..", ".", "a\\b", "x" * 201, "ü" * 101])
def test_the_name_of_a_run_stays_in_its_folder(name):
    assert "name must be that of a folder in --output" in refusal(name=name)
    for fine in ("my run", ".hidden", "ü", "x" * 200, "a..b"):
        assert TrainConfig.check_settings({"name": fine}) == {"name": fine}
