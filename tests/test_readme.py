"""What README, CONTRIBUTING and docs/ name is there: links, files, commands with their options, modules, variables."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlcourse import cli
from rlcourse.config import ALGORITHMS, make_config
from rlcourse.llm import LLM
from rlcourse.measure.records import load_record
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task
from tools import front
from tools.readme import FILLED, fill, minutes

ROOT = Path(__file__).parents[1]
DOCS = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {n: (ROOT / n).read_text(encoding="utf-8") for n in ("README.md", "RECORDS.md", "CONTRIBUTING.md", *DOCS)}
EXAMPLES = {"NN_topic": "01_policy_gradient", "NN": "01", "DEVICE": "nvidia-h200", "NAME": "decode"}  # for placeholders
GROUP = typer.main.get_command(cli.app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}
MADE_BY_RUNNING = ("runs/", "build/", "FOLDER/", "SUBMISSION", "my_loop.py")
FILE = re.compile(r"[\w.-]*[\w-]/[\w./-]*|[\w-]+\.(?:py|json|yml|toml|md|ipynb|sh)")

each = pytest.mark.parametrize("name", TEXTS)


def code(text: str) -> list[str]:
    """Everything in backticks and every indented or fenced line, without comments, placeholders filled in."""
    text = re.sub("|".join(EXAMPLES), lambda match: EXAMPLES[match[0]], text)
    found = [line.partition("  #")[0].strip() for line in re.findall(r"^    (\S.*)$", text, re.M)]
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return found + re.findall(r"`([^`\n]+)`", text)


def commands(text: str) -> list[list[str]]:
    """The words of each command, e.g. ["rlcourse", "train", "--seed", "1"]."""
    parts = [part.strip() for line in code(text) for part in line.split("&&")]
    return [shlex.split(part) for part in parts if re.match(r"(rlcourse|python|pytest|[\w./-]+\.sh) ", part)]


def test_the_tables_are_those_of_the_records():
    """`python -m tools.readme` makes them."""
    for name in FILLED:
        assert fill(TEXTS[name]) == TEXTS[name]


def test_the_picture_shows_the_records():
    """`python -m tools.readme` draws it anew when they changed."""
    assert front.shown(ROOT / "data" / "headline.png") == front.digest()


def test_the_hours_are_those_that_exercises_state():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "exercises" / "_src").glob("*.py")]
    stated = [sum(map(int, re.findall(r"(?<=[●○] · )\d+(?= minutes)", text))) for text in texts]
    assert sorted(minutes("exercises")) == sorted(stated) and len(stated) == len(minutes("notebooks"))


def test_a_checkpoint_that_is_named_is_the_last_of_its_run():
    """That of the warm start."""
    named = re.findall(r"checkpoints/step-(\d+)", TEXTS["docs/kernel-tasks.md"])
    assert named == [f"{make_config('kernelbench').steps:06d}"]


@each
def test_every_link_leads_to_a_file(name):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]) if "://" not in link]
    targets = [((ROOT / name).parent / link.partition("#")[0] if link[0] != "#" else ROOT / name) for link in links]
    assert [link for link, target in zip(links, targets, strict=True) if not target.exists()] == []
    for link, target in zip(links, targets, strict=True):
        anchor = link.partition("#")[2]
        assert not anchor or anchor in anchors(target), link
    assert name != "README.md" or len(links) > 30


def anchors(path: Path) -> list[str]:
    """What a heading is called in a link, as GitHub does it."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@each
def test_every_file_that_is_named_is_there(name):
    words = [word for line in code(TEXTS[name]) for word in re.split(r"[\s,()\"'=]+", line)]
    words = {word for word in words if FILE.fullmatch(word) and not word.startswith(MADE_BY_RUNNING)}
    bare = {path.name for kind in ("rlcourse", "data") for path in (ROOT / kind).rglob("*.*")}
    assert [word for word in sorted(words) if not (ROOT / word).exists() and word not in bare] == []


def test_every_function_of_the_map_is_defined_where_it_says():
    named = re.findall(r"`(\w+)` in `(rlcourse/[\w/]+\.py)`", TEXTS["docs/map.md"])
    defined = r"^\s*(?:def |class )?{}\b(?:\(|:| =)"
    assert len(named) > 20
    assert [at for at in named if not re.search(defined.format(at[0]), (ROOT / at[1]).read_text(), re.M)] == []


