"""Right kernels earn what they should; wrong ones and cheats nothing, with the reason named, by measuring alone."""

import threading
from contextlib import nullcontext

import pytest
import torch
from cheats import CHEATS, ESCAPES
from texts import POINTWISE, ROW_KERNELS, ROW_PROBLEMS, fenced, pointwise_problem, pointwise_triton, problem

from rlcourse.sandbox.process import BUBBLEWRAP, GUARD, NAMESPACES, attempt
from rlcourse.tasks.kernelbench import candidate, judging
from rlcourse.tasks.kernelbench.judging import COMPILED, CORRECT, MOST_SPEEDUP, Judge, Settings, Verdict, judge_of

SETTINGS = Settings(trials=8, timing_seconds=4, run_seconds=20, compile_seconds=120)
MEASURED = {name: cheat for name, cheat in CHEATS.items() if cheat.measured}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_gpu.py judges the same")


def judge(problem, text: str) -> Verdict:
    return judge_of(problem, SETTINGS).judge(fenced(text))


def is_right(verdict: Verdict) -> None:
    metrics = verdict.metrics
    assert verdict.reason == "" and metrics["compiled"] == metrics["correct"] == 1 and metrics["refused"] == 0
    assert verdict.reward == pytest.approx(COMPILED + CORRECT + min(metrics["speedup"], MOST_SPEEDUP))
    assert metrics["speedup"] == pytest.approx(metrics["eager_ms"] / metrics["ms"])
    assert [metrics[f"fast_{p}"] for p in ("1", "1.5", "2")] == [metrics["speedup"] > p for p in (1, 1.5, 2)]
    assert metrics["ms"] >= metrics["own_ms"] > 0


@on_cpu
@pytest.mark.thorough
@pytest.mark.parametrize("name", [*POINTWISE, *ROW_PROBLEMS])
def test_right_kernels_in_triton_pass(name):
    text = ROW_KERNELS[name] if name in ROW_PROBLEMS else pointwise_triton(POINTWISE[name][1])
    is_right(judge(ROW_PROBLEMS.get(name) or pointwise_problem(name), text))


@on_cpu
@pytest.mark.thorough
@pytest.mark.parametrize("name", MEASURED)
def test_a_cheat_earns_nothing_even_where_no_rule_looks(name):
    cheat = MEASURED[name]
    judged = judge_of(ROW_PROBLEMS.get(cheat.problem) or pointwise_problem(cheat.problem), SETTINGS)
    verdict = judged.run(cheat.text)
    assert verdict.reason in cheat.measured, (verdict.reason, verdict.text)
    if verdict.reason:  # else it is a right kernel whose lie changed nothing
        assert verdict.metrics["correct"] == 0 and verdict.reward <= COMPILED


@on_cpu
@pytest.mark.thorough
@pytest.mark.parametrize("way", [NAMESPACES, BUBBLEWRAP, GUARD])
def test_every_way_to_start_a_process_judges(way, monkeypatch):
    if way != GUARD and (why := attempt(way, candidate.box(torch.device("cpu"), 1 << 32))):
        pytest.skip(why)
    monkeypatch.setattr(judging, "way", lambda: (way, "as the test wants it"))
    with pytest.warns(UserWarning, match="your own user") if way == GUARD else nullcontext():
        judged = Judge(pointwise_problem("relu"), SETTINGS)
    assert judged.run(ESCAPES["the end of the process"][0]).reason == "died"
    assert judged.judge(fenced(pointwise_triton(POINTWISE["relu"][1]))).reason == ""  # the next one is judged


def test_what_a_text_betrays_earns_nothing_and_starts_no_process(monkeypatch):
    monkeypatch.setattr(Judge, "_process", None)
    judged = pointwise_problem("relu")
    for name, refused in (("a fallback", 1.0), ("no kernel", 0.0), ("no Python", 0.0)):
        verdict = judge(judged, CHEATS[name].text)
        assert verdict.reward == 0 and verdict.metrics == {"compiled": 0, "correct": 0, "refused": refused}
        assert verdict.reason == CHEATS[name].rule
    assert judge_of(judged, SETTINGS).judge("I cannot do this.").reward == 0


def test_a_problem_that_a_constant_or_the_input_solves_is_refused():
    for forward in ("torch.clamp(x, 2, 2)", "x + 0", "x * 0"):
        flat = problem("flat", forward, "torch.rand(4, 4)")
        with pytest.raises(ValueError, match="flat: a constant or an input solves this problem"):
            Judge(flat, SETTINGS)


@on_cpu
def test_compiling_waits_for_nobody_who_is_timed(monkeypatch):
    judged, compiled = Judge(pointwise_problem("relu"), SETTINGS), threading.Event()
    monkeypatch.setattr(judged, "_process", lambda: nullcontext())
    monkeypatch.setattr(judged, "_load", lambda *_: compiled.set())
    monkeypatch.setattr(judged, "_time_reference", lambda: judged.baselines.update(eager=judging.Times(1.0, 1.0)))

    def run() -> None:
        with pytest.raises(AttributeError):  # past compiling there is no process here
            judged.run("")

    run()
    assert "eager" in judged.baselines
    compiled.clear()
    with judging.alone(judged.device):
        other = threading.Thread(target=run)
        other.start()
        assert compiled.wait(30)
    other.join()
