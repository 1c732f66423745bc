"""How torch's threads wait for each other on a CPU that other programs use, too."""

import os
import time


def spare_busy_cores() -> None:
    """Let OpenMP's waiting threads sleep if other programs are running now; called before torch is imported. They spin
    otherwise, which makes a step several times slower where another program has one of two cores."""
    if _cores_are_taken():
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP reads it when torch is loaded


def _cores_are_taken() -> bool:
    """Whether more than half of the cores are busy, ours included, now and 50 ms later. False if unknown."""
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
