"""KernelBench's problems (Ouyang et al. 2025, arXiv:2502.10517), and others in its format: a text with a class `Model`,
`get_inputs()` and `get_init_inputs()`, here `question`, and a name, here `gold`. An answer is a text with a class
`ModelNew` that computes the same by kernels of its own."""

import ast
import hashlib
import re
import threading
from pathlib import Path

from rlcourse.hub import load_rows
from rlcourse.tasks.task import Problem

HUB = "ScalingIntelligence/KernelBench"
TEST_SHARE = 0.2
PARSING = threading.Lock()  # CPython 3.11 counts the depth of all threads' parsing as one, and fails if they take turns
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
PROMPT = """Write Triton kernels (functions under @triton.jit) that compute what this PyTorch module computes, faster.

```python
{source}
```

Answer with one block of Python code that defines `class ModelNew(nn.Module)` with the same `__init__` and `forward` \
arguments. Its `forward` may allocate tensors and change their view; everything else your kernels compute, for other \
batch sizes too.
"""


def load_problems(folder: str | None = None) -> tuple[list[Problem], list[Problem]]:
    """Level 1's problems to train on, 80%, and to test, 20% by a hash of the name, each sorted by number. folder: one
    that contains `level1/1_NAME.py` and so on, instead of the hub. Raises FileNotFoundError or ConnectionError."""
    if folder:
        level = Path(folder) / "level1"
        named = [(path, *path.stem.split("_", 1)) for path in level.glob("*_*.py")]
        found = [(int(number), name, path.read_text("utf-8")) for path, number, name in named if number.isdigit()]
        if not found:
            raise FileNotFoundError(f"There is no problem in {level}: expected level1/1_NAME.py.")
    else:
        rows = load_rows(HUB, "give a folder that contains level1/1_NAME.py", split="level_1")
        found = [(int(row["problem_id"]), row["name"], row["code"]) for row in rows]
    problems = [Problem(source, "", name) for _, name, source in sorted(found)]
    ordered = sorted(problems, key=lambda problem: hashlib.blake2b(problem.gold.encode()).digest())
    test = set(ordered[: round(TEST_SHARE * len(ordered))])
    return [p for p in problems if p not in test], [p for p in problems if p in test]


def parse_answer(text: str) -> str | None:
    """The code in the last fenced block of a completion; None if there is none."""
    blocks = FENCE.findall(text.replace("\r\n", "\n"))
    return blocks[-1] if blocks else None


def parse(source: str) -> ast.Module:
    """`ast.parse` for the judge's threads, one at a time."""
    with PARSING:
        return ast.parse(source)


def shapes(source: str) -> list[str]:
    """The problem's text without `Model`, to make inputs with; and if possible one for other shapes, with half of each
    integer that only `get_inputs` reads, usually `batch_size`, so that weights keep their shapes."""
    tree = parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == "Model")]
    whole = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            whole |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    read, elsewhere = set(), set()
    for node in parse(source).body:
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
