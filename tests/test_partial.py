"""Partial rollouts against whole ones: the same answers while the weights stay, each trained on once, and none lost."""
# ruff: noqa: F811 (fixtures of test_trainer)

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from policies import DEVICE, BruteForce, make_policy, rollout_of, rows_of
from test_trainer import TINY, PowerCut, assert_same_run, at_step, folder, power_cut, use_the_toy  # noqa: F401

from rlcourse.checkpoint import latest_checkpoint, load_state
from rlcourse.collect import staleness
from rlcourse.config import make_config
from rlcourse.partial import Answer, Group, load_waiting, roll_out_partly, waiting_state
from rlcourse.rollout import make_engine
from rlcourse.runs import RunFolder, read_lines
from rlcourse.sampling import GREEDY
from rlcourse.step import old_logprobs
from rlcourse.tasks import MathTask, Problem
from rlcourse.tasks.prompts import PromptSampler
from rlcourse.trainer import resume, train

STEPS = 6
CONFIG = make_config(num_prompts=3, num_generations=4, max_new_tokens=12, partial_rollout_tokens=3, steps=STEPS)
PROBLEMS = [Problem(f"{'Tom has ' * (n % 3)}{n}", "", str(n)) for n in range(7)]
TASK = MathTask("numbers", "", PROBLEMS, [], [])


# The same answers while the weights stay


@pytest.fixture(scope="module")
def policy():
    """Every third token ends a completion."""
    made = make_policy()
    made.eos_ids = list(range(0, 300, 3))
    made.model.generation_config.eos_token_id = made.eos_ids
    return made


