"""Where a notebook's code runs: which files it sees, and what it may take. On Linux that is in namespaces of its
own."""

import functools

from rlcourse.paths import data_folder
from rlcourse.sandbox.process import Box, find_way

# What of the package is there. No function that an exercise asks for stands in these files.
VISIBLE = (
    "__init__.py", "files.py", "openmp.py", "paths.py",
    "course/__init__.py", "course/start.py", "course/calls.py", "course/figures.py",
    "course/grading/worker.py",
    "course/kernels/trace.py", "course/lessons/curve_records.py",
    "kernels/__init__.py", "kernels/arguments.py", "kernels/dsl.py", "kernels/toolchain.py",
    "measure/__init__.py", "measure/machine.py", "measure/plots.py", "measure/records.py",
    "sandbox/namespaces.py", "sandbox/wire.py",
)  # fmt: skip
# Of each process: seconds, bytes of a file, open files, and nothing of what no answer needs.
LIMITS = {"CPU": 300, "FSIZE": 1 << 26, "NOFILE": 256, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0, "NPROC": 32}
LIMITS |= {"folder_bytes": 1 << 28, "files": 4096}
OWN_BYTES = 1 << 30  # what libraries hold in memory
MISSING = (
    "Not isolated: a notebook's code runs as your own user, with your files, processes and network, the answers among "
    "them. Grade only what you trust. ({why})"
)


def box(memory_bytes: int) -> Box:
    code = "from rlcourse.course.grading.worker import main; main(wire, limits)"
    limits = LIMITS | {"memory_bytes": memory_bytes + OWN_BYTES}
    return Box(VISIBLE, code, environment, limits, folders={"data": data_folder()})


@functools.cache
def way() -> tuple[str, str]:
    """How this system isolates a notebook's code; and, where it does not, why."""
    return find_way(box(0))


def environment(folder: str) -> dict[str, str]:
    """The variables of the worker: none of the grader's own, in which there may be secrets."""
    # torch.compile and torch.jit.script give back what they were given: it runs as Python, without a compiler
    return {
        "HOME": folder, "TMPDIR": folder, "MPLCONFIGDIR": folder, "MPLBACKEND": "agg", "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1",
        "PYTORCH_JIT": "0", "RLCOURSE_PROFILE": "smoke",
    }  # fmt: skip
