"""What every notebook starts with: the bootstrap cell, the machine, the profile."""

import sys

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from rlcourse import __version__, course
from tools.notebooks.headers import BOOTSTRAP


def bootstrap() -> str:
    """The bootstrap cell as the Python that IPython makes of it."""
    return TransformerManager().transform_cell(BOOTSTRAP)


def test_the_bootstrap_cell_changes_nothing_where_the_package_is_installed(capsys):
    def get_ipython():
        raise AssertionError("no magic should run")

    exec(bootstrap(), {"get_ipython": get_ipython})
    assert capsys.readouterr().out.startswith(f"rlcourse {__version__} on ")


def test_elsewhere_it_installs_the_tag_without_replacing_anything(monkeypatch):
    installed = []

    class IPython:
        def run_line_magic(self, name, line):
            installed.append((name, line))

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(course, "start", lambda version: installed.append(version))
    exec(bootstrap(), {"get_ipython": IPython})
    [(magic, line), version] = installed
    assert magic == "pip" and version == __version__
    assert line.split()[:3] == ["install", "--quiet", "--no-deps"]
    assert line.endswith(f'"rlcourse @ git+https://github.com/{course.REPOSITORY}@v{__version__}"')


def test_a_notebook_of_another_version_says_what_to_install():
    with pytest.raises(RuntimeError, match=rf"belongs to rlcourse 9\.9, but {__version__} is installed: .*@v9\.9"):
        course.start("9.9")


@pytest.mark.parametrize(("value", "name", "picked"), [(None, "full", 60), ("smoke", "smoke", 2)])
def test_the_profile_is_full_unless_smoke_is_asked_for(value, name, picked, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["rlcourse.course.start"], "device_name", lambda: "CPU Test")
    monkeypatch.delenv("RLCOURSE_PROFILE", raising=False)
    if value:
        monkeypatch.setenv("RLCOURSE_PROFILE", value)
    assert course.profile() == name and course.pick(smoke=2, full=60) == picked
    course.start(__version__)
    assert capsys.readouterr().out == f"rlcourse {__version__} on CPU Test, profile {name}\n"
    monkeypatch.setenv("RLCOURSE_PROFILE", "Smoke")
    with pytest.raises(RuntimeError, match="Unknown RLCOURSE_PROFILE 'Smoke'"):
        course.profile()
