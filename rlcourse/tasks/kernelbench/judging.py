"""Judge a completion: is it code, is it allowed, does it compile, is it right, how fast is it. The judge keeps inputs,
references and the clock; the candidate's process gets a seed and returns outputs. Its own events time a pass on the
GPU, but count for no less than the judge's clock minus the time of a trial without a model."""

import ast
import functools
import itertools
import math
import random
import statistics
import threading
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rlcourse.sandbox.process import GUARD
from rlcourse.tasks.kernelbench import rules
from rlcourse.tasks.kernelbench.candidate import SMALL, UNREADABLE, Candidate, Refused, alone, bandwidth, new_seed, way
from rlcourse.tasks.kernelbench.cases import KINDS, chunk_size, digest, make_inputs, make_model, namespace
from rlcourse.tasks.kernelbench.compare import Expected, expect, fault, some_chunks
from rlcourse.tasks.task import Problem

# What torch may do in a forward pass: allocate, view, move.
ALLOWED = """empty empty_like empty_strided new_empty new_empty_strided new_zeros new_ones new_full zeros zeros_like
ones ones_like full full_like fill_ zero_ view _unsafe_view reshape alias as_strided detach clone copy_ _to_copy t
transpose permute expand slice select squeeze unsqueeze unbind split view_as is_pinned set_ _local_scalar_dense
lift_fresh"""
OPERATIONS = frozenset(ALLOWED.split())
COMPILED, CORRECT, MOST_SPEEDUP = 0.1, 0.3, 5.0  # reward for compiling, for being right, and for speed at most
CHECKS = 10  # of timed trials whose outputs are compared; nobody knows which
WARMUP = 3
LEAST_TRIALS = 5
LEEWAY = 5e-3  # seconds that a process's own clock may be short of the one out here without being called a lie


@dataclass(frozen=True)
class Settings:
    """cases: checked trials per shape and kind of inputs. trials: timed ones, fewer if they take more than
    `timing_seconds`. Triton and CuTe DSL compile in the first pass."""

    cases: int = 2
    trials: int = 100
    compile_seconds: float = 240.0
    first_seconds: float = 90.0
    run_seconds: float = 20.0
    timing_seconds: float = 30.0
    memory_bytes: int = 8 << 30
    gpu_bytes: int = 24 << 30


@dataclass
class Verdict:
    """reason: "" for a right candidate, else what is wrong, as a name; text: details. Times are in milliseconds."""

    reason: str = ""
    text: str = ""
    metrics: dict[str, float] = field(default_factory=lambda: {"compiled": 0.0, "correct": 0.0, "refused": 0.0})

    @property
    def reward(self) -> float:
        """0 for a cheat, else COMPILED · compiled + correct · (CORRECT + speed-up, up to MOST_SPEEDUP)."""
        if self.metrics["refused"]:
            return 0.0
        speed = min(self.metrics.get("speedup", 0.0), MOST_SPEEDUP)
        return COMPILED * self.metrics["compiled"] + self.metrics["correct"] * (CORRECT + speed)


class Times(NamedTuple):
    """Median seconds per trial, by the process's own events and by the judge's clock."""

    own: float
    outside: float


