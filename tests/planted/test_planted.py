"""Do quick tests find the mistakes of `mistakes.py`? That each can be made is tried in every run; that each is found,
with `-m thorough`, in about four minutes on two cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mistakes import MISTAKES
from plant import PACKAGE, spoiled


def test_every_mistake_can_be_made():
    """A change of code that a mistake needs shows here, with that change."""
    assert len(set(map(str, MISTAKES))) == len(MISTAKES)
    for mistake in MISTAKES:
        spoiled(mistake)
        for file, word in mistake.selection:
            assert word in file.read_text(), f"no test of {file} is named {word}"


@pytest.fixture(scope="module")
def results(request):
    """What the runner says of each mistake whose test was selected, once it has said so."""
    selected = [item.callspec.params["number"] for item in request.session.items if "results" in item.fixturenames]
    runner = [sys.executable, str(Path(__file__).with_name("runner.py")), *map(str, selected)]
    found: dict[int, dict] = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(runner, stdout=subprocess.PIPE, text=True, env=environment) as process:

        def result(number: int) -> dict:
            while number not in found:
                line = process.stdout.readline()
                assert line, "the runner ended early"
                found[json.loads(line)["number"]] = json.loads(line)
            return found[number]

        yield result
        process.terminate()


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda number: str(MISTAKES[number])[:90])
def test_a_mistake_is_found(number, results):
    found = results(number)
    assert found["code"] == 0, "the tests hang, or die"
    assert found["failed"], f"nothing in {', '.join(MISTAKES[number].tests)} finds it"
