"""KernelBench's problems (Ouyang et al. 2025, arXiv:2502.10517), and others in its format.

A problem is a Python text with a class `Model`, `get_inputs()` and `get_init_inputs()`. An answer is a text with a
class `ModelNew` that computes the same by kernels of its own.
"""

import ast
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlcourse.hub import hub_or_cache

HUB = "ScalingIntelligence/KernelBench"
TEST_SHARE = 0.2
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    "triton": "Triton kernels (functions under @triton.jit)",
    "cuda": "CUDA kernels, compiled by torch.utils.cpp_extension.load_inline from plain strings",
    "cute": "CuTe DSL kernels (functions under @cute.kernel)",
    "cpp": "C++ functions, compiled by torch.utils.cpp_extension.load_inline from plain strings",
}
PROMPT = """Write {language} that compute what this PyTorch module computes, faster.

```python
{source}
```

Answer with one block of Python code that defines `class ModelNew(nn.Module)` with the same `__init__` and `forward` \
arguments. Its `forward` may allocate tensors and change their view; everything else your kernels compute, for other \
batch sizes too.
"""


@dataclass(frozen=True)
class Problem:
    """A problem of KernelBench. number: in its level, from 1."""

    name: str
    level: int
    number: int
    source: str

    @property
    def question(self) -> str:
        return self.source

    @property
    def gold(self) -> str:
        return self.name

    def prompt(self, language: str = "triton") -> str:
        return PROMPT.format(language=LANGUAGES[language], source=self.source.strip())


def load_problems(
    source: str = HUB, level: int = 1, numbers: Iterable[int] | None = None, split: str | None = None
) -> list[Problem]:
    """The problems of a level, by number.

    source: a name on the hub, or a folder with `level1/1_NAME.py` and so on, as KernelBench's repository has it.
    numbers: only these. split: "train" or "test", 80 and 20 percent by a hash of the name, the same everywhere.

    Raises FileNotFoundError or ValueError in one sentence for a folder or a split that cannot be used, ConnectionError
    where the hub cannot be read.
    """
    found = from_folder(Path(source), level) if Path(source).is_dir() else from_hub(source, level)
    if not found:
        raise FileNotFoundError(f"{source} has no problems of level {level}.")
    if split is not None:
        found = part(found, split)
    wanted = None if numbers is None else set(numbers)
    found = [problem for problem in found if wanted is None or problem.number in wanted]
    return sorted(found, key=lambda problem: problem.number)


def from_folder(folder: Path, level: int) -> list[Problem]:
    if not (folder / f"level{level}").is_dir():
        raise FileNotFoundError(f"There is no folder {folder / f'level{level}'}: expected level{level}/1_NAME.py.")
    found = []
    for path in (folder / f"level{level}").glob("*.py"):
        number, _, name = path.stem.partition("_")
        if number.isdigit():
            found.append(Problem(name, level, int(number), path.read_text(encoding="utf-8")))
    return found


def from_hub(name: str, level: int) -> list[Problem]:
    import datasets

    try:
        with hub_or_cache():
            rows = datasets.load_dataset(name, split=f"level_{level}")
    except Exception as error:  # without a network it may be any of a dozen, from three libraries
        raise ConnectionError(
            f"{name} could not be loaded from the Hugging Face hub ({type(error).__name__}): check the name, the level "
            f"and the network, or give a folder that holds level{level}/1_NAME.py."
        ) from error
    return [Problem(row["name"], level, int(row["problem_id"]), row["code"]) for row in rows]


def part(problems: list[Problem], split: str) -> list[Problem]:
    """The problems of "train" or "test": those with the smallest hashes are the test."""
    if split not in ("train", "test"):
        raise ValueError(f"There is no split {split!r}: use train or test.")
    ordered = sorted(problems, key=lambda problem: hashlib.blake2b(problem.name.encode()).digest())
    test = round(TEST_SHARE * len(problems))
    return ordered[:test] if split == "test" else ordered[test:]


def parse_answer(text: str) -> str | None:
    """The code in the last fenced block of a completion; None if there is none."""
    blocks = FENCE.findall(text.replace("\r\n", "\n"))
    return blocks[-1] if blocks else None


def shapes(source: str) -> list[str]:
    """The problem's text, and where possible one with other shapes: what a candidate makes its inputs with.

    The class `Model` is left out. Other shapes come from halving the whole numbers that `get_inputs` reads and nothing
    else does, so that weights keep theirs: `batch_size`, as a rule.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == "Model")]
    whole = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            whole |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    read, elsewhere = set(), set()
    for node in ast.parse(source).body:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
        if isinstance(node, ast.FunctionDef) and node.name == "get_inputs":
            read |= names
        else:
            elsewhere |= names
    found = [ast.unparse(tree)]
    changed = [whole[name] for name in (read - elsewhere) & whole.keys() if whole[name].value.value >= 2]
    for node in changed:
        node.value.value //= 2
    return [*found, ast.unparse(tree)] if changed else found