class Judge:
    """The judge of one problem. PyTorch is timed before the first candidate, in a process like a candidate's. Raises
    ValueError for a problem that a constant or an input solves."""

    def __init__(self, problem: Problem, settings: Settings, device: torch.device | None = None):
        self.problem, self.settings = problem, settings
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.way, why = way()
        if self.way == GUARD:
            warnings.warn(f"Kernels run as your own user here, with your files and your network: {why}", stacklevel=2)
        self.sources = shapes(problem.question)
        self.reference = namespace(problem.question)
        self.problems = [namespace(source) for source in self.sources]
        with alone(self.device):
            self.telling = self._telling()
        if not any(shape == 0 for shape, _ in self.telling):
            raise ValueError(f"{problem.gold}: a constant or an input solves this problem, so it tells nothing.")
        self.baselines: dict[str, Times] = {}  # of "eager" and "empty", a trial without a model

    def judge(self, text: str) -> Verdict:
        code = rules.parse_answer(text)
        refused = rules.check(code) if code is not None else ("no code", "there is no fenced block of code")
        if refused is None:
            return self.run(code)
        verdict = Verdict(*refused)
        verdict.metrics["refused"] = float(refused[0] not in rules.NO_CHEAT)
        return verdict

    def run(self, code: str) -> Verdict:
        """The verdict on code, whatever the rules say of its text."""
        if not self.baselines:  # else compiling would wait for others to be timed
            with alone(self.device):
                self._time_reference()  # fails early if this machine can't judge
        verdict = self._run(code, nullcontext(), alone(self.device))
        # GPU memory is counted for all processes together, so a candidate blamed for it gets a run on its own.
        return self._run(code, alone(self.device), nullcontext()) if verdict.reason == "gpu memory" else verdict

    def _run(self, code: str, throughout: AbstractContextManager, once_compiled: AbstractContextManager) -> Verdict:
        verdict = Verdict()
        try:
            with throughout, self._process() as candidate:
                try:
                    self._load(candidate, code, "ModelNew")
                except Refused as error:  # it never got to a pass
                    raise Refused("compile" if error.reason == "error" else error.reason, str(error)) from None
                with once_compiled:
                    candidate.watch_gpu()
                    try:  # the first pass, in which Triton and CuTe DSL compile
                        self._trial(candidate, 0, "timed", self.settings.first_seconds)
                    except Refused as error:
                        verdict.metrics["compiled"] = float(error.reason == "error")
                        raise
                    verdict.metrics["compiled"] = 1.0
                    least = self._correct(candidate, verdict)
                    self._fast(candidate, least, verdict)
        except Refused as error:
            verdict.reason, verdict.text = error.reason, str(error)
            verdict.metrics |= {"correct": 0.0, "refused": float(error.reason in rules.CHEATS)}
        return verdict

    def _time_reference(self) -> None:
        try:
            with self._process() as candidate:
                self._load(candidate, self.problem.question, "Model")
                self._trial(candidate, 0, "timed", self.settings.compile_seconds)
                self.baselines = {"eager": self._time(candidate, "timed"), "empty": self._time(candidate, "empty")}
        except Refused as error:
            raise RuntimeError(f"{self.problem.gold} itself does not run: {error.reason}: {error}") from None

    def _process(self) -> Candidate:
        return Candidate(self.way, self.device, self.settings.memory_bytes, self.settings.gpu_bytes)

    def _telling(self) -> list[tuple[int, str]]:
        """(shape, kind) of the inputs on which the reference is finite and no guess passes."""
        reference, found = make_model(self.reference, "Model", self.reference, 0, self.device), []
        for shape, kind in itertools.product(range(len(self.problems)), KINDS):
            try:
                expected = expect(reference, make_inputs(self.problems[shape], 1, kind, self.device))
                if expected.finite and expected.telling:
                    found.append((shape, kind))
            except (RuntimeError, ValueError, IndexError):  # the reference itself does not take this shape
                if (shape, kind) == (0, "given"):
                    raise
        return found

    def _load(self, candidate: Candidate, code: str, name: str) -> None:
        setup = {"text": code, "name": name, "sources": self.sources, "seed": candidate.seed}
        setup |= {"device": str(self.device), "gpu_bytes": self.settings.gpu_bytes}
        candidate.ask(["load", setup], self.settings.compile_seconds)

    def _trial(self, candidate: Candidate, case: int, way: str, seconds: float) -> tuple[int, dict, float]:
        """A trial of `telling[case]`: its seed, what the process reports, and its seconds by the judge's clock."""
        seed, (shape, kind) = new_seed(), self.telling[case]
        found, took = candidate.ask(["run", seed, shape, kind, way], seconds)
        if not readable(found):
            raise Refused("nonsense", UNREADABLE)
        return seed, found, took

    def _correct(self, candidate: Candidate, verdict: Verdict) -> float:
        """Check trials of every shape and kind. The least seconds in which memory can move the first one's data."""
        candidate.reference = make_model(self.reference, "Model", self.reference, candidate.seed, self.device)
        least = 0.0
        for case in range(len(self.telling)):
            for _ in range(self.settings.cases):
                seed, found, _ = self._trial(candidate, case, "checked", self.settings.run_seconds)
                expected = self._compare(candidate, case, seed, found)
                if others := sorted(set(found["operations"]) - OPERATIONS):
                    raise Refused("torch", f"its forward pass calls torch: {', '.join(others)[:200]}")
                if found["inputs"] != digest(expected.inputs):
                    raise Refused("edited inputs", "its forward pass changes its inputs")
            if case == 0:
                moved = sum(t.numel() * t.element_size() for t in [*expected.inputs, *expected.eager])
                least = moved / bandwidth(self.device)
        verdict.metrics["correct"] = 1.0
        return least

    def _compare(self, candidate: Candidate, case: int, seed: int, found: dict) -> Expected:
        """Fetch the last trial's outputs. Raises Refused if they are wrong or don't match their digest."""
        shape, kind = self.telling[case]
        expected = expect(candidate.reference, make_inputs(self.problems[shape], seed, kind, self.device))
        shaped = [(list(eager.shape), str(eager.dtype)) for eager in expected.eager]
        if list(zip(found["shapes"], found["dtypes"], strict=True)) != shaped:
            given = f"shapes {found['shapes']}, {found['dtypes']}"[:200]
            raise Refused("wrong shape", f"its outputs have {given}, expected {shaped}")
        wanted = [some_chunks(eager) for eager in expected.eager]
        limit = sum(eager.numel() * eager.element_size() for eager in expected.eager)
        shown, _ = candidate.ask(["show", wanted], self.settings.run_seconds, limit + SMALL)
        part = expected.part(wanted)
        shaped = [(output.shape, output.dtype) for output in part.eager]
        if not isinstance(shown, list) or [(getattr(s, "shape", 0), getattr(s, "dtype", 0)) for s in shown] != shaped:
            raise Refused("nonsense", UNREADABLE)
        for output, whole, numbers, reported in zip(shown, expected.eager, wanted, found["digest"], strict=True):
            size = chunk_size(whole.numel())
            shown_sums = [sum(sums) for sums in digest(list(output.split(size)))]
            if [reported[number] for number in numbers if number < len(reported)] != shown_sums:
                raise Refused("late", "its outputs changed after it had said that they were there")
        if wrong := fault(shown, part):
            raise Refused(*wrong)
        return expected

    def _time(self, candidate: Candidate, way: str, check: bool = False) -> Times:
        """Median times of the first telling case; `check`: compare the outputs of some random trials."""
        times, deadline = [], time.monotonic() + self.settings.timing_seconds
        while len(times) < WARMUP + self.settings.trials:
            if len(times) >= WARMUP + LEAST_TRIALS and time.monotonic() > deadline:
                break
            seed, found, took = self._trial(candidate, 0, way, self.settings.run_seconds)
            times.append((found["seconds"], took))
            if check and random.SystemRandom().random() * self.settings.trials < CHECKS:
                self._compare(candidate, 0, seed, found)
        return Times(*map(statistics.median, zip(*times[WARMUP:], strict=True)))

    def _fast(self, candidate: Candidate, least: float, verdict: Verdict) -> None:
        """Time the candidate against PyTorch. least: seconds that nothing can beat."""
        eager, empty = self.baselines["eager"], self.baselines["empty"]
        times = self._time(candidate, "timed", check=True)
        beyond = times.outside - empty.outside
        if beyond > 3 * times.own + LEEWAY + empty.outside:
            said = f"its own clock says {1e3 * times.own:.3f} ms, the one outside {1e3 * beyond:.3f} ms"
            raise Refused("timer", said)
        taken, usual = max(times.own, beyond, least), max(eager.own, eager.outside - empty.outside)
        metrics = verdict.metrics
        metrics |= {"ms": 1e3 * taken, "own_ms": 1e3 * times.own, "eager_ms": 1e3 * usual, "speedup": usual / taken}
        metrics |= {f"fast_{p:g}": float(metrics["speedup"] > p) for p in (1, 1.5, 2)}


