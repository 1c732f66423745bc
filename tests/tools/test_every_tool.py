"""Every tool can be started."""

import importlib
import pkgutil

import pytest

import tools


@pytest.mark.parametrize("name", [module.name for module in pkgutil.walk_packages(tools.__path__, "tools.")])
def test_it_can_be_imported(name):
    assert importlib.import_module(name).__doc__
