"""What a recipe can't get by with: nothing that it reads, patches or returns makes a model count that hasn't learned in
time. `test_recipes.py` has recipes that train."""

import inspect
import os
import socket
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcourse.paths import data_folder
from rlcourse.policy import load_policy
from rlcourse.sandbox.process import GUARD, Box, find_way
from rlcourse.speedrun import verifier
from rlcourse.speedrun.verifier import EMBEDDED, Rejected, run, verify, with_weights

PLAIN = Box(
    ("sandbox/namespaces.py",), "", lambda folder: {}, {"memory_bytes": 1 << 30, "folder_bytes": 1 << 20, "files": 64}
)
START = "settings = {'steps': 1, 'num_prompts': 2, 'lr': 0.0}\n"  # returns the start model
QUICK = replace(EMBEDDED, goal=0.6, tested={"eval_problems": 100}, new=0)  # the start model solves a third


@pytest.fixture(scope="module")
def way():
    found, why = find_way(PLAIN)
    if found == GUARD:
        pytest.skip(why)
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speedrun")
    verifier.stage(load_policy("embedded"), verifier.task_of(verifier.make_config()), folder)
    return folder / "start"


def weights_of(start: Path) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in load_policy(str(start)).model.named_parameters()}


# What comes back ---------------------------------------------------------------------------------------------------

RETURNED = {
    "the weights of a larger model": lambda w: {name: torch.cat([value, value]) for name, value in w.items()},
    "a layer more than the start model has": lambda w: w | {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)},
    "a table of answers beside the weights": lambda w: w | {"answers": ["#### 31", "#### 19"]},
    "a table of answers in place of the weights": lambda w: ["#### 31", "#### 19"],
    "weights without a layer": lambda w: dict(list(w.items())[1:]),
    "weights that aren't finite": lambda w: w | {next(iter(w)): next(iter(w.values())) * torch.nan},
    "words in place of a matrix": lambda w: w | {next(iter(w)): "always 42"},
}


@pytest.mark.parametrize("what", RETURNED)
def test_only_finite_weights_of_the_start_model_count(what, start):
    weights = weights_of(start)
    device = torch.device("cpu")
    assert with_weights(start, weights, device).model.device == device
    with pytest.raises(Rejected, match="weights"):
        with_weights(start, RETURNED[what](weights), device)


def test_somebody_elses_weights_do_not_fit_into_a_recipe(start, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_bytes(b"WEIGHTS = '" + (start / "model.safetensors").read_bytes().hex().encode() + b"'")
    with pytest.raises(Rejected, match="a recipe at most 8,192"):
        next(verify(recipe))


@pytest.mark.parametrize(("test", "new"), [(0.799, 0.85), (0.95, 0.60)])
def test_the_test_problems_and_new_ones_must_both_be_solved(test, new, monkeypatch, tmp_path, start):
    """A model that has memorized the test problems fails on new ones."""
    monkeypatch.setattr(verifier, "run", lambda *_: (weights_of(start), 1.0))
    known = {problem.question for problem in verifier.task_of(verifier.make_config()).problems("test")}

    def share(policy, task, problems, config):
        return test if {problem.question for problem in problems} <= known else new

    monkeypatch.setattr(verifier, "share_right", share)
    recipe = tmp_path / "recipe.py"
    recipe.write_text(START)
    with pytest.raises(Rejected, match="The goal is 80%"):
        next(verify(recipe))
    test, new = 0.80, 0.78  # what is enough
    assert next(verify(recipe)).on_new == 0.78


def test_where_no_process_can_be_isolated_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(verifier, "find_way", lambda box: (GUARD, "this is not Linux"))
    recipe = tmp_path / "recipe.py"
    recipe.write_text(START)
    with pytest.raises(ValueError, match=r"there are none here \(this is not Linux\)"):
        next(verify(recipe))


# The clock ---------------------------------------------------------------------------------------------------------

SEND = "import os, struct, time\nsay = lambda text: struct.pack('<I', len(text)) + text\n"


@pytest.mark.parametrize("when", ["late", "in two parts", "after others"])
def test_the_clock_stops_when_all_weights_are_there(when, way):
    """And what is sent after that doesn't count."""
    code = {
        "late": "time.sleep(1); os.write(wire, say(say(b'1')))",
        "in two parts": "whole = say(say(b'1')); os.write(wire, whole[:6]); time.sleep(1); os.write(wire, whole[6:])",
        "after others": "os.write(wire, say(say(b'1'))); time.sleep(1); os.write(wire, say(say(b'2')))",
    }[when]
    began = time.perf_counter()
    found, seconds = run(way, replace(PLAIN, code=SEND + code), {}, 20)
    assert found == 1
    assert (1 < seconds <= time.perf_counter() - began) == (when != "after others")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("time.sleep(9)", "no weights within 2 seconds"),
        ("raise SystemExit('I give up')", "ended without weights. I give up"),
        ("os.write(wire, say(b'nonsense'))", "something else than weights"),
        ("os._exit(0)", "ended without weights"),
    ],
)
def test_no_weights_are_a_rejection_in_one_sentence(code, words, way):
    with pytest.raises(Rejected, match=words):
        run(way, replace(PLAIN, code=SEND + code), {}, 2)