@pytest.mark.parametrize("name", ["brute force", "hf-dynamic", "hf-static", "fast"])
def test_greedy_answers_are_those_of_whole_rollouts(name, policy):
    engine = BruteForce(policy) if name == "brute force" else make_engine(policy, name, torch.float32)
    config = SimpleNamespace(**dataclasses.asdict(CONFIG) | {"num_generations": 2, "sampling": GREEDY})
    prompts, answered, ages = PromptSampler(PROBLEMS, 0), [], set()
    for _ in range(STEPS):
        problems, rollout = roll_out_partly(policy, engine, TASK, prompts, config)
        asked = [policy.prompt(problem.question) for problem in problems]
        expected = BruteForce(policy).generate(asked, 2, 12, GREEDY)
        ours, theirs = rows_of(rollout), rows_of(expected)
        assert [(p, c, ended) for p, c, _, ended in ours] == [(p, c, ended) for p, c, _, ended in theirs]
        torch.testing.assert_close(rollout.logprobs, expected.logprobs, atol=1e-4, rtol=0)
        answered += [p for p, _, _, _ in ours[::2]]
        ages |= {len(c) for _, c, _, _ in ours}
    whole = [policy.prompt(problem.question) for problem in PromptSampler(PROBLEMS, 0).peek(18)]
    assert sorted(answered) == sorted(whole)
    assert len({(n - 1) // 3 for n in ages}) >= 3 and min(ages) <= 3  # of one rollout, and of several


# Each trained on once


class Numbered:
    """Each token that it samples is another number, from 1000 on; its log-prob is that number / -1000."""

    exact = False

    def __init__(self, seed: int, ends: float):
        self.dice, self.ends, self.next, self.step, self.sampled = random.Random(seed), ends, 1000, 0, {}

    def generate(self, prompts, num_generations, max_new_tokens, sampling):
        assert num_generations == 1 and max_new_tokens == 3 and prompts
        rows = []
        for prompt in prompts:
            ended = self.dice.random() < self.ends
            length = self.dice.randint(1, 3) if ended else 3
            tokens = list(range(self.next, self.next + length))
            self.next += length
            for place, token in enumerate(tokens):
                self.sampled[token] = self.step, [*prompt, *tokens[:place]]
            rows.append((prompt, tokens, [-token / 1000 for token in tokens], ended))
        prompts, tokens, logprobs, ended = map(list, zip(*rows, strict=True))
        return rollout_of(list(zip(prompts, tokens, strict=True)), logprobs, ended)


class Letters:
    """The prompt of question n is n + 1 sevens and the number n."""

    device, pad_id = torch.device(DEVICE), 5

    def prompt(self, question, instruction="", examples=()):
        n = int(question.split()[-1])
        return [7] * (n + 1) + [n]

    def prompts(self, questions, instruction="", examples=()):
        return [self.prompt(question, instruction) for question in questions]

    def texts(self, ids, mask):
        return ["x"] * len(ids)


def steps_of(engine, seed: int = 0, steps: int = STEPS, config=CONFIG):
    """(step, problems, rollout) of a run, and the source of its prompts."""
    prompts = PromptSampler(PROBLEMS, seed)
    for step in range(steps):
        engine.step = step
        yield (step, *roll_out_partly(Letters(), engine, TASK, prompts, config), prompts)


@pytest.mark.parametrize("ends", [0.02, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_trains_once_whole_and_beside_its_group(ends, seed):
    engine, trained, asked, latest, gone = Numbered(seed, ends), [], [], 0, set()
    for step, problems, rollout, prompts in steps_of(engine, seed):
        rows = rows_of(rollout)
        assert len(problems) == 3 and len(rows) == 12
        versions = rollout.versions.tolist()
        for i, (prompt, tokens, logprobs, ended) in enumerate(rows):
            assert prompt == Letters().prompt(problems[i // 4].question)
            assert 1 <= len(tokens) <= 12 and (ended or len(tokens) == 12)
            for place, token in enumerate(tokens):
                version, before = engine.sampled[token]
                assert before == prompt + tokens[:place] and versions[i][place] == version
                assert logprobs[place] == pytest.approx(-token / 1000)
            assert not any(versions[i][len(tokens) :])
            trained += tokens
        late = staleness(rollout, step)
        ages = [step - engine.sampled[token][0] for _, tokens, _, _ in rows for token in tokens]
        assert late["staleness_max"] == max(ages) and late["staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        latest = max(latest, max(ages))
        asked += [problem.question for problem in problems]
        assert prompts.position - len(prompts.waiting) == 3 * (step + 1)
        begun = [group.position for group in prompts.waiting]
        chosen = set(range(prompts.position)) - {*begun} - gone
        assert begun == sorted(begun) and len(chosen) == 3
        assert all(max(chosen) < group.position for group in prompts.waiting if group.done(CONFIG))  # the oldest first
        gone |= chosen
    assert sorted(trained) == sorted(engine.sampled)  # nothing was sampled for nothing
    assert sorted(asked) == sorted(problem.question for problem in PromptSampler(PROBLEMS, seed).peek(18))
    assert prompts.waiting == []
    assert (latest > 0) == (ends < 1)


def test_a_step_waits_for_a_part_of_the_longest_answer():
    """With answers of which some are long, a step takes about one rollout, not four."""
    engine, rollouts = Numbered(1, 0.5), []
    generate = engine.generate
    engine.generate = lambda *arguments: rollouts.append(engine.step) or generate(*arguments)
    assert len(list(steps_of(engine, steps=30, config=dataclasses.replace(CONFIG, steps=40)))) == 30
    assert sum(step >= 5 for step in rollouts) <= 1.5 * 25


def test_a_step_beyond_the_run_begins_what_it_needs():
    engine = Numbered(0, 0.5)
    assert [len(problems) for _, problems, _, _ in steps_of(engine, steps=STEPS + 2)] == [3] * (STEPS + 2)


def test_log_probs_of_older_weights_are_not_the_trainer_s_even_where_both_are_exact():
    rollout = rollout_of([([1], [2, 3])], [[-1.0, -2.0]])
    late = dataclasses.replace(rollout, versions=torch.zeros_like(rollout.ids[:, 1:]))
    learner = SimpleNamespace(
        exact=True,
        config=SimpleNamespace(minibatches=1),
        logprobs_and_values=lambda rollout: (torch.full_like(rollout.logprobs, -5.0), None),
        world=SimpleNamespace(total=lambda values: values),
    )
    twice = [SimpleNamespace(micro_batches=[torch.tensor([0])])] * 2
    for of, expected in ((rollout, [-1.0, -2.0]), (late, [-5.0, -5.0])):
        found = old_logprobs(learner, SimpleNamespace(exact=True), SimpleNamespace(rollout=of), twice)
        assert found.tolist() == [expected]


# Runs


@pytest.fixture
def runs(folder, tmp_path, monkeypatch) -> dict:
    use_the_toy(monkeypatch)
    return TINY | {"model": folder, "partial_rollout_tokens": 1, "sampler_correction": "token", "lr": 3e-3}


def test_a_run_that_is_cut_off_goes_on_with_the_answers_that_it_had_begun(runs, tmp_path, monkeypatch):
    train(make_config(**runs | {"output": str(tmp_path / "whole")}))
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log_step", at_step(5, power_cut))
        with pytest.raises(PowerCut):
            train(make_config(**runs | {"output": str(tmp_path)}))
    run, whole = tmp_path / "run", tmp_path / "whole" / "run"
    assert load_state(latest_checkpoint(run))["waiting"]
    torch.manual_seed(12345)
    resume(name="run", output=str(tmp_path))
    assert_same_run(run, whole)
    state = load_state(latest_checkpoint(run))
    assert state["waiting"] == [] and state["prompts_sampled"] == 7 * 2
    late = [line["staleness_max"] for line in read_lines(run / "metrics.jsonl")]
    assert late[0] == 0 and max(late) >= 1
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [*range(1, 8)]


def test_state_of_another_run_is_refused():
    prompts = PromptSampler(PROBLEMS, 0)
    prompts.sample(8)
    prompts.waiting = [Group(n, [1, 2], [Answer([3], [-0.5], [1], True)] * 4) for n in (4, 7)]
    state = waiting_state(prompts)
    fresh = PromptSampler(PROBLEMS, 0)
    fresh.position = 8
    load_waiting(state, fresh, 2, CONFIG)
    assert fresh.waiting == prompts.waiting
    for damaged, steps in ((state[:1], 2), (state, 1), ([state[0], state[1] | {"answers": []}], 2)):
        with pytest.raises(ValueError, match="missing"):
            load_waiting(damaged, fresh, steps, CONFIG)
    load_waiting([], fresh, 5, make_config())  # whole rollouts leave nothing


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 80, "partial_rollout_tokens": 32}, "max_new_tokens must be a multiple of 32"),
        ({"partial_rollout_tokens": 100}, "multiple of 100"),
        ({"partial_rollout_tokens": 20, "dynamic_sampling": True}, "do not go with dynamic sampling"),
        ({"partial_rollout_tokens": 20, "overlap": True, "sampler_correction": "token"}, "do not go with dynamic"),
        ({"partial_rollout_tokens": 20, "shard": True}, "every rank samples whole answers"),
        ({"overlap": True, "sampler_correction": "token", "shard": True}, "every rank samples whole answers"),
    ],
)
def test_what_cannot_work_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        make_config(**settings)
