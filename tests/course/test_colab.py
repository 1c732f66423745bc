"""Installing the course on Colab replaces nothing that Colab ships."""

import importlib.metadata
import json
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
COLAB = json.loads((ROOT / "tests" / "colab.json").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    return PROJECT["dependencies"] + [r for extra in extras for r in PROJECT["optional-dependencies"][extra]]


def test_nothing_that_colab_ships_is_replaced(monkeypatch):
    assert replaced(dependencies("math")) == []
    assert COLAB["python"] in SpecifierSet(PROJECT["requires-python"])
    # What would be replaced is noticed, also where a dependency of a dependency asks for it.
    assert replaced(["datasets>=5"]) == ["datasets>=5 replaces datasets 4.0.0"]
    monkeypatch.setitem(COLAB["versions"], "torch", "1.0")
    assert any(line.startswith("torch") for line in replaced(["accelerate"]))
