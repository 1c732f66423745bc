"""From a completion to a reward and numbers: is it code, is it allowed, does it compile, is it right, how fast is it.

The judge holds inputs, references and the clock; the candidate's process gets a seed and gives outputs. Its own events
say how long a pass took on the GPU, and count no less than the clock out here less what a trial takes without a model.
"""

import functools
import math
import random
import statistics
import threading
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from rlcourse.sandbox.process import GUARD
from rlcourse.tasks.kernelbench import rules
from rlcourse.tasks.kernelbench.candidate import SMALL, UNREADABLE, Candidate, Refused, alone, bandwidth, new_seed, way
from rlcourse.tasks.kernelbench.cases import KINDS, chunk_size, digest, make_inputs, make_model, namespace
from rlcourse.tasks.kernelbench.compare import Expected, expect, fault, some_chunks
from rlcourse.tasks.kernelbench.problems import Problem, parse_answer, shapes
from rlcourse.tasks.kernelbench.verdict import OPERATIONS, Settings, Verdict

CHECKS = 10  # of timed trials whose outputs are compared; nobody knows which
WARMUP = 3
LEAST_TRIALS = 5
LEEWAY = 5e-3  # seconds that a process's own clock may be short of the one out here without being called a lie


class Times(NamedTuple):
    """Median seconds of a trial: by the process's own events, and by the clock out here."""

    own: float
    outside: float


def judge_of(problem: Problem, settings: Settings) -> "Judge":
    """The judge of a problem, the same for all threads, so that its baselines are timed once."""
    with making(problem, settings):  # those that want another judge do not wait for it
        return make_judge(problem, settings)


@functools.lru_cache(maxsize=256)
def making(problem: Problem, settings: Settings) -> threading.Lock:
    return threading.Lock()


