"""On a GPU: right, slow, wrong and cheating kernels in Triton and CuTe DSL, judged together as in training.

`pytest -m gpu -s tests/tasks/kernelbench/test_gpu.py` prints what each earned, and candidates a minute.
"""

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cheats import CHEATS
from texts import POINTWISE, ROW_KERNELS, fenced, pointwise_cute, pointwise_problem, pointwise_triton, problem

from rlcourse.sandbox.process import GUARD
from rlcourse.tasks.kernelbench import candidate, judging, rules
from rlcourse.tasks.kernelbench.judging import COMPILED, Settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SETTINGS = Settings(
    trials=100, cases=1, timing_seconds=3, compile_seconds=150, first_seconds=15, run_seconds=10, gpu_bytes=16 << 30
)


def on_gpu(name: str):
    return pointwise_problem(name, 4096, 4096)


ROWS = {
    "mean": problem("mean", "torch.mean(x, dim=1, keepdim=True)", "torch.rand(n, 200)", sizes="n = 65536"),
    "matmul": problem(
        "matmul", "torch.matmul(x, y)", "torch.rand(n, 64), torch.rand(64, n)", arguments="x, y", sizes="n = 4096"
    ),
}
RELU = pointwise_triton(POINTWISE["relu"][1])
HOG = "the driver gives all memory"
TAKE = "ctypes.CDLL('libcuda.so.1').cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(20 << 30))"
TAKES_ALL = f"import ctypes\n{RELU}".replace(
    "    n =", f"    {TAKE}\n        while True:\n            pass\n        n ="
)
LOOP = "    while tl.load(source, volatile=True) < 2.0:\n        pass\n"  # a kernel that never ends

# name: (problem, text, the reasons that it may have). "" is a right kernel.
ON_RELU = {
    "triton relu": (RELU, ("",)),
    "triton slow": (RELU.replace("4096", "16"), ("",)),  # a program for sixteen numbers
    "triton wrong": (pointwise_triton("tl.abs(x)"), ("wrong",)),
    "triton does not compile": (pointwise_triton("tl.nothing(x)"), ("compile",)),
    "triton stale memory": (CHEATS["stale memory"].text, ("wrong", "not finite")),
    "triton cached by address": (
        CHEATS["a cache by address"].text.replace(" // 2**44", ""),
        ("", "wrong", "not finite", "wrong shape"),
    ),
    "triton patched event": (CHEATS["a patched event"].text, ("", "timer")),
    "triton another stream": (
        CHEATS["work on another stream"].text,
        ("", "late", "wrong", "not finite", "timer"),
    ),
    "triton edits its input": (CHEATS["the input overwritten"].text, ("edited inputs",)),
    "triton and torch": (CHEATS["a decoy"].text, ("torch",)),
    "triton illegal address": (RELU.replace("target + at", "target + at + (1 << 42)"), ("error", "died")),
    "triton without end": (RELU.replace("    x = tl.load", f"{LOOP}    x = tl.load"), ("hang",)),
    HOG: (TAKES_ALL, ("gpu memory",)),
}
IMPRECISE = ("precision", "wrong")
CASES = {name: (on_gpu("relu"), *rest) for name, rest in ON_RELU.items()} | {
    "triton mean": (ROWS["mean"], ROW_KERNELS["mean"], ("",)),
    "triton matmul": (ROWS["matmul"], ROW_KERNELS["matmul"], ("",)),
    "triton by tensor cores": (ROWS["matmul"], ROW_KERNELS["matmul"].replace('"ieee"', '"tf32"'), IMPRECISE),
    "triton in half precision": (ROWS["mean"], CHEATS["a lower precision"].text, IMPRECISE),
}
if importlib.util.find_spec("cutlass"):
    CASES |= {
        "cute scale": (on_gpu("scale"), pointwise_cute("x * 3.0 + 1.0"), ("",)),
        "cute wrong": (on_gpu("scale"), pointwise_cute("x * 3.0"), ("wrong",)),
        "cute does not compile": (on_gpu("scale"), pointwise_cute("x.nothing()"), ("compile", "error")),
    }
LIES = ("triton patched event", "triton another stream", "triton cached by address")


@pytest.fixture(scope="module")
def verdicts():
    """All of them, the rules passed over: this is what measuring finds."""
    print(f"\n{candidate.way()}")
    start = time.monotonic()

    def run(name: str):
        begun = time.monotonic()
        task, text, _ = CASES[name]
        verdict = judging.judge_of(task, SETTINGS).run(text)
        numbers = {key: round(value, 3) for key, value in verdict.metrics.items() if "fast" not in key}
        took = time.monotonic() - begun
        print(f"{name:26} {took:6.1f} s  {verdict.reason or 'right':14} {numbers} {verdict.text[-160:]!r}")
        return name, verdict

    with ThreadPoolExecutor(14) as pool:  # last the one for which all others are blamed that run beside it
        found = dict(pool.map(run, sorted(CASES, key=lambda name: name == HOG)))
    took = time.monotonic() - start
    print(f"{len(found)} candidates in {took:.0f} s: {60 * len(found) / took:.1f} a minute")
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_candidate_gets_what_it_earns(name, verdicts):
    verdict, reasons = verdicts[name], CASES[name][2]
    assert verdict.reason in reasons, verdict.text
    if verdict.reason:
        assert verdict.metrics["correct"] == 0 and verdict.reward <= COMPILED
    elif name == "triton slow":
        assert verdict.metrics["speedup"] < 0.7
    elif name in LIES:
        assert verdict.metrics["speedup"] < 2.5 and verdict.metrics["ms"] > 1e3 * 2 * 4 * 4096**2 / 6e12
    else:  # with so many at once the clock outside waits for processors, and the speed-up is of the slower clock
        assert 0.05 < verdict.metrics["eager_ms"] / verdict.metrics["own_ms"] < 10


def test_the_rules_let_the_right_ones_pass():
    named = {name: rules.check(text) for name, (_, text, reasons) in CASES.items() if reasons == ("",)}
    assert set(named.values()) == {None}


def test_candidates_are_isolated(verdicts):
    assert candidate.way()[0] != GUARD


def test_after_all_of_them_the_gpu_works(verdicts):
    assert judging.judge_of(on_gpu("relu"), SETTINGS).judge(fenced(RELU)).reason == ""
    assert float(torch.ones(1000, device="cuda").sum()) == 1000
