"""`tests/PROMISES.md` names, for what README and the docs promise, tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = [line.split("|")[1:3] for line in (TESTS / "PROMISES.md").read_text().splitlines() if line.startswith("| ")][2:]


def test_every_promise_has_a_test_that_is_there():
    for promise, tests in ROWS:
        if promise.strip().startswith("**"):
            continue  # the title of a group
        named = re.findall(r"`([\w/.]+)(?:::(\w+))?`", tests)
        assert named, promise
        for file, test in named:
            path = TESTS / file if file.endswith(".py") else TESTS.parent / file
            assert f"def {test}" * bool(test) in path.read_text(), (promise, file, test)
