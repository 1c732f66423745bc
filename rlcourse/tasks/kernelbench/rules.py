"""What a candidate's text must not do: each cheat of the published lists has a name here. Measuring holds without these
rules (`judging`). They name what a text tries, keep Python's back doors shut, so that what the process notes of itself
can be believed, and save the time to run it."""

import ast
import re
import threading
from collections.abc import Iterator
from itertools import chain

PARSING = threading.Lock()  # CPython 3.11 counts the depth of all threads' parsing as one, and fails if they take turns
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
NO_CHEAT = ("no code", "syntax", "no ModelNew", "no kernel")
CHEATS = ("torch", "edited inputs", "late", "timer", "nonsense")  # what is found by running it
MODULES = {
    "torch", "torch.nn", "torch.nn.functional", "triton", "triton.language", "math",
    "typing", "cutlass", "cutlass.cute", "cutlass.cute.runtime", "cutlass.cutlass_dsl", "cutlass.torch",
    "cutlass.utils", "cuda.bindings.driver", "triton.language.extra.libdevice", "triton.language.extra",
}  # fmt: skip
NAMES = """eval exec compile __import__ getattr setattr delattr globals locals vars open input breakpoint memoryview
exit quit type dir id help object classmethod __builtins__ __loader__ __spec__"""
BUILTINS = set(NAMES.split())
OF_TORCH = """nn Tensor empty empty_like empty_strided zeros zeros_like ones ones_like full full_like no_grad
inference_mode float float16 bfloat16 float32 float64 half double int int8 int16 int32 int64 long uint8 bool dtype
device Size rand contiguous_format channels_last cuda autograd randn manual_seed tensor finfo iinfo strided"""
TORCH = set(OF_TORCH.split())
CUDA = {"current_stream", "current_device", "get_device_properties", "device", "is_available", "get_device_capability"}
BASES = {"nn.Module", "torch.nn.Module", "torch.autograd.Function", "NamedTuple", "typing.NamedTuple", "object"}
THREADS = {"threading", "multiprocessing", "concurrent", "asyncio", "_thread", "queue"}
PROCESSES = {"os", "subprocess", "socket", "signal", "ctypes", "shutil", "pathlib", "tempfile", "resource", "mmap"}
TIMERS = {"time", "timeit"}

Broken = tuple[str, str]  # a rule that a text breaks: its name, and a sentence


def parse_answer(text: str) -> str | None:
    """The code in the last fenced block of a completion; None if there is none."""
    blocks = FENCE.findall(text.replace("\r\n", "\n"))
    return blocks[-1] if blocks else None


def parse(source: str) -> ast.Module:
    """`ast.parse` for the judge's threads, one at a time."""
    with PARSING:
        return ast.parse(source)


def check(code: str) -> Broken | None:
    """The first rule that a text breaks; None for a text that may run."""
    try:
        tree = parse(code)
        parts = list(ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return "syntax", str(error)[:300]
    if broken := next(chain.from_iterable(map(broken_by, parts)), None):
        return broken
    if not any(isinstance(part, ast.ClassDef) and part.name == "ModelNew" for part in tree.body):
        return "no ModelNew", "there is no class ModelNew"
    decorators = [d for part in parts if isinstance(part, ast.FunctionDef) for d in part.decorator_list]
    if not any(ast.unparse(d).startswith(("triton.jit", "cute.kernel")) for d in decorators):
        return "no kernel", "no kernel is defined: neither Triton nor CuTe DSL"
    return None


def broken_by(part: ast.AST) -> Iterator[Broken]:
    match part:
        case ast.Import(names=names):
            for name in names:
                yield from imported(name.name)
        case ast.ImportFrom(module=module, names=names):
            yield from imported(module or ".")
            for name in names:
                yield from attribute(f"{module}.{name.name}", name.name)
        case ast.Try() | ast.TryStar():
            yield "fallback", "try: what fails must fail, not fall back to something else"
        case ast.ClassDef(bases=bases):
            for base in map(ast.unparse, bases):
                if base.endswith("Tensor"):
                    yield "lazy", "a class of tensors of one's own may put its work off"
                elif base not in BASES:
                    yield "inherits", f"a class may not inherit from {base}"
        case ast.Name(id=name) if name in BUILTINS or (name.startswith("__") and name != "__name__"):
            yield "python", f"{name} is not allowed"
        case ast.Attribute():
            yield from attribute(ast.unparse(part), part.attr)
            if isinstance(part.ctx, ast.Store | ast.Del) and not ast.unparse(part.value).startswith(("self", "ctx")):
                yield "patch", f"{ast.unparse(part)} is changed, which is not the model's own"
        case ast.BinOp(op=ast.MatMult()):
            yield "torch", "the @ of torch is not allowed in place of a kernel"
        case ast.Global() | ast.Nonlocal():
            yield "cache", "global: a pass must not leave anything for the next one"
        case ast.FunctionDef(decorator_list=decorators):
            if any("torch.compile" in (text := ast.unparse(d)) or "torch.jit" in text for d in decorators):
                yield "torch", "PyTorch's compilers are not allowed in place of a kernel"


def imported(name: str) -> Iterator[Broken]:
    root = name.split(".")[0]
    for roots, reason in ((THREADS, "thread"), (PROCESSES, "process"), (TIMERS, "timer")):
        if root in roots or name == f"torch.{root}":
            yield reason, f"import {name} is not allowed"
    if name not in MODULES and name != "cuda.bindings":
        yield "import", f"import {name} is not allowed: use torch, Triton, CuTe DSL and math"


def attribute(whole: str, last: str) -> Iterator[Broken]:
    """What breaks a rule in `a.b.c`; last: c."""
    if last.startswith("_") and last != "__init__" and not whole.startswith(("self._", "triton.language.")):
        yield "python", f"{whole} is not allowed: it leads out of the text"
    first, _, rest = whole.partition(".")
    if first in ("F", "functional") or whole.startswith(("torch.nn.functional.", "nn.functional.")):
        yield "torch", f"{whole} is PyTorch's own kernel"
    if first != "torch" or not re.fullmatch(r"[\w.]+", rest):  # what stands before a bracket is looked at by itself
        return
    names = rest.split(".")
    if names[0] == "cuda" and len(names) > 1 and names[1] not in CUDA:
        reason = {"Stream": "stream", "stream": "stream", "Event": "timer", "synchronize": "timer"}
        yield reason.get(names[1], "patch"), f"{whole} is not allowed"
    if names[0] not in TORCH:
        yield "torch", f"{whole} is not allowed: kernels of one's own compute"
