"""A language model as a judge, against a small server on this machine that answers well, badly, late and not at all."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from policies import make_policy

from rlcourse.tasks import endpoint, llm_judge
from rlcourse.tasks.endpoint import Endpoint
from rlcourse.tasks.llm_judge import Judge, LocalModel, read_scores

NAMES = ("correctness", "speed")
GOOD = {"correctness": 0.75, "speed": 0.5}
QUESTION = ("You judge.", "Is it right?")


class Server(ThreadingHTTPServer):
    """Answers the n-th request as `script(n, request)` says: (status, headers, bytes), or bytes of a good completion.
    It notes what was asked, and how many questions were under way at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.headers = (lambda n, request: completion(json.dumps(GOOD))), [], []
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
        status, headers, body = answer if isinstance(answer, tuple) else (200, {}, answer)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if isinstance(body, bytes):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for piece in [body] if isinstance(body, bytes) else body:
            self.wfile.write(piece)

    def log_message(self, *_):
        pass


def completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(endpoint.KEY, raising=False)
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def judge_at(server, tmp_path, seconds=5.0) -> Judge:
    return Judge(Endpoint(server.url, "small", seconds), NAMES, tmp_path / "judge.jsonl")


def questions(count: int) -> list[tuple[str, str]]:
    return [("You judge.", f"Is {i} right?") for i in range(count)]


def test_a_chat_completion_is_asked_for_and_the_key_stays_out_of_the_file(server, monkeypatch, tmp_path):
    monkeypatch.setenv(endpoint.KEY, "secret-key\n")
    judge_at(server, tmp_path).ask([QUESTION])
    [(path, request)] = server.asked
    assert path == "/v1/chat/completions" and server.headers[0]["Authorization"] == "Bearer secret-key"
    assert request["model"] == "small" and request["temperature"] == 0 and request["max_tokens"] > 0
    assert [(m["role"], m["content"]) for m in request["messages"]] == [("system", QUESTION[0]), ("user", QUESTION[1])]
    assert "secret" not in (tmp_path / "judge.jsonl").read_text()


def test_another_address_is_not_followed_and_gets_no_key(server, monkeypatch, tmp_path):
    monkeypatch.setenv(endpoint.KEY, "secret")
    server.script = lambda n, _: (302, {"Location": f"{server.url}/elsewhere"}, b"")
    judge = judge_at(server, tmp_path)
    assert judge.ask([QUESTION])[0].scores is None and len(server.asked) == 1 and "302" in judge.model.reason


RUBBISH = [
    b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', b"[" * 100_000,
    completion("I like it."),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_rubbish_is_no_score_and_costs_one_request(server, tmp_path, number):
    server.script = lambda *_: RUBBISH[number]
    judge = judge_at(server, tmp_path)
    [scored] = judge.ask([QUESTION])
    assert scored.scores is None and not scored.cached and len(server.asked) == 1 and judge.model.reason
    server.script = lambda *_: completion(json.dumps(GOOD))
    assert judge.ask([QUESTION])[0].scores == GOOD  # and nothing of it was kept


@pytest.mark.parametrize(("status", "passes"), [(500, True), (429, True), (404, False)])
def test_what_may_pass_is_tried_again_and_nothing_else(server, tmp_path, status, passes):
    server.script = lambda n, _: (status, {}, b"{}") if n < 2 else completion(json.dumps(GOOD))
    judge = judge_at(server, tmp_path)
    assert judge.ask([QUESTION])[0].scores == (GOOD if passes else None)
    assert len(server.asked) == (3 if passes else 1) and (passes or str(status) in judge.model.reason)


def test_a_judge_that_drips_costs_its_time_and_no_more(server, tmp_path):
    over = threading.Event()

    def dripping():
        while not over.wait(0.05):
            yield b" "

    server.script = lambda *_: (200, {}, dripping())
    start = time.monotonic()
    scored = judge_at(server, tmp_path, seconds=0.5).ask([QUESTION])
    assert scored[0].scores is None and time.monotonic() - start < 5
    over.set()


def test_a_judge_that_is_down_is_left_alone_for_the_rest_of_a_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        model = Endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "small", 1.0)
        tried, ask = [], model.ask
        monkeypatch.setattr(model, "ask", lambda conversation: tried.append(conversation) or ask(conversation))
        judge = Judge(model, NAMES, tmp_path / "judge.jsonl")
        start = time.monotonic()
        assert {scored.scores for scored in judge.ask(questions(200))} == {None}
        assert time.monotonic() - start < 10 and "refused" in model.reason.lower()
        assert endpoint.GIVE_UP <= len(tried) <= endpoint.GIVE_UP + endpoint.AT_ONCE
        judge.ask(questions(1))
    assert len(tried) > endpoint.GIVE_UP and tried[-1] == questions(1)[0]  # the next batch is a new chance


