"""Start a program in Linux namespaces of its own: `python -I -S namespaces.py PLAN`, PLAN in JSON.

The program sees the plan's files, read-only, and a `/tmp` of limited size, but no network and no other process; it
can't gain privileges. Process 1 ends everything when the program ends, uses too much memory, or its starter is gone.

    root                             the folder where the new root is mounted
    read, hidden, links              [[path, where it's seen]]; folders that are empty in there; {path: target}
    devices, allowed                 files of /dev beside DEVICES; system calls of REFUSED that it may make
    command, environment, keep       the program, its variables, a file descriptor that it keeps
    limits                           by the names of `resource`; folder_bytes and files of /tmp; memory_bytes of all

An error before the start is one line on standard error. `--inside PLAN` is for bubblewrap: only the limits are left.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from contextlib import suppress

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_SETATTR, RECURSIVE, PIVOT_ROOT = 442, 0x8000, {"x86_64": 155, "aarch64": 41}
SET_PDEATHSIG, SET_DUMPABLE, CAPBSET_DROP, SET_NO_NEW_PRIVS = 1, 4, 24, 38
SET_SECCOMP, ARCHITECTURE = 22, {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls that no answer needs: memory that nobody counts, more cores, and ways into the kernel.
CALLS = [
    "memfd_create", "sched_setaffinity", "io_uring_setup", "bpf", "userfaultfd", "perf_event_open", "add_key",
    "request_key", "keyctl", "shmget", "semget", "msgget", "vmsplice", "memfd_secret",
]  # fmt: skip
REFUSED = {
    "x86_64": (319, 203, 425, 321, 323, 298, 248, 249, 250, 29, 64, 68, 278, 447),
    "aarch64": (279, 122, 425, 280, 282, 241, 217, 218, 219, 194, 190, 186, 75, 447),
}
PRLIMIT, SOCKETS = {"x86_64": 302, "aarch64": 261}, {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
SETSOCKOPT, SO_SNDBUF = {"x86_64": 54, "aarch64": 208}, 7
SOCKET_BYTES = 425984  # that a socket holds for its peer unless its buffer is set, with what the kernel adds
MMAP, SHARED_ANONYMOUS = {"x86_64": 9, "aarch64": 222}, 0x21
DEVICES = ("null", "full", "random", "urandom")  # and no zero: mapped and shared, it's memory that nobody counts
STUDENT, NOBODY = 1000, 65534  # where root grades: the user's number inside and outside

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments) -> None:
    """Call a function of the C library. Raises OSError, with its name, if it returns -1."""
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main(plan: dict) -> None:
    """Set up the namespaces, start the program, and wait until all of it has ended."""
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    user = own_user()
    first = os.fork()  # process 1 of the new namespace: when it ends, so does everything in there
    if first == 0:
        try:
            call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            files(plan)
            drop_rights(user)
            watch(plan)
        except BaseException as error:
            complain(error)
        os._exit(1)
    os.close(plan["keep"])

    def end(*_):
        with suppress(ProcessLookupError):  # it has ended by itself, and what it said is the reason
            os.kill(first, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    os.waitpid(first, 0)


def complain(error: BaseException) -> None:
    os.write(2, f"{error}\n".encode())


def own_user() -> int:
    """Enter new namespaces, with all rights in them and none outside. Returns the program's user id: for root one that
    owns nothing outside, else 0, the starter's own."""
    root = os.geteuid() == 0
    users, groups = (f"0 {number} 1\n" for number in (os.geteuid(), os.getegid()))
    if root:
        users = groups = f"0 0 1\n{STUDENT} {NOBODY} 1\n"
        os.setgroups([])
    process, (ready, go) = os.getpid(), os.pipe()
    helper = os.fork()  # maps the users, which only a process outside can do
    if helper == 0:
        try:
            os.close(go)
            if os.read(ready, 1):
                for name, text in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
                    with open(f"/proc/{process}/{name}", "w") as file:
                        file.write(text)
                os._exit(0)
        except OSError as error:
            complain(error)
        os._exit(1)
    os.close(ready)
    try:
        call("unshare", NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)
        os.write(go, b"x")
    finally:
        os.close(go)
        _, status = os.waitpid(helper, 0)
    if status:
        raise OSError("the user id cannot be mapped")
    if root:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    return STUDENT if root else 0


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind)]
    call("mount", *arguments, ctypes.c_ulong(flags), options.encode())


def only_read(target: str) -> None:
    """Make a mount, and all mounts in it, read-only, without devices and set-user-id programs."""
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID | NODEV, 0, 0, 0)
    where = ctypes.c_int(-100), target.encode(), ctypes.c_uint(RECURSIVE)
    call("syscall", ctypes.c_long(MOUNT_SETATTR), *where, ctypes.byref(attributes), ctypes.c_size_t(32))


