"""Plants mistakes in copies of rlcourse and runs tests on them: `python runner.py < jobs.json`, a line for each result.

A job is {"id", "file", "old", "new", "tests"}; without a file the copy stays as it is. torch, transformers and pytest
are imported once; each job runs in a fork, which puts its own copy of rlcourse first. What comes back is the exit code
of pytest, -1 for a job that took too long, and the end of what it said. Two jobs run at a time.
"""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "TRITON_INTERPRET": "1"}
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

import hypothesis
import matplotlib.pyplot
import pytest
import torch
import torch._dynamo
import torch.profiler
import transformers
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
import typer.testing

REPOSITORY = Path(__file__).resolve().parents[2]
AT_ONCE, SECONDS = 2, 900
assert matplotlib and hypothesis and typer and "rlcourse" not in sys.modules


def plant(job: dict, folder: Path) -> None:
    """A copy of the package in `folder`, with the job's mistake."""
    shutil.copytree(REPOSITORY / "rlcourse", folder / "rlcourse")  # with its compiled files: what is unchanged loads
    for name in ("data", "notebooks", "exercises", "solutions"):
        (folder / name).symlink_to(REPOSITORY / name)
    if job.get("file"):
        path = folder / "rlcourse" / job["file"]
        path.write_text(path.read_text().replace(job["old"], job["new"], 1))


def run(job: dict, folder: Path, output: Path) -> None:
    """In the fork: the tests on the copy. Ends the process with pytest's exit code."""
    code = 99
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        plant(job, folder)
        os.chdir(REPOSITORY)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without it
        tests = [str(REPOSITORY / "tests" / name) for name in job["tests"]]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-m", "not thorough"]
        options += ["--assert=plain", "--tb=line", "-W", "ignore"]
        code = int(pytest.main([*options, f"--basetemp={folder / 'tmp'}", *tests]))
        if not sys.modules["rlcourse"].__file__.startswith(str(folder)):
            print("another rlcourse was tested")
            code = 98
        sys.stdout.flush()
    finally:
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that no fork goes through what was imported here
    jobs, running = json.load(sys.stdin), {}
    root = Path(tempfile.mkdtemp(prefix="planted-"))
    try:
        while jobs or running:
            while jobs and len(running) < AT_ONCE:
                job = jobs.pop(0)
                folder = Path(tempfile.mkdtemp(dir=root))
                pid = os.fork()
                if pid == 0:
                    os.setpgid(0, 0)
                    run(job, folder, folder / "output")
                running[pid] = job["id"], folder, time.monotonic()
            for pid, (name, folder, start) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                seconds = time.monotonic() - start
                if not ended and seconds < SECONDS:
                    continue
                if not ended:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status) if ended else -1
                said = (folder / "output").read_text(errors="replace")[-1500:]
                print(json.dumps({"id": name, "code": code, "seconds": round(seconds, 1), "said": said}), flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                del running[pid]
            time.sleep(0.02)
    finally:
        shutil.rmtree(root, ignore_errors=True)


main()
os._exit(0)  # Triton's bindings would complain of what they leak
