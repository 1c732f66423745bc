"""What a program finds in a box, what it may take, and how it ends: small programs, which start at once."""

import errno
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rlcourse.sandbox import namespaces, process
from rlcourse.sandbox.process import BUBBLEWRAP, GUARD, NAMESPACES, Box, Child

LIMITS = {"memory_bytes": 200 << 20, "folder_bytes": 1 << 20, "files": 64, "NPROC": 40, "NOFILE": 64, "CORE": 0}
START = """import ctypes, json, os, signal, socket, sys, time
tell = lambda *what: os.write(wire, json.dumps(what).encode())
"""
BOX = Box(("sandbox/wire.py", "sandbox/namespaces.py"), "", lambda folder: {"HOME": folder, "GIVEN": "yes"}, LIMITS)


@functools.cache
def why_not() -> str:
    """What is amiss with namespaces here; nothing if they work."""
    return process.attempt(NAMESPACES, BOX)


@pytest.fixture
def box():
    if why_not():
        pytest.skip(why_not())
    return BOX


def started(box: Box, code: str) -> Child:
    return Child(NAMESPACES, replace(box, code=START + code))


def told(connection: socket.socket) -> list | None:
    """What a program told, None if it ended without."""
    found = drain(connection)
    return json.loads(found) if found else None


def drain(connection: socket.socket) -> bytes:
    """What comes out of a socket until its end: all that held it have ended then."""
    connection.settimeout(10)
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def run(box: Box, code: str) -> tuple[list | None, str]:
    """What a program tells, and the last line of what is said of it."""
    child = started(box, code)
    answer = told(child.connection)
    return answer, child.close()


def test_it_sees_its_variables_its_libraries_and_nobody_else(box, tmp_path):
    (tmp_path / "secret").write_text("x")
    code = f"""
tell(dict(os.environ), sorted(int(n) for n in os.listdir("/proc") if n.isdigit()), os.path.exists({str(tmp_path)!r}),
     os.listdir("/course/rlcourse"), os.path.exists(json.__file__), socket.gethostname(), os.getcwd(),
     sorted(map(int, os.listdir("/proc/self/fd")))[:4], os.readlink("/proc/self/fd/0"), os.getpid(), os.getuid())"""
    answer, said = run(box, code)
    variables, processes, outside, staged, library, host, folder, descriptors, first, own, user = answer
    variables.pop("LC_CTYPE", None)  # which Python sets itself
    assert variables == {"HOME": "/tmp", "GIVEN": "yes"} and said == ""
    assert processes == [1, own] and not outside and sorted(staged) == ["__init__.py", "sandbox"] and library
    assert (host, folder, first) == ("grader", "/tmp", "/dev/null")
    assert descriptors[:3] == [0, 1, 2] and len(descriptors) == 4
    assert user == (namespaces.STUDENT if os.geteuid() == 0 else 0)


def test_it_may_write_to_its_own_folder_alone_and_not_much(box):
    code = """
def tries(path, data=b"x"):
    try:
        with open(path, "wb") as file:
            file.write(data)
        return ""
    except OSError as error:
        return type(error).__name__ + str(error.errno)
libraries = os.path.dirname(json.__file__)
own = "/" + "tmp"
paths = [own + "/a", "/x", libraries + "/x", "/dev/x", "/proc/sys/kernel/shmmni", "/course/rlcourse/x"]
found = [tries(path) for path in paths]
found += [tries(own + "/large", b"x" * (2 << 20)), tries("/dev/shm/a")]
os.unlink(own + "/large")
many = [tries(f"{own}/{i}", b"") for i in range(100)]
closed = [os.statvfs(path).f_flag & os.ST_RDONLY for path in ("/", libraries, "/course", "/proc/sys", "/tmp")]
tell(found, many.count(""), closed)"""
    (found, count, closed), _ = run(box, code)
    assert closed == [os.ST_RDONLY] * 4 + [0]
    assert found[0] == found[7] == "" and found[6] == "OSError28"
    assert all(re.fullmatch(r"(OSError30|PermissionError1|PermissionError13)", name) for name in found[1:6]), found
    assert 40 < count < 64


