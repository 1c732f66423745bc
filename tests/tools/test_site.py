"""The site's sources: notebooks as they are, and docstrings as pages in which nothing is taken for markup."""

import importlib
import pkgutil

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


def test_every_lesson_is_in_the_sources_as_it_ships(tmp_path):
    site.write_sources(tmp_path)
    for name in COURSE:
        for kind in ("notebooks", "exercises", "solutions"):
            assert (tmp_path / kind / f"{name}.ipynb").read_bytes() == (site.ROOT / kind / f"{name}.ipynb").read_bytes()
