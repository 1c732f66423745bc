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

import torch

from rlcourse.files import append_json, read_lines, write_text
from rlcourse.sampling import GREEDY
from rlcourse.tasks.endpoint import MOST_TOKENS, Conversation

MOST_CHARACTERS = 20_000  # of an answer in which scores are looked for
LOCAL_ROWS = 32  # that a model of our own answers at once


class Model(Protocol):
    """Whom a judge asks. name: of the model, of which answers are kept; reason: of the last failure."""

    name: str
    reason: str

    def replies(self, conversations: list[Conversation]) -> list[str | None]:
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

    def replies(self, conversations: list[Conversation]) -> list[str | None]:
        policy = self.llm.policy
        prompts = [policy.prompt(user, system) for system, user in conversations]
        room = getattr(policy.model.config, "max_position_embeddings", 1 << 30) - MOST_TOKENS
        short = [i for i, prompt in enumerate(prompts) if len(prompt) <= room]
        if len(short) < len(prompts):
            self.reason = f"{self.name} reads {room} tokens at most, and a question has more"
        replies: list[str | None] = [None] * len(prompts)
        try:
            with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
                for first in range(0, len(short), LOCAL_ROWS):
                    rows = short[first : first + LOCAL_ROWS]
                    groups = self.llm.generate([prompts[i] for i in rows], GREEDY, MOST_TOKENS)
                    for i, (answer,) in zip(rows, groups, strict=True):
                        replies[i] = answer.text
        except (RuntimeError, ValueError) as error:  # too little memory, or nothing finite
            self.reason = str(error).splitlines()[0]
        self.llm.sleep()  # its memory is needed for the update
        return replies


@dataclass(frozen=True)
class Scored:
    """Scores from 0 to 1 by name, None where there are none; whether an earlier answer gave them."""

    scores: dict[str, float] | None
    cached: bool = False


class Judge:
    """Asks a model for the scores called `names`, and keeps them in `file`, a line of JSON for each reply."""

    def __init__(self, model: Model, names: Iterable[str], file: Path):
        self.model, self.names, self.file = model, tuple(names), file
        lines = read_lines(file)
        if lines:  # a last one that a kill cut short would spoil the next
            write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
        self.known = {line.get("key"): checked(line.get("scores"), self.names) for line in lines}

    def ask(self, conversations: list[Conversation]) -> list[Scored]:
        """The scores for each conversation. Those that were given before are not asked for again."""
        keys = [self._key(conversation) for conversation in conversations]
        new = {key: one for key, one in zip(keys, conversations, strict=True) if self.known.get(key) is None}
        for key, reply in zip(new, self.model.replies(list(new.values())), strict=True):
            if reply is not None:
                self._keep(key, reply)
        scored = []
        for key in keys:
            scores = self.known.get(key)
            scored.append(Scored(scores, cached=scores is not None and key not in new))
            new.pop(key, None)  # the second of two alike is free
        return scored

    def _keep(self, key: str, reply: str) -> None:
        scores = self.known[key] = read_scores(reply, self.names)
        if scores is None:
            self.model.reason = f"{self.model.name} answers without scores"
        append_json(self.file, {"key": key, "model": self.model.name, "scores": scores, "text": reply})

    def _key(self, conversation: Conversation) -> str:
        text = json.dumps([self.model.name, *conversation])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_scores(text: str, names: Iterable[str]) -> dict[str, float] | None:
    """The scores in a model's answer: those of its one JSON object that has them all, whatever stands around it.

    None if there is no such object, or if there are two that differ: one may be quoted from the text that is judged.
    What a model thinks aloud before </think> is no answer.
    """
    text, decoder, place, found = text.rpartition("</think>")[2], json.JSONDecoder(), 0, []
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
    scores = {name: value.get(name) for name in names} if isinstance(value, dict) else {"": None}
    if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores.values()):  # nan is not
        return None
    return {name: float(score) for name, score in scores.items()}