def test_it_has_no_rights_no_network_and_no_way_to_get_any(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
made = []
for family in (1, 2, 10, 16, 38, 40):
    try:
        socket.socket(family, 3 if family == 16 else 5 if family == 38 else 1)
        made.append(family)
    except OSError:
        pass
try:
    socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2)
    connected = True
except OSError:
    connected = False
libc = ctypes.CDLL(None, use_errno=True)
mounted = libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0)
tell([status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")], connected,
     made, libc.unshare(0x10000000), mounted)"""
        (status, connected, made, unshared, mounted), _ = run(box, code)
    assert status == ["0" * 16] * 3 + ["1", "2"] and not connected and made == [socket.AF_UNIX]
    assert unshared == mounted == -1


def test_memory_that_is_shared_without_a_file_and_counted_for_nobody_is_refused(box):
    code = """import mmap
def tries(file, flags):
    try:
        return len(mmap.mmap(os.open(file, os.O_RDWR) if file else -1, 4096, flags))
    except OSError as error:
        return error.errno
open("own", "wb").write(bytes(4096))
tell([tries("own", mmap.MAP_SHARED), tries("", mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
      tries("", mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), tries("/dev/zero", mmap.MAP_SHARED)])"""
    assert run(box, code)[0] == [[4096, 4096, errno.EPERM, errno.ENOENT]]


@pytest.mark.parametrize("allowed", [[], ["memfd_create"]])
def test_calls_that_hide_memory_are_refused_unless_allowed(box, allowed):
    code = """
def tries(number):
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0) , ctypes.get_errno()
def memory():
    try:
        return "made" if os.memfd_create("x") > 2 else ""
    except OSError as error:
        return error.errno
tell(memory(), [tries(number) for number in json.loads(os.environ["NUMBERS"])])"""
    numbers = list(namespaces.REFUSED[os.uname().machine])[1:]
    if os.uname().machine == "x86_64":
        numbers += [0x40000000 + 39]  # getpid of x32
    given = replace(box, variables=lambda _: {"NUMBERS": json.dumps(numbers)}, allowed=allowed)
    (found, refused), _ = run(given, code)
    assert found == ("made" if allowed else 1) and refused == [[-1, 1]] * len(numbers)


def test_the_memory_of_all_its_processes_is_counted_together(box):
    code = """
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(70 << 20)
        time.sleep(8)
time.sleep(8)
tell("it lives")"""
    assert run(box, code) == (None, "it took too much memory")


def test_limits_are_set_and_it_sets_them_for_itself_and_for_no_other_process(box):
    code = """import resource
def tries(process):
    try:
        return resource.prlimit(process, resource.RLIMIT_CPU, (60, 60))
    except OSError as error:
        return error.errno
held = bytearray(100 << 20)  # within its memory
tell([tries(process) for process in (1, os.getpid(), 0)],
     [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("CPU", "NPROC", "NOFILE", "CORE")])"""
    (tried, limits), _ = run(box, code)
    assert tried[:2] == [1, 1] and len(tried[2]) == 2
    assert limits == [[60, 60], [40, 40], [64, 64], [0, 0]]


def test_a_limit_above_that_of_the_system_is_that_of_the_system(monkeypatch):
    found = []
    monkeypatch.setattr(namespaces.resource, "getrlimit", lambda kind: (5, 50))
    monkeypatch.setattr(namespaces.resource, "setrlimit", lambda kind, both: found.append(both))
    namespaces.set_limits({"NOFILE": 100, "FSIZE": 7, "memory_bytes": 1})
    assert found == [(50, 50), (7, 7)]


def test_what_it_started_ends_with_it(box):
    code = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ntell('done')"
    start = time.monotonic()
    assert run(box, code) == (["done"], "") and time.monotonic() - start < 15


def test_it_is_ended_whatever_it_does_against_that(box):
    code = """
for number in range(1, 32):
    if number not in (9, 19):
        signal.signal(number, signal.SIG_IGN)
os.fork()
tell("up")"""
    child = started(box, code + "\ntime.sleep(60)")
    found, ours = child.process, child.connection.dup()
    assert ours.recv(6) == b'["up"]'
    start = time.monotonic()
    assert child.close() == "" and time.monotonic() - start < 9
    assert found.returncode == 0
    drain(ours)


def test_it_ends_when_its_starter_is_gone(box, tmp_path):
    ours, theirs = socket.socketpair()
    box, wire = replace(box, code=START + "tell('up')\ntime.sleep(60)"), theirs.fileno()
    process.stage(tmp_path, box, isolated=True)
    command = process.isolated(NAMESPACES, box, tmp_path, wire)
    starter = f"import subprocess, time\nsubprocess.Popen({command!r}, pass_fds=[{wire}])\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-S", "-c", starter], pass_fds=[wire]) as parent:
        theirs.close()
        assert ours.recv(6) == b'["up"]'
        parent.kill()
    assert told(ours) is None


def test_what_goes_wrong_before_the_start_is_one_line(box):
    answer, said = run(replace(box, devices=["/dev/no-such-device"]), "tell(1)")
    assert answer is None and "No such file" in said


def test_an_ordinary_process_is_ended_with_its_children_and_its_last_words_are_heard():
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("first", "last", sep="\\n", file=sys.stderr, flush=True)
os.write(wire, b"u")
time.sleep(60)"""
    child = Child(GUARD, replace(BOX, code=START + code))
    found, ours = child.process, child.connection.dup()
    # Of both: who speaks after the end finds its pipe closed, and would end of that.
    assert ours.recv(1) + ours.recv(1) == b"uu"
    start = time.monotonic()
    assert child.close() == "last" and time.monotonic() - start < 9
    assert child.close() == "" and not child.folder.exists()  # a second time nothing happens
    drain(ours)
    assert found.returncode in (-signal.SIGKILL, -signal.SIGTERM)


def test_a_folder_is_removed_however_deep_and_whatever_its_rights(tmp_path):
    folder = tmp_path / "left"
    folder.mkdir()
    place = os.open(folder, os.O_RDONLY)
    for _ in range(1050):  # deeper than Python's recursion
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    (folder / "closed").mkdir(mode=0)
    process.remove(folder)
    process.remove(folder)
    assert not folder.exists()


def test_the_first_way_that_works_is_taken_and_the_reasons_of_the_others_are_kept(monkeypatch):
    tried = {NAMESPACES: "", BUBBLEWRAP: ""}
    monkeypatch.setattr(process, "attempt", lambda way, box: tried[way])
    assert process.find_way(BOX) == (NAMESPACES, "")
    tried[NAMESPACES] = "no rights"
    assert process.find_way(BOX) == (BUBBLEWRAP, "")
    tried[BUBBLEWRAP] = "not installed"
    assert process.find_way(BOX) == (GUARD, "no rights; not installed")


def test_a_way_that_does_not_show_the_files_that_are_needed_does_not_work(box, monkeypatch):
    monkeypatch.setattr(process, "libraries", lambda: [])
    assert "No such file" in process.attempt(NAMESPACES, box)


def test_what_sockets_hold_counts_as_memory(box):
    """A socket keeps what its peer hasn't read, in memory that no process is charged for."""
    larger = "a, b = socket.socketpair()\ntry:\n    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)\n"
    assert run(box, f"{larger}except PermissionError:\n    tell('refused')")[0] == ["refused"]
    few = "kept = [socket.socketpair() for _ in range(25)]\ntime.sleep(0.3)\ntell('done')"
    assert run(box, few) == (["done"], "")
    for hide in ("", "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"):  # PR_SET_DUMPABLE
        many = f"for _ in range(20):\n    if os.fork() == 0:\n        break\n{hide}{few.replace('0.3', '5')}"
        assert run(box, many) == (None, "it took too much memory")
