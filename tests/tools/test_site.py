"""The site's sources: notebooks as they are, and docstrings as pages in which nothing is taken for markup."""

import importlib
import json
import pkgutil
import re

import pytest

import rlcourse
from rlcourse.course.contents import COURSE
from tools import site


def test_every_module_has_a_page_or_a_reason_not_to():
    """Machinery that a reader of the API does not call."""
    inside = {"cli", "cli_shared", "cli_tables", "__main__"}
    inside |= {"hub", "lab", "machine", "model_files", "openmp", "paths"}
    listed = {module for modules in site.API.values() for module in modules}
    modules = {module.name for module in pkgutil.iter_modules(rlcourse.__path__)}
    assert modules - inside == {name.split(".")[0] for name in listed}
    for name in listed:
        assert importlib.import_module(f"rlcourse.{name}").__doc__


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    site.write_sources(folder)
    return folder


def test_what_a_bet_is_about_is_hidden_until_asked_for(sources):
    for name in COURSE:
        cells = json.loads((sources / "notebooks" / f"{name}.ipynb").read_text())["cells"]
        hidden = ["hide-output" in cell["metadata"].get("tags", []) for cell in cells]
        texts = ["".join(cell["source"]) for cell in cells]
        for first, text in enumerate(texts):
            for bet in re.findall(r"^(\w+) = bet\(", text, re.M):
                [last] = [at for at, later in enumerate(texts) if f"{bet}.result(" in later]
                shown = [at for at in range(first + 1, last + 1) if cells[at].get("outputs")]
                assert shown and all(hidden[at] for at in shown), (name, bet)
