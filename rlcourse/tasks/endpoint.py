"""A language model behind an address that takes OpenAI's chat completions, asked many things at once."""

import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

KEY = "RLCOURSE_JUDGE_KEY"  # the variable of the environment that holds the endpoint's key
AT_ONCE = 8  # questions under way
GIVE_UP = 8  # failures in a row after which a batch's other questions are not asked
FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0  # seconds before another try; each wait is twice the one before
MOST_TOKENS = 512  # of an answer
SECONDS = 60.0  # for an answer, all tries together
MOST_BYTES = 1 << 20  # of what an endpoint sends

Conversation = tuple[str, str]  # the system's turn and the user's


class Unanswered(Exception):
    """There is no answer; the text says why. again: whether another try may bring one, wait: after so many seconds."""

    def __init__(self, text: str, again: bool = False, wait: float | None = None):
        super().__init__(text)
        self.again, self.wait = again, wait


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address would be sent the key as well."""

    def redirect_request(self, *_) -> None:
        return None


class Endpoint:
    """A model at an address such as http://localhost:8000/v1. An answer may take `seconds`, all tries together."""

    def __init__(self, url: str, name: str, seconds: float = SECONDS):
        self.url, self.name, self.seconds, self.reason = url.rstrip("/") + "/chat/completions", name, seconds, ""
        self.opener = urllib.request.build_opener(NoRedirect)
        self.lock, self.in_a_row = threading.Lock(), 0

    def replies(self, conversations: list[Conversation]) -> list[str | None]:
        """Several are asked at once. An endpoint that fails again and again is left alone until the next batch."""
        self.in_a_row = 0
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(self._reply, conversations))

    def _reply(self, conversation: Conversation) -> str | None:
        if self.in_a_row >= GIVE_UP:
            return None
        try:
            reply = self.ask(conversation)
            self.in_a_row = 0
            return reply
        except Unanswered as error:
            with self.lock:
                self.in_a_row, self.reason = self.in_a_row + 1, str(error)
            return None

    def ask(self, conversation: Conversation) -> str:
        """The reply, tried for again where that may help, until time is up. Raises Unanswered."""
        deadline, wait = time.monotonic() + self.seconds, FIRST_WAIT
        while True:
            try:
                return text_of(self._post(conversation, deadline))
            except Unanswered as error:
                pause = min(error.wait or wait * random.uniform(0.5, 1), LONGEST_WAIT)
                if not error.again or time.monotonic() + pause >= deadline:
                    raise
            time.sleep(pause)
            wait *= 2

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
            with error:
                again = error.code in (408, 409, 429) or error.code >= 500
                wait = (error.headers.get("Retry-After") or "")[:5]
                seconds = float(wait) if wait.isdecimal() else None
                raise Unanswered(f"{self.url} answers {error.code}", again, seconds) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or type(error).__name__  # their texts may quote the key
            raise Unanswered(f"{self.url}: {why}", True) from None


def read_until(response: Any, deadline: float) -> bytes:
    """What a server sends, which may come in drops. Raises Unanswered where that takes too long or is too much."""
    found = bytearray()
    while piece := response.read1(1 << 16):
        found += piece
        if len(found) > MOST_BYTES or time.monotonic() > deadline:
            raise Unanswered("the answer is too long" if len(found) > MOST_BYTES else "the answer takes too long")
    return bytes(found)


def text_of(content: bytes) -> str:
    """The reply in what an endpoint sent. Raises Unanswered."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise Unanswered("the reply is not a chat completion")
    return text