class Judge:
    """One problem. Its baselines are timed when they are first asked for, by the road that candidates take.

    Raises ValueError for a problem that a constant or an input solves.
    """

    def __init__(self, problem: Problem, settings: Settings, device: torch.device | None = None):
        self.problem, self.settings = problem, settings
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.way, why = way()
        if self.way == GUARD:
            warnings.warn(f"Kernels run as your own user here, with your files and your network: {why}", stacklevel=2)
        self.sources = shapes(problem.source)
        self.reference = namespace(problem.source)
        self.problems = [namespace(source) for source in self.sources]
        with alone(self.device):
            self.telling = self._telling()
        if not any(shape == 0 for shape, _ in self.telling):
            raise ValueError(f"{problem.name}: a constant or an input solves this problem, so it tells nothing.")
        self.baselines: dict[str, Times] = {}

    def judge(self, text: str) -> Verdict:
        """From a completion to its verdict."""
        code = parse_answer(text)
        if code is None:
            return Verdict("no code", "there is no fenced block of code")
        refused = rules.check(code)
        if refused is None:
            return self.run(code)
        verdict = Verdict(*refused)
        verdict.metrics["refused"] = float(refused[0] not in rules.NO_CHEAT)
        return verdict

    def run(self, code: str) -> Verdict:
        """The verdict on code, whatever the rules say of its text.

        What a GPU holds is seen for all processes together: one that is blamed for it while others run beside it is
        judged again, alone from its first line on.
        """
        if "eager" not in self.baselines:  # else compiling would wait for others to be timed
            with alone(self.device):
                self.baseline("eager")  # which says early where this machine cannot judge
        verdict = self._run(code, nullcontext(), alone(self.device))
        if verdict.reason == "gpu memory":
            verdict = self._run(code, alone(self.device), nullcontext())
        return verdict

    def _run(self, code: str, throughout: AbstractContextManager, once_compiled: AbstractContextManager) -> Verdict:
        verdict = Verdict()
        try:
            with throughout, self._process() as candidate:
                self._compile(candidate, code)
                with once_compiled:
                    candidate.watch_gpu()
                    self._run_once(candidate, verdict)
                    least = self._correct(candidate, verdict)
                    self._fast(candidate, least, verdict)
        except Refused as error:
            verdict.reason, verdict.text = error.reason, str(error)
            verdict.metrics |= {"correct": 0.0, "refused": float(error.reason in rules.CHEATS)}
        return verdict

    def baseline(self, name: str) -> Times:
        """Times of "eager", "compiled" and "empty", a trial without a model. RuntimeError where there are none."""
        if name not in self.baselines:
            try:
                self._time_reference(compile_it=name == "compiled")
            except Refused as error:
                raise RuntimeError(f"{self.problem.name} itself does not run: {error.reason}: {error}") from None
        return self.baselines[name]

    def _time_reference(self, compile_it: bool) -> None:
        with self._process() as candidate:
            self._load(candidate, self.problem.source, "Model", compile_it)
            self._trial(candidate, 0, "timed", self.settings.compile_seconds)
            self.baselines["compiled" if compile_it else "eager"] = self._time(candidate, "timed")
            if not compile_it:
                self.baselines["empty"] = self._time(candidate, "empty")

    def _process(self) -> Candidate:
        return Candidate(self.way, self.device, self.settings.memory_bytes, self.settings.gpu_bytes)

    def _telling(self) -> list[tuple[int, str]]:
        """The shapes and kinds of inputs on which the reference is finite and no guess passes."""
        reference, found = make_model(self.reference, "Model", self.reference, 0, self.device), []
        for shape in range(len(self.problems)):
            for kind in KINDS:
                try:
                    expected = expect(reference, make_inputs(self.problems[shape], 1, kind, self.device))
                except (RuntimeError, ValueError, IndexError):
                    if shape == 0 and kind == "given":
                        raise
                    continue  # the reference itself does not take this shape
                if expected.finite and expected.telling:
                    found.append((shape, kind))
        return found

    def _load(self, candidate: Candidate, code: str, name: str, compile_it: bool) -> None:
        setup = {"text": code, "name": name, "sources": self.sources, "seed": candidate.seed}
        setup |= {"device": str(self.device), "compile": compile_it, "gpu_bytes": self.settings.gpu_bytes}
        candidate.ask(["load", setup], self.settings.compile_seconds)

    def _trial(self, candidate: Candidate, case: int, way: str, seconds: float) -> tuple[int, dict, float]:
        """A trial of `telling[case]`: its seed, what the process says of it, and its time by the clock out here."""
        seed, (shape, kind) = new_seed(), self.telling[case]
        found, took = candidate.ask(["run", seed, shape, kind, way], seconds)
        if not readable(found):
            raise Refused("nonsense", UNREADABLE)
        return seed, found, took

    def _compile(self, candidate: Candidate, code: str) -> None:
        """Load the text, which compiles what C++ and CUDA are in it."""
        try:
            self._load(candidate, code, "ModelNew", False)
        except Refused as error:
            raise Refused("compile" if error.reason == "error" else error.reason, str(error)) from None

    def _run_once(self, candidate: Candidate, verdict: Verdict) -> None:
        """The first pass, in which Triton and CuTe DSL compile."""
        try:
            self._trial(candidate, 0, "timed", self.settings.first_seconds)
        except Refused as error:
            verdict.metrics["compiled"] = float(error.reason == "error")
            raise
        verdict.metrics["compiled"] = 1.0

    def _correct(self, candidate: Candidate, verdict: Verdict) -> float:
        """Trials of every shape and kind. The least seconds in which memory moves what the first shape needs."""
        candidate.reference = make_model(self.reference, "Model", self.reference, candidate.seed, self.device)
        least = 0.0
        for case in range(len(self.telling)):
            for _ in range(self.settings.cases):
                seed, found, _ = self._trial(candidate, case, "checked", self.settings.run_seconds)
                expected = self._compare(candidate, case, seed, found)
                others = sorted(set(found["operations"]) - OPERATIONS)
                if others:
                    raise Refused("torch", f"its forward pass calls torch: {', '.join(others)[:200]}")
                if found["inputs"] != digest(expected.inputs):
                    raise Refused("edited inputs", "its forward pass changes its inputs")
            if case == 0:
                moved = sum(t.numel() * t.element_size() for t in [*expected.inputs, *expected.eager])
                least = moved / bandwidth(self.device)
        verdict.metrics["correct"] = 1.0
        return least

    def _compare(self, candidate: Candidate, case: int, seed: int, found: dict) -> Expected:
        """See the outputs of the last trial. Raises Refused where they are not right, or not those of the digest."""
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
        for output, whole, numbers, said in zip(shown, expected.eager, wanted, found["digest"], strict=True):
            size = chunk_size(whole.numel())
            shown_sums = [sum(sums) for sums in digest(list(output.split(size)))]
            if [said[number] for number in numbers if number < len(said)] != shown_sums:
                raise Refused("late", "its outputs changed after it had said that they were there")
        wrong = fault(shown, part)
        if wrong is not None:
            raise Refused(*wrong)
        return expected

    def _time(self, candidate: Candidate, way: str, check: bool = False) -> Times:
        """Median times of the first telling case, some trials of which are compared if `check`."""
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
        """Time the candidate beside PyTorch. `least`: seconds that nothing can beat."""
        times = self._time(candidate, "timed", check=True)
        beyond = times.outside - self.baseline("empty").outside
        if beyond > 3 * times.own + LEEWAY + self.baseline("empty").outside:
            text = f"its own clock says {1e3 * times.own:.3f} ms, the one outside {1e3 * beyond:.3f} ms"
            raise Refused("timer", text)
        taken = max(times.own, beyond, least)
        eager = self._counted(self.baseline("eager"))
        metrics = verdict.metrics
        metrics |= {"ms": 1e3 * taken, "own_ms": 1e3 * times.own, "eager_ms": 1e3 * eager, "speedup": eager / taken}
        if self.settings.torch_compile:
            metrics["speedup_over_compiled"] = self._counted(self.baseline("compiled")) / taken
        metrics |= {f"fast_{p:g}": float(metrics["speedup"] > p) for p in (1, 1.5, 2)}

    def _counted(self, times: Times) -> float:
        return max(times.own, times.outside - self.baseline("empty").outside)


make_judge = functools.lru_cache(maxsize=256)(Judge)


def readable(found: object) -> bool:
    """Whether what a process says of a trial has the parts that `Runner.run` gives, of their kinds."""
    match found:
        case {
            "seconds": float(seconds),
            "digest": list(sums),
            "shapes": list(shaped),
            "dtypes": list(dtypes),
            "operations": list(operations),
            "inputs": list(),
        }:
            texts = all(isinstance(name, str) for name in [*dtypes, *operations])
            lists = all(isinstance(part, list) for part in [*sums, *shaped])
            return texts and lists and len(sums) == len(shaped) == len(dtypes) and 0 <= seconds < math.inf  # no nan
    return False
