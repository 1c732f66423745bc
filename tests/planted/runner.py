"""Plants mistakes and runs their tests: `python runner.py NUMBER...`, a line of JSON for each result.

The package is imported once. A fork for each set of test files collects them, and a fork of that for each mistake runs
them until one fails.
"""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from collections import defaultdict

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "TRITON_INTERPRET": "1"}
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

import hypothesis
import pytest
import torch
from mistakes import MISTAKES
from plant import TESTS, Mistake, module_of, plant

AT_ONCE, SECONDS = 2, 60
QUICK = ["-q", "-m", "not thorough and not gpu", "-p", "no:cacheprovider", "--assert=plain"]
QUICK += ["-p", "no:unraisableexception", "--tb=line", "-W", "ignore", "-c", str(TESTS.parent / "pyproject.toml")]


class Planted:
    """A plugin for pytest that runs the collected tests once for each mistake."""

    def __init__(self, numbers: list[int], results):
        self.numbers, self.results, self.failed = numbers, results, ""
        self.finders: list[str] = []  # tests that found a mistake, the last one last

    def pytest_runtestloop(self, session) -> bool:
        for number in self.numbers:
            items = [item for item in session.items if is_for(item, MISTAKES[number])]
            # What has found a mistake may find the next one, too.
            items.sort(key=lambda item: -self.finders.index(item.nodeid) if item.nodeid in self.finders else 1)
            code, failed = self.in_fork(items, MISTAKES[number])
            self.finders += [failed] if failed and failed not in self.finders else []
            print(json.dumps({"number": number, "code": code, "failed": failed}), file=self.results, flush=True)
        return True

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def in_fork(self, items: list, mistake: Mistake) -> tuple[int, str]:
        """How the tests end with a mistake: the fork's exit code, and the first test that fails or ""."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(SECONDS)
                plant(mistake)
                for item, following in zip(items, [*items[1:], None], strict=True):
                    if not self.failed:
                        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                os.write(theirs, self.failed.encode())
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.set_blocking(ours, False)  # a process that a test left behind may have the other end
        with open(ours, "rb") as told:
            return code, (told.read() or b"").decode()


def is_for(item, mistake: Mistake) -> bool:
    return any(item.path == file and word in item.nodeid for file, word in mistake.selection)


def collect_and_run(files: tuple[str, ...], numbers: list[int], results, folder: str) -> None:
    """In a fork. Ends the process."""
    try:
        log = os.open(f"{folder}/{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        pytest.main([*QUICK, f"--basetemp={folder}/{os.getpid()}", *files], [Planted(numbers, results)])
    finally:
        os._exit(0)


def main(numbers: list[int]) -> None:
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("planted", database=None, phases=["explicit", "generate"])
    hypothesis.settings.load_profile("planted")
    jobs, running = defaultdict(list), 0
    for number in numbers:
        importlib.import_module(module_of(MISTAKES[number]))
        jobs[tuple(str(file) for file, _ in MISTAKES[number].selection)].append(number)
    gc.freeze()  # so that no fork copies what was imported here
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(1), "w") as results:
        for files, group in sorted(jobs.items(), key=lambda job: -len(job[1])):
            if running == AT_ONCE:
                os.wait()
                running -= 1
            if os.fork() == 0:
                collect_and_run(files, group, results, folder)
            running += 1
        for _ in range(running):
            os.wait()


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
    os._exit(0)  # Triton's bindings would complain of what they leak
