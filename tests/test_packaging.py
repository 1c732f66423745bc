"""Promises about the package as a whole: dependencies, imports, file sizes, what must not be in the repository."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "rlcourse").rglob("*.py"))
CONDA_NAMES = {"pytorch": "torch"}  # conda-forge's name: PyPI's
# Imported where asked for, or where a notebook runs.
OPTIONAL = {
    "math_verify",
    "cutlass",
    "tvm_ffi",
    "flashinfer",
    "trl",
    "vllm",
    "tensorboard",
    "wandb",
    "triton",
    "IPython",
}
NOTEBOOKS = {"jupytext", "nbclient", "nbformat", "ipywidgets", "PIL"}  # extras: notebooks alone need them
BOUNDS = re.compile(r"([a-z0-9_-]+)>=([\d.]+),<([\d.]+)")
# Who may import the course: the command line, and benchmarks of the kernels that the lessons build.
KNOWS_THE_COURSE = {"rlcourse.cli", "rlcourse.bench.cute", "rlcourse.bench.layer", "rlcourse.bench.story"}


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


def test_every_import_is_a_declared_dependency():
    imported = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            imported |= {name.split(".")[0]: path.name for name in names}
    third_party = imported.keys() - set(sys.stdlib_module_names) - {"rlcourse"} - OPTIONAL - NOTEBOOKS
    undeclared = {name: imported[name] for name in third_party - bounds(project()["dependencies"]).keys()}
    assert third_party and not undeclared


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports() -> dict[str, set[str]]:
    """{module: the modules of this package that it imports}, at its top or in a function, not for type checkers.

    An import of `a.b` runs `a` as well, unless the importer stands in `a`.
    """
    known = {module_name(path): path for path in MODULES}
    found = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                node.body = []
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} has an import that is relative"
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inside & known.keys()
                if inside - known.keys():
                    names.add(node.module)
        for name in list(names):
            parts = name.split(".")
            outer = {".".join(parts[:n]) for n in range(1, len(parts))}
            names |= {package for package in outer if not f"{module}.".startswith(f"{package}.")}
        found[module] = names & known.keys() - {module}
    return found


def test_no_import_goes_round_in_a_circle():
    graph = imports()

    def reached(start: str) -> set[str]:
        seen, queue = set(), [start]
        while queue:
            new = graph[queue.pop()] - seen
            seen |= new
            queue += new
        return seen

    from_each = {module: reached(module) for module in graph}
    circles = {tuple(sorted(m for m in seen if module in from_each[m])) for module, seen in from_each.items()}
    assert circles == {()}


def test_nothing_outside_the_course_imports_it_but_what_is_about_it():
    found = {
        module
        for module, names in imports().items()
        if not f"{module}.".startswith("rlcourse.course.")
        and any(f"{name}.".startswith("rlcourse.course.") for name in names)
    }
    assert found <= KNOWS_THE_COURSE


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


@pytest.mark.parametrize("module", ["rlcourse", "rlcourse.cli", "rlcourse.measure.doctor"])
def test_light_modules_import_neither_torch_nor_transformers(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
