"""The task `kernels` with other rewards, for runs of lesson 14."""

from contextlib import suppress
from dataclasses import replace

from rlcourse.tasks import Judgement
from rlcourse.tasks.kernels.judge import CAP
from rlcourse.tasks.kernels.language import CompileError, Computation, parse_statement
from rlcourse.tasks.kernels.task import KernelProblem, KernelTask


class PartialTask(KernelTask):
    """The task with partial credit beside the reward: `share_stated`."""

    @property
    def metrics(self) -> dict[str, str]:
        return super().metrics | {"stated": ".1%"}

    def verdict(self, text: str, problem: KernelProblem, training: bool) -> Judgement:
        verdict, credit = super().verdict(text, problem, training), share_stated(text, problem.computation)
        return replace(verdict, metrics=verdict.metrics | {"stated": credit}, reward=verdict.reward + credit)


class RootTask(KernelTask):
    """The task with a right program paid by the square root of its speed-up: a gamble is worth less."""

    def verdict(self, text: str, problem: KernelProblem, training: bool) -> Judgement:
        verdict = super().verdict(text, problem, training)
        speedup = min(verdict.metrics["speedup"] or 0.0, CAP)
        return replace(verdict, reward=verdict.reward + speedup**0.5 - speedup)


def share_stated(text: str, computation: Computation) -> float:
    """Partial credit from 0 to 1: the share of the computation's lines that a program states in their place, whatever
    else is wrong. An extra statement counts as a missing line."""
    statements, stated = text.split(";")[:-1], 0
    for statement, asked in zip(statements, computation.lines, strict=False):
        with suppress(CompileError):
            stated += parse_statement(statement.split()).line == asked
    return stated / max(len(statements), len(computation.lines))
