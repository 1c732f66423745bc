"""The models that judge: behind an address that takes OpenAI's chat completions, or in our own engine.

`replies` never raises: a question without an answer gets None, and `reason` says why the last one failed.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from rlcourse.sampling import GREEDY

KEY = "RLCOURSE_JUDGE_KEY"  # environment variable with the endpoint's key
AT_ONCE = 8  # requests in flight
GIVE_UP = 8  # failures in a row after which the rest of a batch is not asked
FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0  # seconds before a retry; each wait is twice the one before
SECONDS = 60.0  # per answer, retries included
MOST_TOKENS, MOST_BYTES = 512, 1 << 20  # per answer
LOCAL_ROWS = 32  # that our own engine decodes at once

Conversation = tuple[str, str]  # the system's turn and the user's


class Model(Protocol):
    """name: keys the kept answers. reason: why the last question without an answer has none."""

    name: str
    reason: str

    def replies(self, conversations: list[Conversation]) -> list[str | None]: ...


class Unanswered(Exception):
    """Why there is no answer. again: whether a retry may bring one."""

    def __init__(self, text: str, again: bool = False):
        super().__init__(text)
        self.again = again


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address would be sent the key as well."""

    def redirect_request(self, *_) -> None:
        return None


class Endpoint:
    """A model at an address such as http://localhost:8000/v1."""

    def __init__(self, url: str, name: str, seconds: float = SECONDS):
        self.url, self.name, self.seconds, self.reason = url.rstrip("/") + "/chat/completions", name, seconds, ""
        self.opener = urllib.request.build_opener(NoRedirect)
        self.failed_in_a_row = 0

    def replies(self, conversations: list[Conversation]) -> list[str | None]:
        self.failed_in_a_row = 0
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(self._reply, conversations))

    def _reply(self, conversation: Conversation) -> str | None:
        if self.failed_in_a_row >= GIVE_UP:
            return None
        try:
            reply = self.ask(conversation)
            self.failed_in_a_row = 0
            return reply
        except Unanswered as error:
            self.failed_in_a_row += 1
            self.reason = str(error)
            return None

    def ask(self, conversation: Conversation) -> str:
        """The reply, with retries while time is left. Raises Unanswered."""
        deadline, wait = time.monotonic() + self.seconds, FIRST_WAIT
        while True:
            try:
                return text_of(self._post(conversation, deadline))
            except Unanswered as error:
                if not error.again or time.monotonic() + wait >= deadline:
                    raise
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _post(self, conversation: Conversation, deadline: float) -> bytes:
        system, user = conversation
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {"model": self.name, "messages": messages, "temperature": 0, "max_tokens": MOST_TOKENS}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY, "").strip():
            headers["Authorization"] = f"Bearer {key}"
        try:
            request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
            with self.opener.open(request, timeout=max(deadline - time.monotonic(), 1e-3)) as response:
                return read_until(response, deadline)
        except urllib.error.HTTPError as error:
            error.close()
            again = error.code in (408, 409, 429) or error.code >= 500
            raise Unanswered(f"{self.url} answers {error.code}", again) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or type(error).__name__  # the error's text may quote the key
            raise Unanswered(f"{self.url}: {why}", again=True) from None


def read_until(response: Any, deadline: float) -> bytes:
    """The body of a response. Raises Unanswered if it is too long or drips in too slowly."""
    found = bytearray()
    while piece := response.read1(1 << 16):
        found += piece
        if len(found) > MOST_BYTES or time.monotonic() > deadline:
            raise Unanswered("the answer is too long" if len(found) > MOST_BYTES else "the answer takes too long")
    return bytes(found)


def text_of(content: bytes) -> str:
    """The reply in a response's body. Raises Unanswered."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise Unanswered("the reply is not a chat completion")
    return text


class LocalModel:
    """A model in our own engine, a folder or a name on the hub. It answers greedily.

    Raises ValueError or FileNotFoundError for a model that can't be loaded or takes no system turn.
    """

    def __init__(self, name: str, device: str = "auto"):
        from rlcourse.llm import LLM

        self.name, self.reason, self.llm = name, "", LLM(name, device=device)
        try:
            self.llm.policy.prompt("Which?", "Judge.")
        except Exception as error:  # whatever a chat template raises
            raise ValueError(f"{name} cannot judge: its chat template takes no instructions ({error}).") from None

    def replies(self, conversations: list[Conversation]) -> list[str | None]:
        from rlcourse.policy import positions_of

        policy = self.llm.policy
        prompts = [policy.prompt(user, system) for system, user in conversations]
        room = positions_of(policy.model) - MOST_TOKENS
        short = [i for i, prompt in enumerate(prompts) if len(prompt) <= room]
        if len(short) < len(prompts):
            self.reason = f"{self.name} reads {room} tokens at most, and a question has more"
        replies: list[str | None] = [None] * len(prompts)
        try:
            # Judging must not change what the run samples next.
            with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
                for first in range(0, len(short), LOCAL_ROWS):
                    rows = short[first : first + LOCAL_ROWS]
                    groups = self.llm.generate([prompts[i] for i in rows], GREEDY, MOST_TOKENS)
                    for i, (answer,) in zip(rows, groups, strict=True):
                        replies[i] = answer.text
        except (RuntimeError, ValueError) as error:  # out of memory, or logits that are not finite
            self.reason = str(error).splitlines()[0]
        self.llm.sleep()  # the update needs its memory
        return replies
