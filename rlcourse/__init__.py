"""rlcourse: reinforcement learning for language models, from the policy gradient to a GPU kernel.

Nothing heavy is imported here, so that `import rlcourse` is instant. One training step, `step.train_step`, passes
through, in this order: `collect` (`tasks.prompts` → `rollout` → the task's `judge`) → `advantages` → `logprobs` →
`losses` → `learner`. What one hands to the next is in `batch`; `trainer` repeats the step.
"""

import os
import time

__version__ = "0.1.0"


def _cores_are_taken() -> bool:
    """Whether other programs run on half of the cores now, and still do 50 ms later: one that just starts or ends does
    not count. False if the system does not say."""
    for _ in range(5):
        try:
            with open("/proc/loadavg") as file:
                running = int(file.read().split()[3].partition("/")[0])  # this process is one of them
        except (OSError, IndexError, ValueError):
            return False
        if running <= (os.cpu_count() or 1) // 2:
            return False
        time.sleep(0.01)
    return True


# OpenMP reads this when torch is loaded. Its threads spin while they wait for each other, which is fastest where each
# has a core, and where another program has one of two cores makes a training step several times slower. There they
# sleep, which on an idle machine would make it slower instead.
if _cores_are_taken():
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
