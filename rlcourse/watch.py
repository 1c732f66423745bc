"""Runs that can't learn, or have stopped learning, without an error: how a run notices, and what it says.

Each check returns warnings by kind; a run says each kind once. A warning says what happened, why, what to do, and
shows one real answer.
"""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from statistics import fmean
from typing import Any

import torch

from rlcourse.config import GROUPED, TrainConfig
from rlcourse.interrupts import say
from rlcourse.tasks import Answer

WINDOW = 3  # steps in a row that must agree: one step without signal is bad luck
GROUPS = 24  # groups in a row, too: few may have no signal by chance
START = 5  # steps that say what lengths and entropy were at the start
SHORT, SURE = 0.4, 0.05  # shares of the length, and of the entropy, at the start: less is a collapse
MOST = 0.5  # the share from which "most" is true
APART = 0.02  # nats per token: rounding in bfloat16 makes less than 0.01 where a model is sure of most tokens
FEW = 0.2  # share of problems or examples that may be left out without a warning
LITTLE = 0.9  # share of groups without signal
LARGEST = 1e15  # of rewards: their squares overflow float32 beyond 1e19
SHOWN = 300  # characters of an answer

Warnings = dict[str, str]


def warn_of_mismatch(config: TrainConfig, exact: bool, device: torch.device) -> None:
    """Say where the sampler's log-probs can differ from the trainer's: in 16 bits, unless both are exact, and with vLLM
    in any case."""
    if not exact and (config.dtype != "float32" or config.engine.startswith("vllm")):
        say(
            f"Engine and trainer round differently on {device}: `mismatch_mean` in metrics.jsonl says by how much, and "
            "--sampler-correction token makes up for it."
        )


def left_out(kept: int, of: int, what: str, remedy: str) -> Warnings:
    """Say how many were not kept; a warning if they're many. what: such as "examples, ...", and why."""
    sentence = f"Left out {of - kept:,} of {of:,} {what}"
    if of - kept > FEW * of:
        return {"left_out": f"{sentence}: {remedy}."}
    if kept < of:
        say(f"{sentence}.")
    return {}


def before_training(greedy: list[Answer], groups: list[list[Answer]], config: TrainConfig) -> Warnings:
    """What an evaluation says of the training to come. greedy: one answer per problem; groups: several sampled."""
    found = unreadable(greedy) | cut_off(greedy, config)
    if groups:
        sampled = [answer for group in groups for answer in group]
        rewards = [[answer.verdict.reward for answer in group] for group in groups]
        found |= pays_for_form(sampled, [reward for group in rewards for reward in group], config)
        same = all(len(set(group)) == 1 for group in rewards)
        if config.advantage in GROUPED and same and "unreadable" not in found:
            tries = f"{len(groups)} problems, sampled {len(groups[0])} times each"
            found |= no_signal(f"Of {tries}, none", sampled, rewards, config)
    return found


