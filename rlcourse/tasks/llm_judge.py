"""A language model that is asked about texts and answers in scores: behind an endpoint, or in our own engine.

Whatever goes wrong stops nobody: who asks gets None for what has no scores. Answers are kept in a file, so that nothing
is asked twice.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlcourse.files import append_json, read_lines, write_text
from rlcourse.tasks.endpoint import MOST_TOKENS, Conversation, Reply

MOST_CHARACTERS = 20_000  # of an answer in which scores are looked for
LOCAL_ROWS = 32  # that a model of our own answers at once


class Model(Protocol):
    """Whom a judge asks. name: of the model, of which answers are kept; reason: of the last failure."""

    name: str
    reason: str

    def replies(self, conversations: list[Conversation]) -> list[Reply | None]:
        """A reply to each conversation, None where there is none."""
        ...


class LocalModel:
    """A model in our own engine, on this machine: a folder, or a name on the hub. It answers greedily.

    Raises ValueError or FileNotFoundError for one that cannot be loaded, or that takes no instructions.
    """

    def __init__(self, name: str, device: str = "auto"):
        from rlcourse.llm import LLM

        self.name, self.reason, self.llm = name, "", LLM(name, device=device)
        try:
            self.llm.policy.prompt("Which?", "Judge.")
        except Exception as error:  # whatever a chat template does
            raise ValueError(f"{name} cannot judge: its chat template takes no instructions ({error}).") from None

    def replies(self, conversations: list[Conversation]) -> list[Reply | None]:
        found: list[Reply | None] = []
        for first in range(0, len(conversations), LOCAL_ROWS):
            found += self._replies(conversations[first : first + LOCAL_ROWS])
        self.llm.sleep()  # its memory is needed for the update
        return found

    def _replies(self, conversations: list[Conversation]) -> list[Reply | None]:
        import torch

        from rlcourse.sampling import GREEDY

        policy = self.llm.policy
        prompts = [policy.prompt(user, system) for system, user in conversations]
        room = getattr(policy.model.config, "max_position_embeddings", 1 << 30) - MOST_TOKENS
        short = [i for i, prompt in enumerate(prompts) if len(prompt) <= room]
        if len(short) < len(prompts):
            self.reason = f"{self.name} reads {room} tokens at most, and a question has more"
        replies: list[Reply | None] = [None] * len(prompts)
        devices = [policy.device] if policy.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                groups = self.llm.generate([prompts[i] for i in short], GREEDY, MOST_TOKENS) if short else []
        except (RuntimeError, ValueError) as error:  # too little memory, or nothing finite
            self.reason = str(error).splitlines()[0]
            return replies
        for i, (answer,) in zip(short, groups, strict=True):
            replies[i] = Reply(answer.text, len(prompts[i]), len(answer.tokens))
        return replies


@dataclass(frozen=True)
class Scored:
    """Scores from 0 to 1 by name, None where there are none; whether an earlier answer gave them."""

    scores: dict[str, float] | None
    cached: bool = False


class Judge:
    """Asks a model for scores and keeps them in `file`, a line of JSON for each reply.

    names: of the scores.
    """

    def __init__(self, model: Model, names: Iterable[str], file: Path):
        self.model, self.names, self.file = model, tuple(names), file
        self.known: dict[str, dict[str, float]] = {}
        self.totals = {"replies": 0, "prompt_tokens": 0, "completion_tokens": 0}
        lines = read_lines(file)
        if lines:  # a last one that a kill cut short would spoil the next
            write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
        for line in lines:
            self._keep(line)

    def ask(self, conversations: list[Conversation]) -> list[Scored]:
        """The scores for each conversation. Those that were given before are not asked for again."""
        keys = [self._key(conversation) for conversation in conversations]
        new = {key: one for key, one in zip(keys, conversations, strict=True) if key not in self.known}
        found = {key: Scored(self.known[key], cached=True) for key in keys if key in self.known}
        for key, reply in zip(new, self.model.replies(list(new.values())), strict=True):
            found[key] = Scored(None) if reply is None else self._score(key, reply)
        scored = []
        for key in keys:  # the second of two alike is free
            scored.append(found[key])
            found[key] = Scored(found[key].scores, cached=found[key].scores is not None)
        return scored

    def _score(self, key: str, reply: Reply) -> Scored:
        scores = read_scores(reply.text, self.names)
        if scores is None:
            self.model.reason = f"{self.model.name} answers without scores"
        line = {"key": key, "model": self.model.name, "scores": scores, "text": reply.text}
        line |= {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        append_json(self.file, line)
        self._keep(line)
        return Scored(scores)

    def _keep(self, line: dict[str, Any]) -> None:
        scores = checked(line.get("scores"), self.names)
        if scores is not None and isinstance(line.get("key"), str):
            self.known[line["key"]] = scores
        self.totals["replies"] += 1
        for name in ("prompt_tokens", "completion_tokens"):
            self.totals[name] += line[name] if isinstance(line.get(name), int | float) else 0

    def _key(self, conversation: Conversation) -> str:
        text = json.dumps([self.model.name, *conversation])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_scores(text: str, names: Iterable[str]) -> dict[str, float] | None:
    """The scores in a model's answer: those of its one JSON object that has them all, whatever stands around it.

    None if there is no such object, or if there are two that differ: one may be quoted from the text that is judged.
    What a model thinks aloud before </think> is no answer.
    """
    text, names, decoder, place, found = text.rpartition("</think>")[2], tuple(names), json.JSONDecoder(), 0, []
    if len(text) > MOST_CHARACTERS:
        return None
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        scores = checked(value, names)
        if scores is not None and scores not in found:
            found.append(scores)
    return found[0] if len(found) == 1 else None


def checked(value: Any, names: Iterable[str]) -> dict[str, float] | None:
    """The scores of these names, if all are there and numbers from 0 to 1."""
    if not isinstance(value, dict):
        return None
    scores = {name: value.get(name) for name in names}
    if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores.values()):  # nan is not
        return None
    return {name: float(score) for name, score in scores.items()}