def test_now_and_then_a_failure_does_not_count_as_being_down(server, tmp_path):
    server.script = lambda n, _: (400, {}, b"") if n % 2 else completion(json.dumps(GOOD))
    found = judge_at(server, tmp_path).ask(questions(60))
    assert len(server.asked) == 60 and sum(scored.scores is None for scored in found) == 30


def test_several_are_asked_at_once_and_answers_go_where_they_belong(server, tmp_path):
    def script(_, request):
        number = int(request["messages"][1]["content"].split()[1])
        time.sleep(0.1 if number % 3 else 0.02)
        return completion(json.dumps({"correctness": number / 100, "speed": 1}))

    server.script = script
    found = judge_at(server, tmp_path).ask(questions(40))
    assert [scored.scores["correctness"] for scored in found] == [i / 100 for i in range(40)]
    assert 1 < server.most <= endpoint.AT_ONCE


def test_what_was_answered_is_not_asked_again_even_by_another_judge_of_the_run(server, tmp_path):
    judge = judge_at(server, tmp_path)
    first = judge.ask([*questions(3), *questions(2)])
    assert [scored.cached for scored in first] == [False] * 3 + [True] * 2
    other = judge_at(server, tmp_path)
    again = other.ask(questions(3))
    assert all(scored.cached and scored.scores == GOOD for scored in again)
    assert len(server.asked) == 3
    other.ask([("You judge.", "Is 3 right?"), ("Judge!", "Is 0 right?")])
    Judge(Endpoint(server.url, "large", 5), NAMES, tmp_path / "judge.jsonl").ask(questions(1))
    assert len(server.asked) == 6  # another model is another judge


def test_a_file_that_a_kill_cut_short_is_read_and_goes_on(server, tmp_path):
    judge_at(server, tmp_path).ask(questions(2))
    file = tmp_path / "judge.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    judge_at(server, tmp_path).ask(questions(2))
    assert judge_at(server, tmp_path).ask(questions(2))[1].cached and len(server.asked) == 3


@pytest.mark.parametrize(
    "text",
    [
        'Well: ```json\n{"correctness": 0.25, "speed": 1.0}\n``` That is my view.',
        'A set {1, 2}, then {"correctness": 0.25, "speed": 1}, once more {"correctness": 0.25, "speed": 1}',
        'It says {"correctness": 1, "speed": 1}. Hm.</think>{"correctness": 0.25, "speed": 1}',
        '{"speed": 1} {"correctness": 0.25, "speed": 1}',
    ],
)
def test_scores_are_found_whatever_stands_around_them(text):
    assert read_scores(text, NAMES) == {"correctness": 0.25, "speed": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        '{"correctness": 0.25}',
        '{"correctness": "0.25", "speed": 1}',
        '{"correctness": 1.01, "speed": 1}',
        '{"correctness": 0.25, "speed": 1} {"correctness": 1, "speed": 1}',  # one was quoted, and nobody knows which
        '{"a":' * 4000,
        " " * 30_000 + '{"correctness": 0.25, "speed": 1}',
    ],
)
def test_what_is_no_score_is_none(text):
    start = time.monotonic()
    assert read_scores(text, NAMES) is None
    assert time.monotonic() - start < 5


@pytest.fixture(scope="module")
def judging_folder(tmp_path_factory):
    policy, folder = make_policy(3, max_position_embeddings=900), tmp_path_factory.mktemp("judge")
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_of_our_own_answers_each_question_greedily(judging_folder, monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(llm_judge, "MOST_TOKENS", 6)
    monkeypatch.setattr(llm_judge, "LOCAL_ROWS", 2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = LocalModel(judging_folder, "cpu")
    found = model.replies(questions(3))
    assert all(isinstance(reply, str) for reply in found)
    assert [model.replies([one])[0] for one in questions(3)] == found
    assert torch.equal(torch.rand(3), expected)  # the run's own numbers go on


def test_a_question_too_long_for_it_has_no_answer_and_the_others_have(judging_folder, monkeypatch):
    monkeypatch.setattr(llm_judge, "MOST_TOKENS", 4)
    model = LocalModel(judging_folder, "cpu")
    long, short = model.replies([("You judge.", "Is it? " * 900), QUESTION])
    assert long is None and short is not None and "tokens at most" in model.reason
