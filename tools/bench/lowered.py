"""Counted against measured time: programs of the task `kernels` as Triton kernels on a GPU."""

import random
from typing import Any

import torch

from rlcourse.measure.timing import measure, seconds
from rlcourse.tasks import load_task
from rlcourse.tasks.kernels.clock import A10G, H200, Card, kept_where_possible, optimum, program_us
from rlcourse.tasks.kernels.language import CompileError, Computation, compile_program, eager
from tools.bench.graphs import graph_seconds
from tools.bench.results import median_and_spread
from tools.measured import Program, Stopwatch, run_of

PROBLEMS = 67  # with three programs each
CALLS = 20  # of a program, timed together


def lowered(repeats: int = 5) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of test problems the eager program, one that is cut at random, and the optimum: counted microseconds, those of a
    call from Python, those in a CUDA graph, where the host has no part, and whether the result is right.

    Counted with the rates of an H200, or of an A10G where that is the GPU. Matrices have the clock's size and, unlike
    what the clock counts, may still be in the cache when they are read again. Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("The programs need a GPU, and no CUDA GPU was found: `rlcourse doctor` says what runs here.")
    card = A10G if "A10" in torch.cuda.get_device_name() else H200
    chosen = programs(PROBLEMS)
    right = Stopwatch().pool.map([(computation, program) for computation, _, program in chosen])
    rows = [
        {"variant": variant, "program": number // 3, "lines": len(computation.lines)}
        | timed(computation, program, card, repeats)
        | {"right": found is True}
        for number, ((computation, variant, program), found) in enumerate(zip(chosen, right, strict=True))
    ]
    return {"card": card.name, "rows": card.rows, "columns": card.columns, "calls": CALLS, "repeats": repeats}, rows


def programs(count: int) -> list[tuple[Computation, str, Program]]:
    """Of each of the first `count` test problems: eager, random, optimum. Seeded."""
    rng, found = random.Random(0), []
    for problem in load_task("kernels").problems("test")[:count]:
        computation = problem.computation
        ways = {"eager": eager(computation), "random": cut_at_random(computation, rng)}
        ways["optimum"] = list(optimum(computation)[1])
        found += [(computation, variant, program) for variant, program in ways.items()]
    return found


def cut_at_random(computation: Computation, rng: random.Random) -> Program:
    """The lines in order, a launch ending after each with even odds, and what no later launch reads not stored."""
    while True:
        ends = tuple(rng.random() < 0.5 for _ in computation.lines[1:])
        program = kept_where_possible(list(computation.lines), (*ends, True))
        try:
            compile_program(program, computation)
        except CompileError:  # out of registers
            continue
        return program


def timed(computation: Computation, program: Program, card: Card, repeats: int) -> dict[str, Any]:
    """Launches and microseconds: counted, of a call from Python, and in a CUDA graph, with the spread of both."""
    run, launches = run_of(computation, program), compile_program(program, computation)
    inputs = [torch.randn(card.rows, card.columns, device="cuda") for _ in computation.inputs]

    def calls() -> None:
        for _ in range(CALLS):
            run(*inputs)

    called = measure(lambda: seconds(calls, torch.device("cuda")), repeats, warmup=2)
    (call_s, call_spread), (graph_s, spread) = median_and_spread(called), graph_seconds(calls, repeats)
    return {
        "launches": len(launches),
        "counted_us": program_us(launches, card),
        "call_us": 1e6 * call_s / CALLS,
        "call_spread": call_spread,
        "graph_us": 1e6 * graph_s / CALLS,
        "spread": spread,
    }
