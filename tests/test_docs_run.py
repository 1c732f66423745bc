"""What the docs tell to run, and a laptop without a network can, runs: page by page, in order, with few steps."""

import shlex

import pytest
from test_readme import DOCS, TEXTS, commands
from typer.testing import CliRunner

from rlcourse import cli

pytestmark = pytest.mark.thorough
FEW = "--num-prompts 4 --eval-problems 8 --eval-every 0"
SHORT = {"train": f"--steps 2 {FEW}", "sft": "--steps 2 --eval-problems 8"}
# A GPU, a network, or files of the reader's.
NEEDS_MORE = ("h200", "a10g", "deepmath", "kernelbench", "MODEL", "FOLDER", "FILE", "warm", "--resume")
# Tested in full elsewhere, or they ask for what was trained before.
ELSEWHERE = ("speedrun", "grade", "lab", "eval")


def on_a_laptop(page: str) -> list[list[str]]:
    found = [words for words in commands(TEXTS[page]) if words[0] == "rlcourse" and words[1] not in ELSEWHERE]
    return [words[1:] for words in found if not any(more in " ".join(words) for more in NEEDS_MORE)]


PAGES = {page: found for page in DOCS if (found := on_a_laptop(page))}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reverse.py").write_text(TEXTS["docs/your-own-task.md"].split("```python\n")[1].split("```")[0])
    for number, (name, *rest) in enumerate(PAGES[page]):
        own_name = [] if "--name" in rest or name not in SHORT else ["--name", f"run{number}"]
        done = CliRunner().invoke(cli.app, [name, *rest, *shlex.split(SHORT.get(name, "")), *own_name])
        assert done.exit_code == 0, f"rlcourse {name} {' '.join(rest)}\n{done.output}"


def test_most_kinds_of_commands_are_among_them():
    assert {words[0] for found in PAGES.values() for words in found} >= {"train", "sft", "merge", "doctor"}
