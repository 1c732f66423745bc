"""Installing the course on Colab replaces nothing that Colab ships."""

import importlib.metadata
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlcourse.course import BOOTSTRAP, REPOSITORY

ROOT = Path(__file__).resolve().parents[2]
COLAB = json.loads((ROOT / "tests" / "colab.json").read_text())


def replaced(requirements: list[str]) -> list[str]:
    """What would be replaced on Colab's image: `requirements`, and those of every package that comes in new.

    The requirements of a new package are those of the version installed here.
    """
    found, seen, queue = [], set(), [Requirement(text) for text in requirements]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        environment = {"python_version": COLAB["python"], "platform_system": "Linux", "extra": ""}
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        if name in COLAB["versions"]:
            if COLAB["versions"][name] not in requirement.specifier:
                found.append(f"{requirement} replaces {name} {COLAB['versions'][name]}")
        elif name not in seen:
            seen.add(name)
            try:
                queue += [Requirement(text) for text in importlib.metadata.requires(name) or []]
            except importlib.metadata.PackageNotFoundError:  # of another platform
                continue
    return found


def dependencies(*extras: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [r for extra in extras for r in project["optional-dependencies"][extra]]


def test_nothing_that_colab_ships_is_replaced():
    assert replaced(dependencies()) == []


def test_comparing_mathematics_replaces_nothing_either():
    assert replaced(dependencies("math")) == []


def test_a_dependency_that_is_too_new_is_noticed():
    assert replaced(["datasets>=5"]) == ["datasets>=5 replaces datasets 4.0.0"]


def test_a_dependency_of_a_dependency_is_noticed():
    """Today's trl wants a newer something than the oldest image, or does not: made certain with an older torch."""
    older = dict(COLAB["versions"], torch="1.0")
    versions, COLAB["versions"] = COLAB["versions"], older
    try:
        assert any(line.startswith("torch") for line in replaced(["accelerate"]))
    finally:
        COLAB["versions"] = versions


def test_the_python_of_colab_is_supported():
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert COLAB["python"] in SpecifierSet(project["requires-python"])


def test_the_first_cell_changes_nothing_where_the_course_is_installed(capsys):
    runnable = "\n".join("    pass" if line.lstrip().startswith("%") else line for line in BOOTSTRAP.split("\n"))
    exec(runnable.replace("    pass", "    raise AssertionError('it installs')"), {})
    assert "rlcourse" in capsys.readouterr().out
    assert "--no-deps" in BOOTSTRAP


def test_one_file_alone_holds_the_address_of_the_repository():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    address = re.compile(rf"github\.com/{REPOSITORY}|[\"']{REPOSITORY}[\"']")
    found = []
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".toml", ".yml", ".mjs", ".sh")
            and path.is_file()
            and address.search(path.read_text())
        ):
            found.append(name)
    assert found == ["rlcourse/course/start.py"]