make_judge = functools.lru_cache(maxsize=256)(Judge)
# A lock per problem: building a judge waits for others to be timed, and must not hold up other problems' compilers.
making = functools.lru_cache(maxsize=256)(lambda problem, settings: threading.Lock())


def judge_of(problem: Problem, settings: Settings) -> Judge:
    """The judge of a problem, shared by all threads so that its baselines are timed once."""
    with making(problem, settings):
        return make_judge(problem, settings)


def readable(found: object) -> bool:
    """Whether what a process reports of a trial has the form of `Runner.run`'s result."""
    match found:
        case {"seconds": float(seconds), "digest": list(sums), "shapes": list(shaped), "dtypes": list(dtypes),
              "operations": list(operations), "inputs": list()}:  # fmt: skip
            texts = all(isinstance(name, str) for name in [*dtypes, *operations])
            lists = all(isinstance(part, list) for part in [*sums, *shaped])
            return texts and lists and len(sums) == len(shaped) == len(dtypes) and 0 <= seconds < math.inf  # no nan
    return False


def shapes(source: str) -> list[str]:
    """The problem's text without `Model`, to make inputs with; and if possible one for other shapes, with half of each
    integer that only `get_inputs` reads, usually `batch_size`, so that weights keep their shapes."""
    tree, whole, read, elsewhere = rules.parse(source), {}, set(), set()
    for node in tree.body:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
        match node:
            case ast.FunctionDef(name="get_inputs"):
                read |= names
                continue
            case ast.Assign(value=ast.Constant(value=size)) if type(size) is int:
                whole |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elsewhere |= names
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == "Model")]
    found = [ast.unparse(tree)]
    changed = [whole[name] for name in (read - elsewhere) & whole.keys() if whole[name].value.value >= 2]
    for node in changed:
        node.value.value //= 2
    return [*found, ast.unparse(tree)] if changed else found