def after_step(
    steps: list[dict[str, Any]], answers: list[Answer], rewards: list[float], config: TrainConfig
) -> Warnings:
    """What the steps so far say. steps: the metrics of each; answers, rewards: those of the last one."""
    found = pays_for_form(answers, rewards, config)
    recent = steps[-WINDOW:]
    if len(recent) < WINDOW:
        return found
    if all(step["truncated"] > MOST for step in recent):
        found |= cut_off(answers, config)
    found |= apart(recent, config)
    patience = max(WINDOW, -(-GROUPS // config.num_prompts))
    if len(steps) >= patience:
        if not any(had_signal(step, config) for step in steps[-patience:]):
            groups = [rewards[i : i + config.num_generations] for i in range(0, len(rewards), config.num_generations)]
            return found | no_signal(f"In each of the last {patience} steps, no group", answers, groups, config)
        found |= little_signal(steps[-patience:], answers, config)
    if all(had_signal(step, config) and (step["grad_norm"] == 0 or step["lr"] == 0) for step in recent):
        found["no_update"] = (
            f"The weights did not change in the last {WINDOW} steps, though rewards differ within groups: check "
            f"--lr ({config.lr:g}), --warmup-steps and --schedule."
        )
    return found | collapse(steps, answers)


def had_signal(step: dict[str, Any], config: TrainConfig) -> bool:
    """Whether a step had two different rewards to compare: within a group, or in the batch."""
    return step["groups_without_signal"] < 1 if config.advantage in GROUPED else step["reward_std"] > 0


def apart(steps: list[dict[str, Any]], config: TrainConfig) -> Warnings:
    """The sampler's log-probs are far from the trainer's, and nothing corrects for it."""
    means = [step["mismatch_mean"] or 0.0 for step in steps]
    if config.sampler_correction != "off" or min(means) < APART:
        return {}
    return {
        "mismatch": f"Sampler and trainer differ by {sum(means) / len(means):.3f} nats per token, up to "
        f"{max(step['mismatch_max'] for step in steps):.1f}, so answers come from another policy than the one that "
        "trains. --sampler-correction token corrects for it."
    }


def little_signal(steps: list[dict[str, Any]], answers: list[Answer], config: TrainConfig) -> Warnings:
    """Hardly any group has different rewards, so steps learn from a handful of answers."""
    without = sum(step["groups_without_signal"] for step in steps) / len(steps)
    if config.advantage not in GROUPED or without < LITTLE:
        return {}
    return {
        "little_signal": f"In the last {len(steps)} steps, only {1 - without:.0%} of the groups had two answers with "
        f"different rewards, and the others teach nothing. Try a lower --temperature than {config.temperature:g}, more "
        "--num-generations, easier problems, or `rlcourse sft` first. For example: "
        f"{quoted(answers[0])}"
    }


def unreadable(answers: list[Answer]) -> Warnings:
    """Answers whose number is right, in a form that isn't rewarded."""
    lenient = [a for a in answers if not a.right and a.verdict.metrics.get("accuracy_lenient")]
    right = sum(a.right for a in answers)
    if len(lenient) < 0.05 * len(answers) or len(lenient) <= right:
        return {}
    return {
        "unreadable": f"{share(right + len(lenient), answers)} of the answers end in the right number, but only "
        f"{share(right, answers)} write it in the form that is rewarded. The model can't find a form that it never "
        "tries: show it with --examples 2, or reward any final number with --reward-parser lenient. For example: "
        f"{quoted(lenient[0])}"
    }


def cut_off(answers: list[Answer], config: Any) -> Warnings:
    """Most answers hit the token limit."""
    cut = [a for a in answers if not a.finished]
    if len(cut) <= MOST * len(answers):
        return {}
    return {
        "cut_off": f"{share(len(cut), answers)} of the answers are cut off after {config.max_new_tokens} tokens, and "
        f"an answer that is cut off earns nothing: raise --max-new-tokens. For example: {quoted(cut[0])}"
    }


def pays_for_form(answers: list[Answer], rewards: Iterable[float], config: TrainConfig) -> Warnings:
    """Most of the reward goes to wrong answers that are written in the right form."""
    wrong = [(a, r) for a, r in zip(answers, rewards, strict=True) if not a.right and r > 0]
    paid, total = sum(r for _, r in wrong), sum(r for r in rewards if r > 0)
    if config.reward_format <= 0 or total <= 0 or paid <= MOST * total:
        return {}
    return {
        "form": f"{paid / total:.0%} of the reward goes to wrong answers, for their form alone. The policy will learn "
        "the form and drop the work: use --reward-format 0, and --examples 2 to show the form. For example, this "
        f"earned {wrong[0][1]:g}: {quoted(wrong[0][0])}"
    }


def no_signal(whose: str, answers: list[Answer], groups: list[list[float]], config: TrainConfig) -> Warnings:
    """No rewards to compare, so no gradient: why, and what to do."""
    earned = {reward for group in groups for reward in group}
    right = sum(a.right for a in answers)
    if len(earned) == 1 and right < len(answers) and (right > 0 or max(earned) > 0):
        why = f"every answer earns {max(earned):g}, whatever it says: check the task's judge"
    elif right == 0 and any(a.verdict.metrics.get("accuracy_lenient") for a in answers):
        remedy = "reward any form with --reward-parser lenient" if config.examples else "show it with --examples 2"
        why = f"right answers are not in the form that is rewarded: {remedy}"
    elif right == 0:
        # Only tasks with two readings of an answer have worked examples.
        examples = "--examples 2, " if "accuracy_lenient" in answers[0].verdict.metrics and not config.examples else ""
        why = f"no answer is right: try easier problems, a stronger model, {examples}or `rlcourse sft` first"
    elif right == len(answers):
        why = "every answer is right: there is nothing left to learn here, so use harder problems"
    else:
        why = "a prompt's answers are all right or all wrong: raise --num-generations or --temperature"
    return {
        "no_signal": f"{whose} has two answers with different rewards, so there is no gradient and nothing is learned: "
        f"{why}. For example, this earned {groups[0][0]:g}: {quoted(answers[0])}"
    }


def collapse(steps: list[dict[str, Any]], answers: list[Answer]) -> Warnings:
    """The reward rises while answers shrink, or while sampling stops varying."""
    if len(steps) < START + WINDOW:
        return {}

    def change(name: str) -> tuple[float, float]:
        return fmean(step[name] for step in steps[:START]), fmean(step[name] for step in steps[-WINDOW:])

    (low, high), found = change("reward"), {}
    rise = f"while the mean reward rose from {low:.2f} to {high:.2f}"
    advice = "Look at the samples: if it earns without solving, fix the reward; else try a lower --lr"
    for name, limit, unit in (("length", SHORT, "tokens per answer"), ("entropy", SURE, "nats of entropy per token")):
        before, now = change(name)
        if high > low and now < limit * before:
            found[f"{name}_collapse"] = (
                f"Down from {before:.3g} to {now:.3g} {unit} {rise}. The policy may be collapsing onto one kind of "
                f"answer. {advice}. For example: {quoted(answers[0])}"
            )
    return found


def check_rewards(rewards: Sequence[Any], answers: list[Answer], source: str) -> None:
    """Raise ValueError unless there is a reward per answer, and each reward and metric is a number whose square is
    finite. source: what gave them."""
    if len(rewards) != len(answers):
        raise ValueError(f"The {source} gave {len(rewards)} rewards for {len(answers)} answers: return one for each.")
    for reward, answer in zip(rewards, answers, strict=True):
        for what, value in [("reward", reward), *answer.verdict.metrics.items()]:
            one = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)
            number = one and abs(value) < LARGEST
            if not number and (value is not None or what == "reward"):
                raise ValueError(
                    f"The {source} gave an answer a {what} of {value!r}, which is no finite number below {LARGEST:g}: "
                    f"fix it. The answer: {quoted(answer)}"
                )


def check_metrics(metrics: dict[str, Any]) -> None:
    """Raise RuntimeError if a metric of a step isn't finite."""
    bad = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        raise RuntimeError(
            f"Step {metrics['step']} ended the run: {', '.join(bad)} stopped being finite. Checkpoints stay as they "
            "are: start a new run with a lower --lr."
        )


def share(count: int, answers: list[Answer]) -> str:
    return f"{count / len(answers):.1%}"


def quoted(answer: Answer) -> str:
    """The end of an answer, and what would have been right."""
    text = " ".join(answer.text.split())
    text = text if len(text) <= SHOWN else f"… {text[-SHOWN:]}"
    return f"“{text}” (asked: “{answer.problem.question[-80:].strip()}”, right: {answer.problem.gold})"
