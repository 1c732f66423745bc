"""Do the fast tests of training find mistakes? One mistake a test, planted in a copy of the package by `runner.py`;
`mistakes.py` lists them. A part of them is thorough, about a quarter of an hour on two cores; the others are left to
`pytest -m exhaustive`.
"""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from mistakes import MISTAKES

import rlcourse

SLOW = {"bench/test_scale.py", "distributed/test_ranks_train.py", "distributed/test_world.py", "test_lora.py"}
SLOW |= {"distributed/test_overlap.py", "distributed/test_sharded.py"}
SLOW |= {"rollout/test_paged.py", "rollout/test_serve.py"}
SLOW |= {"sft/test_fine_tuning.py", "sft/test_right_traces.py", "tasks/test_pool.py", "tasks/test_math.py"}
SLOW |= {"sandbox/test_box.py", "tasks/test_llm_judge.py", "tasks/test_judged.py"}
SLOW |= {f"tasks/kernelbench/test_{name}.py" for name in ("kernelbench_task", "answers", "worker")}
PACKAGE = Path(rlcourse.__file__).parent
FOUND, SURVIVED = 1, 0  # exit codes of pytest
SOUND = sorted({name for *_, tests in MISTAKES for name in tests})


def occurrences(file: str, old: str) -> int:
    path = PACKAGE / file
    return path.read_text().count(old) if path.exists() else 0


class Results:
    """What became of each job, as the runner says it."""

    def __init__(self, jobs: list[dict]):
        runner = Path(__file__).with_name("runner.py")
        self.found: dict[str, dict] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(runner)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.process.stdin.write(json.dumps(jobs))
        self.process.stdin.close()

    def __getitem__(self, name: str) -> dict:
        while name not in self.found:
            line = self.process.stdout.readline()
            assert line, "the runner ended early"
            result = json.loads(line)
            self.found[result["id"]] = result
        return self.found[name]


@pytest.fixture(scope="module")
def results(request):
    """The jobs of the tests that were selected, started at once."""
    jobs = []
    for item in request.session.items:
        if item.fspath == request.fspath and hasattr(item, "callspec"):
            values = item.callspec.params
            if "sound" in values:
                jobs.append({"id": f"sound {values['sound']}", "tests": [values["sound"]]})
            else:
                file, old, new, tests = MISTAKES[values["number"]]
                if occurrences(file, old) == 1:
                    jobs.append(
                        {"id": f"mistake {values['number']}", "file": file, "old": old, "new": new, "tests": tests}
                    )
    found = Results(jobs)
    yield found
    found.process.terminate()
    found.process.wait()


def level(often: bool) -> pytest.MarkDecorator:
    """Where a job belongs."""
    return pytest.mark.thorough if often else pytest.mark.exhaustive


def test_every_mistake_can_be_made():
    """In every run: a change of the code that a mistake stands in is noticed with that change."""
    stale = [(file, old) for file, old, _, _ in MISTAKES if occurrences(file, old) != 1]
    assert not stale, "these mistakes can no longer be made: write others"


@pytest.mark.parametrize("sound", [pytest.param(name, marks=level(name not in SLOW)) for name in SOUND])
def test_the_sound_package_passes(sound, results):
    result = results[f"sound {sound}"]
    assert result["code"] == SURVIVED, result["said"]


def case(number: int):
    """A mistake as a case. One in five is thorough, of those with slow tests one in twenty; the others are
    exhaustive. Which, its own text says, so that a new mistake leaves the others where they are."""
    file, old, new, tests = MISTAKES[number]
    often = zlib.crc32(f"{file} {old} {new}".encode()) % (20 if SLOW.intersection(tests) else 5) == 0
    return pytest.param(number, marks=level(often), id=f"{file}: {new.strip() or old.strip()}"[:90])


@pytest.mark.parametrize("number", map(case, range(len(MISTAKES))))
def test_a_mistake_is_found(number, results):
    file, old, _, tests = MISTAKES[number]
    assert occurrences(file, old) == 1, "this mistake cannot be made"
    result = results[f"mistake {number}"]
    assert result["code"] != SURVIVED, f"nothing in {', '.join(tests)} finds it"
    assert result["code"] == FOUND, f"the copy cannot be tested, exit code {result['code']}: {result['said']}"
