"""The checks of lesson 08 pass what is right, kill what is wrong, and name the mistake. Kernels are broken in their
source: in the master of the exercises, where the solution stands."""

import functools
import importlib
import itertools
import math
import sys

import pytest
import torch
from answers import common_tests
from thorough import thinned

from rlcourse.course.checks import Maker
from rlcourse.course.checks.nb08 import KERNELS, QUESTIONS
from rlcourse.course.dev.build import ROOT


def by_divmod(shape, stride):
    found = []
    for k in range(math.prod(shape)):
        total = 0
        for size, step in zip(shape, stride, strict=True):
            k, i = divmod(k, size)
            total += i * step
        found.append(total)
    return torch.tensor(found)


def by_strided(shape, stride):
    last = sum((n - 1) * d for n, d in zip(shape, stride, strict=True))
    return torch.arange(last + 1).as_strided(shape[::-1], stride[::-1]).flatten()


def by_product(shape, stride):
    """Last mode fastest, which is wrong."""
    every = itertools.product(*map(range, shape))
    return torch.tensor([sum(i * d for i, d in zip(c, stride, strict=True)) for c in every])


def sectors_by_sorting(addresses, size, active):
    found = torch.where(active, addresses // 32, -1).sort(dim=1).values
    new = torch.ones_like(found, dtype=torch.bool)
    new[:, 1:] = found[:, 1:] != found[:, :-1]
    return (new & (found >= 0)).sum(1)


def sectors_by_sets(addresses, size, active):
    pairs = zip(addresses.tolist(), active.tolist(), strict=True)
    return torch.tensor([len({a // 32 for a, on in zip(w, o, strict=True) if on}) for w, o in pairs])


def dealt(hidden, lanes, vector):
    rounds = math.ceil(hidden / (lanes * vector))
    found = torch.arange(rounds * lanes * vector).view(rounds, lanes, vector).transpose(0, 1).flatten(1)
    return found.masked_fill(found >= hidden, -1)


def dealt_in_loops(hidden, lanes, vector):
    rounds = -(-hidden // (lanes * vector))
    found = torch.full((lanes, rounds * vector), -1)
    for lane, i, v in itertools.product(range(lanes), range(rounds), range(vector)):
        element = (i * lanes + lane) * vector + v
        if element < hidden:
            found[lane, i * vector + v] = element
    return found


def padded(hidden, lanes, vector):
    return dealt(-(-hidden // (lanes * vector)) * lanes * vector, lanes, vector)


def stretches(hidden, lanes, vector):
    rounds = -(-hidden // (lanes * vector))
    found = torch.arange(rounds * lanes * vector).view(lanes, -1)
    return found.masked_fill(found >= hidden, -1)


def singles(hidden, lanes, vector):
    rounds = -(-hidden // (lanes * vector))
    found = torch.arange(rounds * lanes * vector).view(-1, lanes).T
    return found.masked_fill(found >= hidden, -1)


RIGHT = {
    "q1": [by_divmod, by_strided],
    "q2": [sectors_by_sorting, sectors_by_sets],
    "q3": [dealt, dealt_in_loops],
}
WRONG = {
    "q1": {
        "last mode fastest": by_product,
        "no strides": lambda shape, stride: torch.arange(math.prod(shape)),
        "strides reversed": lambda shape, stride: by_divmod(shape, stride[::-1]),
        "as a matrix": lambda shape, stride: by_divmod(shape, stride).view(shape),
        "one too many": lambda shape, stride: by_divmod(shape, stride) + 1,
    },
    "q2": {
        "inactive lanes too": lambda a, size, on: sectors_by_sets(a, size, on | True),
        "bytes over 32": lambda a, size, on: -(-on.sum(1) * size // 32),
        "span": lambda a, size, on: -(-(a.amax(1) + size - a.amin(1)) // 32),
        "lanes": lambda a, size, on: on.sum(1),
        "lines": lambda a, size, on: sectors_by_sets(a // 4, size, on),
        "in bytes": lambda a, size, on: 32 * sectors_by_sets(a, size, on),
        "all warps as one": lambda a, size, on: torch.tensor([len(torch.unique(a[on] // 32))]),
    },
    "q3": {
        "stretches": stretches,
        "single elements": singles,
        "no end": padded,
        "transposed": lambda *sizes: dealt(*sizes).T,
        "cut short": lambda hidden, lanes, vector: dealt(hidden // (lanes * vector) * lanes * vector, lanes, vector),
        "zeros behind the end": lambda *sizes: dealt(*sizes).clamp(min=0),
    },
}
NAMED = {
    ("q1", "last mode fastest"): "last mode runs fastest",
    ("q1", "no strides"): "left the strides out",
    ("q1", "strides reversed"): "wrong order",
    ("q2", "inactive lanes too"): "not active",
    ("q2", "bytes over 32"): "divided the bytes",
    ("q2", "span"): "distance from the first byte",
    ("q2", "lanes"): "counted the lanes",
    ("q2", "lines"): "lines of 128",
    ("q2", "in bytes"): "counted bytes",
    ("q3", "stretches"): "one long stretch",
    ("q3", "single elements"): "single elements",
    ("q3", "no end"): "must be -1",
    ("q3", "transposed"): "[values, lanes]",
}

ADD_UP = """\
                if thread == 0:
                    everything = Float32(0.0)
                    for warp in range_constexpr(4):
                        everything += shares[warp]
                    y[row] = cute.math.sqrt(everything)
"""
EVERY_LANE = """\
                if thread < 32:
                    mine = Float32(0.0)
                    if thread < 4:
                        mine = shares[thread]
                    mine = cute.arch.warp_reduction_sum(mine)
                    if thread == 0:
                        y[row] = cute.math.sqrt(mine)
"""
BARRIER = "                cute.arch.sync_threads()\n"
LAST = "                cute.arch.sync_threads()  # the next row writes shares again\n"
RELU = "wide = wide if wide > 0.0 else Float32(0.0)"
COPY = "cute.autovec_copy(cute.tiled_divide(gate, (8,))[None, first // 8], g)"
FIRST = """\
            for i in range_constexpr(8):
                wide = g[i].to(Float32)
"""
FIRST_WITH_MORE = """\
            more = cute.make_rmem_tensor(8, out.element_type)
            cute.autovec_copy(cute.tiled_divide(gate, (8,))[None, 0], more)
            for i in range_constexpr(8):
                wide = g[i].to(Float32) + more[i].to(Float32) * 0.0
"""
EDITS = {  # question: name: (what stands in the solution, what is put there, what the card must say; None: it is right)
    "q4": {
        "as it is": ("", "", None),
        "another order": ("(wide * wide * u[i].to(Float32))", "(u[i].to(Float32) * wide * wide)", None),
        "no tail": ("if first + 8 <= gate.shape[0]:", "if first < gate.shape[0]:", "beyond a tensor"),
        "tail one too far": ("if first + i < gate.shape[0]:", "if first + i <= gate.shape[0]:", "beyond a tensor"),
        "tail left out": ("if first + i < gate.shape[0]:", "if first + i < 0:", "never written"),
        "no relu": (RELU, "wide = wide", "forgot the relu"),
        "no square": ("(wide * wide * u[i]", "(wide * u[i]", "forgot the square"),
        "rounds on the way": (
            "(wide * wide * u[i].to(Float32))",
            "((wide * wide).to(out.element_type).to(Float32) * u[i].to(Float32))",
            "rounded to bfloat16 on the way",
        ),
        "one value at a time": (
            COPY,
            "for k in range_constexpr(8):\n                g[k] = gate[first + k]",
            "bytes at once",
        ),
        "up for the gate": (COPY, COPY.replace("gate", "up"), ""),
        "loads more than it needs": (FIRST, FIRST_WITH_MORE, "load each number once"),
    },
    "q5": {
        "as it is": ("", "", None),
        "a warp adds the shares": (ADD_UP, EVERY_LANE, None),
        "no first barrier": (
            BARRIER + "                if thread == 0",
            "                if thread == 0",
            "no barrier stands",
        ),
        "no second barrier": (LAST, "", "written again before"),
        "barrier for some": (
            "                    everything = ",
            "                    cute.arch.sync_threads()\n                    everything = ",
            "never come",
        ),
        "no guard": ("if row < x.shape[0]:", "if row <= x.shape[0]:", "beyond a tensor"),
        "no root": ("cute.math.sqrt(everything)", "everything", "forgot the root"),
        "a mean": ("cute.math.sqrt(everything)", "cute.math.sqrt(everything / 512.0)", "root mean square"),
        "first warp alone": (
            "for warp in range_constexpr(4):\n                        e",
            "for warp in range_constexpr(1):\n                        e",
            "first warp's share",
        ),
        "no shuffle": ("total = cute.arch.warp_reduction_sum(total)", "total = total", "lane 0's own"),
        "one row": ("for turn in range_constexpr(2)", "for turn in range_constexpr(1)", "never written"),
        "too few shares": (
            "range_constexpr(4):\n                        e",
            "range_constexpr(5):\n                        e",
            "beyond a tensor",
        ),
    },
}

test_right_answers_pass, test_wrong_answers_are_killed, test_the_mistake_is_named, test_a_hole_shows_the_hint = (
    common_tests(QUESTIONS | KERNELS, RIGHT, WRONG, NAMED)
)


@functools.cache
def solution(question: str) -> str:
    """The cell of the master that holds a kernel's solution, and what it imports."""
    cells = (ROOT / "exercises" / "_src" / "08_first_kernels.py").read_text().split("\n# %%")
    name = KERNELS[question].function
    (cell,) = [cell for cell in cells if f"class {name}:" in cell]
    imports = "from dataclasses import dataclass\nfrom rlcourse.kernels.dsl import Float32, cute, range_constexpr\n"
    return imports + "from rlcourse.kernels.toolchain import Argument\n" + cell.partition("\n")[2]


def kernel_from(source: str, name: str, folder, monkeypatch):
    """A kernel's class from its source, which CuTe DSL reads from a file."""
    module = f"kernel_{folder.name}"
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    "question, name", thinned([(q, name) for q, found in EDITS.items() for name in found], every=9)
)
def test_kernels_with_one_mistake_are_killed_and_others_pass(question, name, tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    old, new, said = EDITS[question][name]
    source = solution(question)
    assert old in source, "this mistake can no longer be made: write another one"
    asked = KERNELS[question]
    result = asked.run(Maker(kernel_from(source.replace(old, new, 1), asked.function, tmp_path, monkeypatch)), seed=0)
    assert result.passed == (said is None), repr(result)
    messages = [case.message for case in result.cases if not case.passed]
    assert said is None or any(said in message for message in messages), messages


def test_a_kernel_with_a_hole_shows_the_hint_and_one_that_does_not_compile_says_why(tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    for question, asked in KERNELS.items():
        head = solution(question).partition("        # BEGIN SOLUTION")[0]
        for number, (line, said) in enumerate(
            [("raise NotImplementedError", "not implemented"), ("nothing()", "nothing")]
        ):
            folder = tmp_path / f"{question}_{number}"
            folder.mkdir()
            kernel = kernel_from(f"{head}        {line}\n", asked.function, folder, monkeypatch)
            result = asked.run(Maker(kernel), seed=0)
            assert all(said in case.message for case in result.cases), repr(result)
            assert (result.hint == asked.hint) == (number == 0)


def test_without_cute_dsl_the_card_says_what_to_install(monkeypatch):
    from rlcourse.kernels import dsl

    monkeypatch.setattr(dsl, "INSTALLED", False)

    class Kernel:
        threads = 32

        def arguments(self):
            from rlcourse.kernels.toolchain import Argument

            names = {"q4": ("bfloat16", 3), "q5": ("float32", 2)}[question]
            shapes = [("rows", 512), ("rows",)] if question == "q5" else [("n",)] * 3
            return tuple(Argument(f"t{i}", names[0], shape) for i, shape in enumerate(shapes))

    for question, asked in KERNELS.items():  # noqa: B007 - the class above looks at it
        result = asked.run(Maker(Kernel), seed=0)
        assert all("pip install" in case.message for case in result.cases), repr(result)