@each
def test_every_command_is_one_that_there_is(name):
    found = commands(TEXTS[name])
    for words in found:
        if words[0] == "rlcourse":
            rest = [word for word in words[2:] if word != "--help"]
            COMMANDS[words[1]].make_context(words[1], rest)  # raises for an unknown option or a wrong value
        elif words[:3] == ["python", "-m", "pip"]:
            extras = re.findall(r"\[([\w,]+)\]", words[-1])
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert all(extra in known for extra in ",".join(extras).split(",") if extra), words
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
    assert found or name in ("docs/architectures.md", "docs/map.md", "docs/troubleshooting.md")


@each
def test_every_option_and_variable_is_one_that_there_is(name):
    options = {flag for command in COMMANDS.values() for option in command.params for flag in option.opts}
    others = ("py", "comp", "VLLM_", "--logprobs-mode")  # commands of other programs
    words = {word for line in code(TEXTS[name]) for word in line.split() if not line.strip().startswith(others)}
    written = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
    folders = (ROOT / name for name in ("rlcourse", "tools", "tests"))
    sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    assert [word for word in written - options - {"--help"} if f'"{word}"' not in sources] == []
    assert [variable for variable in re.findall(r"RLCOURSE_\w+", TEXTS[name]) if variable not in sources] == []


def test_all_algorithms_are_listed():
    [listed] = re.findall(r"algorithms: ([\w, ]+)\.", TEXTS["docs/algorithms.md"])
    assert listed.strip().split(", ") == list(ALGORITHMS)


def test_the_answers_in_the_readme_are_those_of_the_embedded_model():
    """Before training, word for word; after it, one that is right and works the problem out."""
    text = TEXTS["README.md"]
    [question] = re.findall(r"^> \*(.+)\*\\$", text, re.M)
    [before], [after] = (re.findall(rf"^> \*\*{when}:\*\* `(.+)`\\?$", text, re.M) for when in ("Before", "After"))
    [problem] = [problem for problem in load_task("minigsm").problems("test") if problem.question == question]
    [[answer]] = LLM("embedded").generate([question], Sampling(temperature=0.0))
    assert answer.text == before and after.endswith(f"#### {problem.gold}") and before != f"#### {problem.gold}"


def test_a_step_is_as_much_faster_than_trls_as_the_readme_says():
    steps = {(row["variant"], row["rows"]): row["step_s"] for row in load_record("step", "nvidia-h200")["results"]}
    times = sorted(round(steps["trl-vllm", rows] / steps["rlcourse", rows]) for rows in (16, 64))
    assert "[{} to {} times as long](RECORDS.md#next-to-peers)".format(*times) in TEXTS["README.md"]


def test_decoding_is_as_much_faster_than_vllms_as_the_readme_says():
    rate = {
        (row["variant"], row["rows"]): row["tokens_per_s"] for row in load_record("decode", "nvidia-h200")["results"]
    }
    vllm = {n: max(rate[name, n] for name in ("vllm", "vllm-v2", "vllm-v2-process")) for n in (16, 64, 256)}
    times = sorted(round(rate["graph-exact-again", n] / best) for n, best in vllm.items())
    assert f"[{times[0]} to {times[-1]} times](RECORDS.md#decoding)" in TEXTS["README.md"]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 7168


def test_every_promise_has_a_test_that_is_there():
    """`tests/PROMISES.md` names, for what README and the docs promise, tests that are there."""
    rows = [line.split("|")[1:3] for line in (ROOT / "tests/PROMISES.md").read_text().splitlines() if line[:2] == "| "]
    for promise, tests in rows[2:]:
        if promise.strip().startswith("**"):
            continue  # the title of a group
        named = re.findall(r"`([\w/.]+)(?:::(\w+))?`", tests)
        assert named, promise
        for file, test in named:
            path = ROOT / "tests" / file if file.endswith(".py") else ROOT / file
            assert f"def {test}" * bool(test) in path.read_text(), (promise, file, test)


# What the docs tell to run, runs


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


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page, tmp_path, monkeypatch):
    """What a laptop without a network can run, in order, with few steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reverse.py").write_text(TEXTS["docs/your-own-task.md"].split("```python\n")[1].split("```")[0])
    for number, (name, *rest) in enumerate(PAGES[page]):
        own_name = [] if "--name" in rest or name not in SHORT else ["--name", f"run{number}"]
        done = CliRunner().invoke(cli.app, [name, *rest, *SHORT.get(name, "").split(), *own_name])
        assert done.exit_code == 0, f"rlcourse {name} {' '.join(rest)}\n{done.output}"


@pytest.mark.thorough
def test_most_kinds_of_commands_are_among_them():
    assert {words[0] for found in PAGES.values() for words in found} >= {"train", "sft", "merge", "doctor"}
