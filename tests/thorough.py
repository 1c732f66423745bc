"""Marks the cases that only `pytest -m thorough` runs: slow ones, and the rest of a grid whose core is in every run."""

import pytest


def thorough(case):
    """A case of a parametrised test that is left to `pytest -m thorough`."""
    return pytest.param(*case if isinstance(case, tuple) else [case], marks=pytest.mark.thorough)


def thinned(cases, every: int) -> list:
    """The cases of a parametrised test, all but one of `every` so many left to `pytest -m thorough`."""
    return [thorough(case) if i % every else case for i, case in enumerate(cases)]