# What a recipe can reach -------------------------------------------------------------------------------------------

TRIES = """
def reads_the_test_file():
    open(TEST_FILE).read()

def loads_the_task():
    from rlcourse.tasks import load_task
    load_task("minigsm").problems("test")

def generates_the_test_split():
    from rlcourse.tasks.minigsm import generate
    generate(4, 0, "test")

def starts_from_another_model():
    open(OTHER_MODEL, "rb").read()

def imports_the_verifier():
    import rlcourse.speedrun.verifier

def takes_more_cores():
    import os
    os.sched_setaffinity(0, os.sched_getaffinity(0))

def uses_the_network():
    import socket
    socket.create_connection(("127.0.0.1", PORT), 2).close()

def looks_at_the_verifier():
    open(f"/proc/{VERIFIER}/environ").read()

def writes_over_the_start_model():
    open(START_FILE, "ab").close()
"""


def tried(names: dict) -> list[str]:
    """Which of TRIES work, if they know `names`."""
    space, worked = dict(names), []
    exec(TRIES, space)
    for name, attempt in list(space.items()):
        if callable(attempt):
            try:
                attempt()
                worked.append(name)
            except (OSError, ImportError):
                pass
    return worked


@pytest.mark.thorough
def test_a_recipe_reaches_none_of_what_works_outside_its_box(way, tmp_path, start):
    model = data_folder() / "kernels" / "model" / "model.safetensors"
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"TEST_FILE": str(data_folder() / "minigsm" / "test.jsonl"), "OTHER_MODEL": str(model)}
        names |= {"PORT": server.getsockname()[1], "VERIFIER": os.getpid()}
        outside = tried(names | {"START_FILE": str(start / "model.safetensors")})
        assert len(outside) == TRIES.count("def ")
        inside = names | {"START_FILE": "/course/start/model.safetensors"}
        recipe = tmp_path / "recipe.py"
        told = f"raise RuntimeError('it works: ' + str(tried({inside!r})))"
        recipe.write_text(f"TRIES = {TRIES!r}\n{inspect.getsource(tried)}\n{told}")
        with pytest.raises(Rejected, match=r"it works: \[\]"):
            next(verify(recipe, QUICK))


PATCHED = {
    "time": "import time\nticks = iter(range(10**9))\ntime.perf_counter = time.monotonic = lambda: next(ticks) / 1e9",
    "the evaluator": """
        from rlcourse import evaluation
        from rlcourse.tasks import task
        evaluation.summarize = lambda answers: {"accuracy": 1.0}
        right = task.Judgement(True, {"accuracy": 1.0, "accuracy_lenient": 1.0, "formatted": 1.0}, 1.0, "right")
        task.MathTask.judge = lambda self, attempts, training: [right] * len(attempts)
        def reward(answer): return 1.0
        """,
    "the training step": "from rlcourse import train\ntrain.train_step = lambda *_: None",
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", PATCHED)
def test_whatever_a_recipe_patches_the_verifier_measures_a_model_that_has_not_learned(what, way, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(START + textwrap.dedent(PATCHED[what]))
    began = time.perf_counter()
    with pytest.raises(Rejected, match=r"% of the test problems after .* The goal is 60%") as found:
        next(verify(recipe, QUICK))
    seconds = float(str(found.value).split("after ")[1].split()[0])
    assert 1 < seconds < time.perf_counter() - began


KEEPS = """
import os
folders = [name for name in ("/tmp", "/dev/shm", "/course") if os.access(name, os.W_OK)]
if any(os.path.exists(f"{name}/kept") for name in folders):
    raise RuntimeError("it was kept")
for name in folders:
    open(f"{name}/kept", "w").close()
if not folders:
    raise RuntimeError("there is nowhere to keep it")
"""


@pytest.mark.thorough
def test_a_seed_finds_nothing_that_an_earlier_one_kept(way, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(START + KEEPS)
    assert len(list(verify(recipe, replace(QUICK, goal=0.0)))) == 2


def test_the_verdict_has_a_range_only_with_several_seeds():
    one, other = (verifier.Attempt(seed, seconds, 0.8, 0.8) for seed, seconds in ((1, 40.0), (2, 50.0)))
    assert verifier.in_short([one]) == "Verified with 1 seed: 40.0 seconds."
    assert verifier.in_short([one, other]) == "Verified with 2 seeds: 45.0 seconds on average (40.0 to 50.0)."
