"""Whatever a candidate's process answers, the judge survives it: a script stands for the process."""

import copy
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from texts import pointwise_problem

from rlcourse.tasks.kernelbench.candidate import Refused
from rlcourse.tasks.kernelbench.cases import digest, make_inputs
from rlcourse.tasks.kernelbench.judging import Judge, Settings, Times, Verdict

SETTINGS = Settings(cases=1, trials=5)


class Scripted:
    """A process that computes the right answer, and then says `change(request, answer, times)`, each a function of what
    was asked, the honest answer and how often `kind` was asked before."""

    def __init__(self, judged: Judge, change, outside: float, digested):
        self.judged, self.change, self.asked, self.seed, self.reference = judged, change, {}, 0, None
        self.outside, self.digested, self.outputs = outside, digested, []

    def watch_gpu(self) -> None: ...

    def ask(self, request, seconds, limit=0):
        kind = request[0]
        answer = None
        if kind == "run":
            _, seed, shape, of, _ = request
            inputs = make_inputs(self.judged.problems[shape], seed, of, torch.device("cpu"))
            self.outputs = [torch.relu(inputs[0])]
            answer = {"seconds": 1e-3, "shapes": [list(self.outputs[0].shape)], "dtypes": ["torch.float32"]}
            answer |= {"digest": digest(self.digested(self.outputs)), "inputs": digest(inputs)}
            answer |= {"operations": ["empty_like"]}
        elif kind == "show":
            answer = [self.outputs[0].flatten()]
        times = self.asked[kind] = self.asked.get(kind, -1) + 1
        return self.change(kind, answer, times), self.outside


@cache
def relu() -> Judge:
    return Judge(pointwise_problem("relu"), SETTINGS, torch.device("cpu"))


def verdict_on(change, outside: float = 2e-3, digested=lambda outputs: outputs):
    judged = copy.copy(relu())
    judged.baselines = {"eager": Times(4e-3, 5e-3), "empty": Times(0.0, 1e-3)}
    scripted = Scripted(judged, change, outside, digested)
    judged._process = lambda: nullcontext(scripted)
    return judged.run("")


def test_the_clock_outside_is_the_one_that_counts():
    verdict = verdict_on(lambda kind, answer, times: answer)
    assert verdict.reason == "" and verdict.metrics["correct"] == 1
    assert verdict.metrics["ms"] == pytest.approx(1.0) and verdict.metrics["speedup"] == pytest.approx(4.0)
    verdict = verdict_on(lambda kind, answer, times: answer, outside=4e-3)
    assert verdict.metrics["ms"] == pytest.approx(3.0) and verdict.metrics["own_ms"] == pytest.approx(1.0)
    assert verdict_on(lambda kind, answer, times: answer, outside=0.1).reason == "timer"


def test_nothing_is_faster_than_memory():
    verdict = verdict_on(lambda k, a, t: a | {"seconds": 1e-12} if k == "run" else a, outside=1e-3)
    assert verdict.reason == "" and 1e-4 < verdict.metrics["ms"] < 1


JUNK = [None, [], {"a": 1}, [torch.zeros(2)], float("nan"), 1 << 70]


@pytest.mark.parametrize(
    ("kind", "junk", "late"),
    [("run", i, 0) for i in range(len(JUNK))] + [("run", 0, 2), ("show", 1, 0), ("show", 3, 2)],
)
def test_answers_of_another_form_are_nonsense(kind, junk, late):
    verdict = verdict_on(lambda k, answer, times: JUNK[junk] if (k, times) == (kind, late) else answer)
    assert verdict.reason == "nonsense" and verdict.metrics["correct"] == 0 and verdict.reward == 0


@pytest.mark.parametrize("part", ["seconds", "digest", "shapes", "dtypes", "operations", "inputs"])
@pytest.mark.parametrize("junk", [None, float("nan"), [["x"]]])
def test_parts_of_another_form_earn_nothing(part, junk):
    verdict = verdict_on(lambda k, answer, times: answer | {part: junk} if k == "run" else answer)
    assert verdict.reason in ("nonsense", "late", "wrong shape", "torch", "edited inputs")
    assert verdict.metrics["correct"] == 0


REFUSED = {
    "late": lambda k, a, times: [a[0] + 1e-7] if k == "show" and times == 3 else a,
    "torch": lambda k, a, times: a | {"operations": ["empty_like", "relu"]} if k == "run" else a,
    "edited inputs": lambda k, a, times: a | {"inputs": [[n + 1 for n in a["inputs"][0]]]} if k == "run" else a,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_late_changes_computing_by_torch_and_edited_inputs_are_seen(reason):
    verdict = verdict_on(REFUSED[reason])
    assert verdict.reason == reason and verdict.metrics["refused"] == 1 and verdict.reward == 0
    assert reason != "torch" or ("relu" in verdict.text and "empty_like" not in verdict.text)


@pytest.mark.parametrize("off", [1e-3, 1e3, float("nan")])
def test_a_wrong_output_is_wrong_however_well_it_fits_its_digest(off):
    verdict = verdict_on(
        lambda kind, answer, times: [answer[0] + off] if kind == "show" else answer,
        digested=lambda outputs: [outputs[0] + off],
    )
    assert verdict.reason == ("not finite" if off != off else "wrong") and verdict.metrics["correct"] == 0


def test_the_reward_is_weighted_capped_and_nothing_for_a_cheat():
    metrics = {"compiled": 1.0, "correct": 1.0, "refused": 0.0, "speedup": 40.0}
    assert Verdict(metrics=metrics).reward == pytest.approx(5.4)
    assert Verdict(metrics=metrics | {"correct": 0.0}).reward == pytest.approx(0.1)
    assert Verdict(metrics=metrics | {"refused": 1.0}).reward == 0


@pytest.mark.parametrize("again", [False, True])
def test_who_is_blamed_for_the_memory_of_all_is_judged_again_by_itself(again):
    def takes_it(kind, answer, times):
        if kind == "load" and times < (2 if again else 1):
            raise Refused("gpu memory")
        return answer

    verdict = verdict_on(takes_it)
    assert verdict.reason == ("gpu memory" if again else "") and verdict.metrics["correct"] == (0 if again else 1)


def test_the_first_trials_warm_up_and_do_not_count():
    scripted = Scripted(
        relu(), lambda k, answer, times: answer | {"seconds": float(times)}, 0.5, lambda outputs: outputs
    )
    assert relu()._time(scripted, "timed") == (5.0, 0.5)  # of 3, 4, 5, 6 and 7
