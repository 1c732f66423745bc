"""The models that judge: an endpoint, here a small server that answers well, badly, late and not at all."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlcourse.tasks import llm_judge
from rlcourse.tasks.llm_judge import Endpoint

QUESTION = ("You judge.", "Is it right?")


class Server(ThreadingHTTPServer):
    """Answers the n-th request as `script(n, request)` says: (status, headers, pieces of bytes), or a completion's
    text. It notes what was asked, and how many questions were in flight at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.headers = (lambda n, request: "good"), [], []
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_):  # of those who have gone
        pass


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            number = len(server.asked)
            server.asked.append((self.path, request))
            server.headers.append(dict(self.headers))
            server.now += 1
            server.most = max(server.most, server.now)
        answer = server.script(number, request)
        with server.lock:
            server.now -= 1
        status, headers, pieces = answer if isinstance(answer, tuple) else (200, {}, [completion(answer)])
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)

    def log_message(self, *_):
        pass


def completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(llm_judge.KEY, raising=False)
    monkeypatch.setattr(llm_judge, "FIRST_WAIT", 0.01)
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def model_at(server, seconds=5.0) -> Endpoint:
    return Endpoint(f"small@{server.url}", seconds)


def questions(count: int) -> list[tuple[str, str]]:
    return [("You judge.", f"Is {i} right?") for i in range(count)]


def test_a_chat_completion_is_asked_for_with_the_key(server, monkeypatch):
    monkeypatch.setenv(llm_judge.KEY, "secret-key\n")
    assert model_at(server).replies([QUESTION]) == ["good"]
    [(path, request)] = server.asked
    assert path == "/v1/chat/completions" and server.headers[0]["Authorization"] == "Bearer secret-key"
    assert request["model"] == "small" and request["temperature"] == 0 and request["max_tokens"] > 0
    assert [(m["role"], m["content"]) for m in request["messages"]] == [("system", QUESTION[0]), ("user", QUESTION[1])]


def test_another_address_is_not_followed_and_gets_no_key(server):
    server.script = lambda n, _: (302, {"Location": f"{server.url}/elsewhere"}, [])
    model = model_at(server)
    assert model.replies([QUESTION]) == [None] and len(server.asked) == 1 and "302" in model.reason


@pytest.mark.parametrize("body", [b"<html>", b'{"choices": [{"message": {"content": null}}]}', b"[" * 100_000])
def test_rubbish_is_no_reply_and_costs_one_request(server, body):
    server.script = lambda *_: (200, {}, [body])
    model = model_at(server)
    assert model.replies([QUESTION]) == [None] and len(server.asked) == 1 and model.reason


@pytest.mark.parametrize(("status", "passes"), [(500, True), (429, True), (404, False)])
def test_what_may_pass_is_tried_again_and_nothing_else(server, status, passes):
    server.script = lambda n, _: (status, {}, []) if n < 2 else "good"
    model = model_at(server)
    assert model.replies([QUESTION]) == (["good"] if passes else [None])
    assert len(server.asked) == (3 if passes else 1) and (passes or str(status) in model.reason)


def test_a_judge_that_drips_costs_its_time_and_no_more(server):
    over = threading.Event()

    def dripping():
        while not over.wait(0.05):
            yield b" "

    server.script = lambda *_: (200, {}, dripping())
    start = time.monotonic()
    assert model_at(server, seconds=0.5).replies([QUESTION]) == [None] and time.monotonic() - start < 5
    over.set()


def test_a_judge_that_is_down_is_left_alone_for_the_rest_of_a_batch(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        model = Endpoint(f"small@http://127.0.0.1:{taken.getsockname()[1]}/v1", 1.0)
        tried, ask = [], model.ask
        monkeypatch.setattr(model, "ask", lambda conversation: tried.append(conversation) or ask(conversation))
        start = time.monotonic()
        assert set(model.replies(questions(200))) == {None}
        assert time.monotonic() - start < 10 and "refused" in model.reason.lower()
        assert llm_judge.GIVE_UP <= len(tried) <= llm_judge.GIVE_UP + llm_judge.AT_ONCE
        model.replies([QUESTION])
    assert tried[-1] == QUESTION  # the next batch is a new chance


def test_several_are_asked_at_once_replies_go_where_they_belong_and_some_may_fail(server):
    def script(n, request):
        number = int(request["messages"][1]["content"].split()[1])
        time.sleep(0.1 if number % 3 else 0.02)
        return str(number) if number % 2 else (400, {}, [])

    server.script = script
    assert model_at(server).replies(questions(40)) == [str(i) if i % 2 else None for i in range(40)]
    assert len(server.asked) == 40 and 1 < server.most <= llm_judge.AT_ONCE
