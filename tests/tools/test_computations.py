"""Which computations are posed, and how they are split."""

import random
from collections import Counter

import pytest

from rlcourse.tasks.kernels.clock import fits_one_launch
from rlcourse.tasks.kernels.language import Computation, Line, read_computation
from tools.embedded.computations import computations, is_posed, split_of


@pytest.fixture(scope="module")
def train():
    return computations(300, "train", 0, (2, 5))


@pytest.fixture(scope="module")
def test():
    return computations(120, "test", 0, (2, 5))


def renamed(computation, rng):
    """The same structure with other names for the inputs and the results."""
    inputs = dict(zip(computation.inputs, rng.sample("uvwx", len(computation.inputs)), strict=True))
    results = [line.name for line in computation.lines[:-1]]
    names = inputs | dict(zip(results, rng.sample("abcdef", len(results)), strict=True)) | {"y": "y"}
    lines = computation.lines
    return Computation(tuple(Line(names[line.name], line.op, tuple(names[a] for a in line.args)) for line in lines))


def test_all_have_their_length_end_in_y_and_read_every_line_and_input(train):
    lengths = Counter(len(computation.lines) for computation in train)
    assert set(lengths) == {2, 3, 4, 5} and min(lengths.values()) > 20
    for computation in train:
        names = [line.name for line in computation.lines]
        assert names[-1] == "y" and names[:-1] == sorted(set(names[:-1]))
        assert {arg for line in computation.lines for arg in line.args} == {*computation.inputs, *names[:-1]}


def test_a_line_that_could_be_left_out_is_not_posed():
    assert not is_posed(read_computation("a = abs u ; y = square a"))
    assert not is_posed(read_computation("a = exp u ; b = relu a ; y = add b v"))
    assert is_posed(read_computation("a = exp u ; b = relu v ; y = add b a"))


def test_what_cannot_be_compared_is_not_posed():
    assert not is_posed(read_computation("a = add u v ; y = sqrt a"))  # nan for half of the inputs
    assert not is_posed(read_computation("a = exp u ; b = square a ; y = square b"))  # beyond float32
    assert not is_posed(read_computation("a = rowsum u ; y = relu a"))  # no matrix
    assert not is_posed(read_computation("a = rowmax u ; b = sub u u ; y = add b v"))  # a is not needed


def test_splits_share_no_structure(train, test):
    rng = random.Random(0)
    for computation, split in [*((c, "train") for c in train[:100]), *((c, "test") for c in test)]:
        assert split_of(computation) == split
        assert split_of(renamed(computation, rng)) == split


def test_problems_are_distinct_and_the_same_each_time(train):
    assert len(set(train)) == len(train)
    assert train[:50] != computations(50, "train", 1, (2, 5))
    assert computations(50, "test", 4, (3, 4)) == computations(50, "test", 4, (3, 4))


def test_a_share_of_problems_does_not_fit_one_launch(train):
    some = computations(100, "train", 2, (2, 5), at_least_refused=0.4)
    assert sum(not fits_one_launch(computation) for computation in some) >= 40
    assert any(fits_one_launch(computation) for computation in some[-20:])  # and they are not all at the end
    assert 0.03 < sum(not fits_one_launch(computation) for computation in train) / len(train) < 0.25
