"""What the checks of lesson 08 do with a kernel."""

import torch
from torch import Tensor

import ptx_interpreter as ptx
from rlcourse.course.checks import Question, compare
from rlcourse.course.checks.kernels import SECONDS, Maker, execute


def check_kernel(f, inputs: dict[str, Tensor], expected: Tensor, mistakes: dict, size: str = "", **order) -> ptx.Report:
    """Run a kernel and compare its output, which is its last tensor, `out`, with what it should be."""
    out = torch.full(expected.shape, torch.nan, dtype=next(iter(inputs.values())).dtype)
    report = execute(f, inputs | {"out": out}, **order)
    where = f" for {size}" if size else ""
    if out.isnan().any():
        raise AssertionError(f"{int(out.isnan().sum())} of {out.numel()} elements of out were never written{where}")
    compare(out.float(), expected.float(), mistakes, what=f"out{where}")
    return report


def loads(report: ptx.Report) -> int:
    """Loads of global memory, each counted once for every warp that executes it."""
    return sum(access.warps for access in report.accesses.values() if access.text.startswith("ld"))


def puzzle(name: str, function: str, hint: str) -> Question:
    return Question(name, function, hint, seconds=SECONDS, caller=Maker)
