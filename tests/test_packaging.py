"""Promises about the package as a whole: dependencies, imports, file sizes, what must not be in the repository."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rlcourse", "ptx_interpreter")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CONDA_NAMES = {"pytorch": "torch"}  # conda-forge's name: PyPI's
# Imported where asked for, or where a notebook runs.
OPTIONAL = {"math_verify", "cutlass", "tvm_ffi", "flashinfer", "trl", "vllm", "tensorboard", "wandb", "triton"}
OPTIONAL |= {"IPython"}
NOTEBOOKS = {"ipywidgets"}  # an extra: notebooks alone need it
BOUNDS = re.compile(r"([a-z0-9_-]+)>=([\d.]+),<([\d.]+)")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def bounds(requirements: list[str]) -> dict[str, tuple[str, str]]:
    matches = {requirement: BOUNDS.fullmatch(requirement.split(";")[0]) for requirement in requirements}
    unbounded = [requirement for requirement, match in matches.items() if match is None]
    assert not unbounded, f"without a lower and an upper bound: {unbounded}"
    return {match[1]: (match[2], match[3]) for match in matches.values()}


def tracked_files() -> list[Path]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in result.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_dependency_has_a_lower_and_an_upper_bound():
    metadata = project()
    requirements = metadata["dependencies"] + [r for extra in metadata["optional-dependencies"].values() for r in extra]
    for name, (lower, upper) in bounds(requirements).items():
        assert tuple(map(int, lower.split("."))) < tuple(map(int, upper.split("."))), name


def test_conda_environment_has_the_dependencies_of_pyproject():
    entries = re.findall(r"^  - ([^\s:]+)$", (ROOT / "environment.yml").read_text(), flags=re.MULTILINE)
    channels, python, libraries = entries[:2], entries[2], [entry for entry in entries[3:] if entry != "pip"]
    assert channels[0] == "conda-forge"
    assert python == "python" + project()["requires-python"]
    conda = {CONDA_NAMES.get(name, name): bound for name, bound in bounds(libraries).items()}
    assert conda == bounds(project()["dependencies"])


def third_party_imports(paths: list[Path]) -> dict[str, str]:
    """The top-level packages that these files import, each with a file that does."""
    imported = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            imported |= {name.split(".")[0]: path.name for name in names}
    return {name: path for name, path in imported.items() if name not in sys.stdlib_module_names}


def test_every_import_is_a_declared_dependency():
    imported = third_party_imports(MODULES)
    third_party = imported.keys() - set(PACKAGES) - OPTIONAL - NOTEBOOKS
    undeclared = {name: imported[name] for name in third_party - bounds(project()["dependencies"]).keys()}
    assert third_party and not undeclared


def test_no_modules_import_each_other_in_a_circle():
    """Within functions and for types alone, too."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in MODULES}
    graph = {}
    for name, path in names.items():
        found = graph.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "imports are absolute"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner if inner <= names.keys() else inner | {node.module}
    graph = {name: found & names.keys() - {name} for name, found in graph.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_the_ptx_interpreter_needs_nothing_but_numpy():
    imported = third_party_imports([path for path in MODULES if ROOT / "ptx_interpreter" in path.parents])
    assert imported.keys() == {"ptx_interpreter", "numpy"}


def test_a_wheel_has_both_packages_and_every_command_is_there():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == list(PACKAGES)
    for target in settings["project"]["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_no_tracked_file_names_a_folder_of_somebodys_machine():
    private = re.compile(r"(?<![\w.~/-])/(home|Users|root|tmp|work|workspace|mnt)/[\w*]|[A-Z]:\\Users")
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{i}" for i, line in enumerate(lines, 1) if private.search(line)]
    assert found == []


def test_light_modules_import_neither_torch_nor_transformers():
    light = "rlcourse.cli, rlcourse.doctor, rlcourse.course"
    code = f"import sys, {light}; print(sorted({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
