"""Values on the wire: what goes in comes out, and bytes from somebody else do no harm."""

import json
import socket
import struct
import threading
import time

import numpy as np
import pytest
import torch

from rlcourse.sandbox.wire import Unreadable, decode, encode, plain, receive, send

VALUES = [
    None, True, 3, -2.5, "é", [], (), {}, [1, (2, "x")], {"a": [None], 3: {"b": (1.5,)}}, 1 << 70,
    torch.arange(6).view(2, 3), torch.empty(0, 4), torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor([True, False]),
    [torch.ones(3), {"t": torch.zeros(2, dtype=torch.complex64)}],
]  # fmt: skip


def alike(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


def test_a_value_arrives_as_it_was():
    for value in VALUES:
        assert alike(plain(value), value), value


def test_views_arrive_as_what_they_show_and_arrays_as_tensors():
    base = torch.arange(12.0, requires_grad=True).view(3, 4)
    found = plain(base.T[1:])
    assert torch.equal(found, base.T[1:]) and not found.requires_grad and found.is_contiguous()
    assert alike(plain(np.array([1, 2], dtype=np.int32)), torch.tensor([1, 2], dtype=torch.int32))


def deep(depth: int):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, b"x", deep(30), torch.zeros(2).to_sparse(), dict.fromkeys(range(2000)), "x" * (2 << 20)]
)
def test_what_the_wire_does_not_carry_is_refused(value):
    with pytest.raises(Unreadable):
        encode(value)


def test_more_than_the_limit_is_refused():
    assert len(encode(torch.zeros(100), most=1000)) < 1000
    for value in (torch.zeros(1000), [torch.zeros(200)] * 2, torch.zeros(1).expand(1 << 40)):
        with pytest.raises(Unreadable, match="too large"):
            encode(value, most=1000)


def message(tree, numbers: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(tree).encode()
    return struct.pack("<I", len(text) if length is None else length) + text + numbers


EIGHT = b"\0" * 8
FORGED = [
    b"", b"\1", b"\xff" * 8, message([]), message(["set", 1]), message({"a": 1}), message(3, b"x"),
    message(["tensor", "float32", [2]], b"\0" * 7), message(["tensor", "float32", [2]], b"\0" * 9),
    message(["tensor", "float32", [-2]], EIGHT), message(["tensor", "float32", [2.0]], EIGHT),
    message(["tensor", "float32", [1 << 33]], EIGHT), message(["tensor", "float32", [1] * 17], EIGHT[:4]),
    message(["tensor", "object", [1]], EIGHT), message(["tensor", "float32", [True, 2]], EIGHT),
    message(["dict", [1]]), message(["dict", [["list"], 1]]), message(["dict", *([i, i] for i in range(2000))]),
    message(1, length=1 << 30), message(["list", ["tensor", "int64", [1]], ["tensor", "int64", [1]]], EIGHT),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FORGED)))
def test_bytes_of_somebody_else_are_unreadable_and_nothing_more(number):
    with pytest.raises(Unreadable):
        decode(FORGED[number])


def test_a_truth_that_is_neither_compares_as_true():
    found = decode(message(["tensor", "bool", [3]], bytes([0, 1, 7])))
    assert found.tolist() == [False, True, True] and found.view(torch.uint8).tolist() == [0, 1, 1]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_whole_and_one_by_one(pair):
    ours, theirs = pair
    large = encode(torch.arange(1 << 20))
    sending = threading.Thread(target=lambda: [send(theirs, data) for data in (b"", large, b"x")])
    sending.start()
    assert [receive(ours, 20) for _ in range(3)] == [b"", large, b"x"]
    sending.join()
    theirs.close()
    with pytest.raises(EOFError):
        receive(ours, 5)


def test_a_message_that_is_too_long_or_cut_short_is_refused(pair):
    ours, theirs = pair
    send(theirs, b"x" * 100)
    with pytest.raises(Unreadable, match="too large"):
        receive(ours, 5, limit=99)
    theirs.close()
    other, end = socket.socketpair()
    with other, end:
        end.sendall(struct.pack("<I", 10) + b"x")
        end.close()
        with pytest.raises(EOFError):
            receive(other, 5)


def test_one_that_drips_is_late_however_often_it_sends(pair):
    ours, theirs = pair
    theirs.sendall(struct.pack("<I", 1 << 20))
    over = threading.Event()

    def drip():
        while not over.wait(0.02):
            theirs.sendall(b"x")

    threading.Thread(target=drip, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(ours, 0.3)
    assert time.monotonic() - start < 5
    over.set()


def test_to_send_to_one_who_does_not_read_ends_in_time(pair):
    ours, _ = pair
    with pytest.raises(TimeoutError):
        send(ours, b"x" * (64 << 20), 0.2)