def files(plan: dict) -> None:
    root, limits = plan["root"], plan["limits"]
    mount("none", "/", "none", REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=4m,mode=755")
    for name in ("/proc", "/tmp"):
        os.mkdir(root + name)
    size = f"size={limits['folder_bytes']},nr_inodes={limits['files']},mode=1777"
    mount("tmpfs", root + "/tmp", "tmpfs", NOSUID | NODEV, size)  # first: libraries may stand in a folder of /tmp
    for source, target in plan["read"]:
        bind(source, root + target)
        only_read(root + target)
    for path in plan["hidden"]:
        mount("tmpfs", root + path, "tmpfs", NOSUID | NODEV | RDONLY, "size=4k,mode=755")
    for path, target in plan["links"].items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        if not os.path.lexists(root + path):
            os.symlink(target, root + path)
    for path in [*(f"/dev/{name}" for name in DEVICES), *plan["devices"]]:
        bind(path, root + path)
    for name, target in (("shm", "/tmp"), ("fd", "/proc/self/fd")):
        os.symlink(target, f"{root}/dev/{name}")
    mount("proc", root + "/proc", "proc", NOSUID | NODEV | NOEXEC)
    for name in ("user/max_user_namespaces", "fs/mqueue/queues_max"):
        with suppress(FileNotFoundError), open(f"{root}/proc/sys/{name}", "w") as file:  # a kernel may lack it
            file.write("0")
    mount(root + "/proc/sys", root + "/proc/sys", "none", BIND | REC)
    only_read(root + "/proc/sys")
    os.chdir(root)
    call("syscall", ctypes.c_long(PIVOT_ROOT[os.uname().machine]), b".", b".")
    call("umount2", b".", 2)  # the old root, which lies over the new one
    os.chdir("/tmp")
    mount("none", "/", "none", BIND | RDONLY | NOSUID | NODEV | 32)  # 32: remount
    call("sethostname", b"grader", 6)


def bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, "none", BIND | REC)


def drop_rights(user: int) -> None:
    """Become this user, without privileges and without a way to get any."""
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)  # those that this kernel has
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, none)
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # which a change of user takes away
    call("prctl", SET_DUMPABLE, 0, 0, 0, 0)  # nobody may look into process 1


def set_limits(limits: dict) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)  # others are not of a process
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def refuse_calls(allowed: list[str]) -> None:
    """Make the kernel refuse REFUSED without `allowed`, calls of another architecture, and four by an argument: all
    sockets but local ones, larger buffers of these, shared maps without a file (unless memfd_create is allowed), and
    another process's limits: process 1 has the same user, and a limit on it would end the watch."""
    machine = os.uname().machine
    load, both, equal, at_least, give = 0x20, 0x54, 0x15, 0x35, 0x06
    fail, allow = (give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000)  # EPERM

    def by_argument(number: int, place: int, mask: int, value: int, same: tuple, other: tuple) -> list[tuple]:
        found = [(equal, 0, 5, number), (load, 0, 0, 16 + 8 * place), (both, 0, 0, mask), (equal, 0, 1, value)]
        return [*found, same, other]

    steps = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURE[machine]), fail, (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), fail]  # x32, which numbers the same calls again
    for name, number in zip(CALLS, REFUSED[machine], strict=True):
        steps += [] if name in allowed else [(equal, 0, 1, number), fail]
    steps += by_argument(PRLIMIT[machine], 0, 0xFFFFFFFF, 0, allow, fail)
    for number in SOCKETS[machine]:
        steps += by_argument(number, 0, 0xFFFFFFFF, 1, allow, fail)  # AF_UNIX
    steps += by_argument(SETSOCKOPT[machine], 2, 0xFFFFFFFF, SO_SNDBUF, fail, allow)
    if "memfd_create" not in allowed:
        steps += by_argument(MMAP[machine], 3, SHARED_ANONYMOUS, SHARED_ANONYMOUS, fail, allow)
    steps += [allow]
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(held))
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", SET_SECCOMP, 2, program, 0, 0)


def watch(plan: dict) -> None:
    """Start the program; exit when it ends or when all processes together use too much memory."""
    program = os.fork()
    if program == 0:
        try:
            set_limits(plan["limits"])
            refuse_calls(plan["allowed"])
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            for number in (0, 1):
                os.dup2(null, number)
            os.set_inheritable(plan["keep"], True)
            os.execve(plan["command"][0], plan["command"], plan["environment"])
        except BaseException as error:
            complain(error)
        os._exit(1)
    os.close(plan["keep"])
    while (process := os.waitpid(-1, os.WNOHANG)[0]) != program:
        if memory(plan["limits"].get("NOFILE", 1024)) > plan["limits"]["memory_bytes"]:
            os.write(2, b"it took too much memory\n")
            break
        if process == 0:
            time.sleep(0.05)
    os._exit(0)


def memory(most_open: int) -> int:
    """Bytes of anonymous and shared memory that all processes in here use, and that their sockets may hold; what two
    share counts twice. most_open: descriptors of a process."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with suppress(OSError), open(f"/proc/{name}/status") as file:  # it may have ended
                lines = [line.split() for line in file if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:"))]
                total += 1024 * sum(int(line[1]) for line in lines)
                total += SOCKET_BYTES * sockets(name, most_open)
    return total


def sockets(name: str, most: int) -> int:
    """How many sockets a process has open; `most` if it hides them, as the program does before it starts."""
    try:
        opened = [os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")]
    except PermissionError:
        return most
    return sum(link.startswith("socket:") for link in opened)


if __name__ == "__main__":
    try:
        watch(json.loads(sys.argv[2])) if sys.argv[1] == "--inside" else main(json.loads(sys.argv[1]))
    except OSError as error:
        complain(error)
        sys.exit(1)
