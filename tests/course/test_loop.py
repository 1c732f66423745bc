"""The loop that readers build in the exercises of lessons 01 to 05: the solutions make one that trains, and its parts
are the package's."""

import pytest
import torch
from answers import given

from rlcourse.course.loop import task
from rlcourse.course.own import load_loop, loop_file, save_loop
from rlcourse.logprobs import PlainPass
from rlcourse.policy import load_policy
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling

# By lesson, what its exercises save: {function of the loop: what it is called in the exercises}.
SAVED = {
    "nb01": {name: name for name in ("sample", "log_probs", "verify", "weigh", "loss")},
    "nb02": {"loss": "clipped"},
    "nb03": {"weigh": "normalized", "loss": "grpo"},
    "nb04": {"weigh": "centered", "loss": "dr_grpo"},
    "nb05": {"verify": "verify_real"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCOURSE_MY_LOOP", str(tmp_path / "my_loop.py"))


def played(lessons):
    """The loop of a reader who solved the exercises of these lessons."""
    for lesson in lessons:
        save_loop(**{name: given(lesson, function) for name, function in SAVED[lesson].items()})
    return load_loop()


def test_a_reader_who_skips_gets_ours_and_one_who_solves_lesson_01_gets_a_loop_that_trains_like_it(capsys):
    ours = load_loop()
    assert "our loop" in capsys.readouterr().out
    theirs = played(["nb01"])
    assert "your my_loop.py" in capsys.readouterr().out
    ours.PROMPTS = theirs.PROMPTS = 2
    (_, expected), (policy, log) = (loop.train(2, every=3, problems=8) for loop in (ours, theirs))
    assert log == expected and len(log) == 3
    start = load_policy("embedded").model.state_dict()
    assert not any(torch.equal(start[name], value) for name, value in policy.model.state_dict().items())


@pytest.mark.parametrize("lesson", SAVED)
def test_the_loop_after_each_lesson_takes_a_step(lesson):
    loop = played(list(SAVED)[: list(SAVED).index(lesson) + 1])
    loop.PROMPTS = 2
    _, log = loop.train(1, updates=2, problems=8)
    assert len(log) == 2 and 0 < log[0]["length"] <= loop.LIMIT


@pytest.mark.thorough
def test_the_loop_built_from_all_solutions_solves_80_percent_of_the_test_problems():
    loop = played(SAVED)
    loop.PROMPTS = 16  # the package's default: with 4, a run ends between 78 and 83 percent
    policy, _ = loop.train(40, every=40, problems=8)
    assert loop.greedy_accuracy(policy, 1000, "test") > 0.8


def test_its_parts_compute_what_the_packages_do():
    loop, policy = load_loop(), load_policy("embedded")
    problems = task.problems("train")[:8]
    torch.manual_seed(0)
    rollout = make_engine(policy, "fast", torch.float32).generate(
        [policy.prompt(problem.question) for problem in problems], loop.GROUP, loop.LIMIT, Sampling()
    )
    with torch.no_grad():
        found = loop.token_log_probs(policy, rollout)
        theirs, _ = PlainPass(policy.model, "float32").token_logprobs(rollout, Sampling(), 512)
    mask = loop.answer_mask(rollout)
    assert torch.equal(mask.sum(1), rollout.completion_lengths) and (found[~mask] == 0).all()
    torch.testing.assert_close(found[mask], theirs[rollout.completion_mask], atol=1e-4, rtol=0)
    texts = policy.texts(rollout.completion_ids, rollout.completion_mask)
    golds = [problem.gold for problem in problems for _ in range(loop.GROUP)]
    strict = [task.verify(text, gold).strict for text, gold in zip(texts, golds, strict=True)]
    rewards = loop.judge(policy, problems, rollout)
    assert rewards.tolist() == (torch.tensor(strict) & rollout.finished).float().tolist() and 0 < rewards.mean() < 1


def test_what_a_function_uses_of_its_notebook_goes_with_it():
    names = {"torch": torch, "math": __import__("math"), "Sampling": Sampling, "FLOOR": 0.25}
    import linecache

    text = "def halved(x):\n    return x / 2\n\n\ndef mine(rewards, group):\n"
    text += "    return halved(rewards) + math.floor(FLOOR) + FLOOR * Sampling().temperature\n"
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(True), "<cell>")
    exec(compile(text, "<cell>", "exec"), names)
    loop = save_loop(weigh=names["mine"])
    assert loop.weigh(torch.ones(4), 4).tolist() == [0.75] * 4
    names["halved"] = names["mine"].__globals__["halved"] = lambda x: x
    assert save_loop(weigh=given("nb01", "weigh")).weigh(torch.ones(4), 4).tolist() == [0.0] * 4


def test_what_cannot_be_saved_is_told_in_a_sentence():
    with pytest.raises(ValueError, match=r"no function reward: it has sample, .*weigh"):
        save_loop(reward=given("nb01", "weigh"))
    with pytest.raises(ValueError, match=r"source of weigh cannot be found"):
        save_loop(weigh=eval("lambda rewards, group: rewards"))
    assert not loop_file().exists()
