"""How torch's threads wait for each other on a CPU that other programs use, too."""

import os
import time


def spare_busy_cores() -> None:
    """Let OpenMP's waiting threads sleep if other programs are running: more than half of the cores are busy, ours
    included, now and 50 ms later. Called before torch is imported. They spin otherwise, which makes a step several
    times slower where another program has one of two cores."""
    for _ in range(5):
        try:
            with open("/proc/loadavg") as file:
                running = int(file.read().split()[3].partition("/")[0])  # this process is one of them
        except (OSError, IndexError, ValueError):
            return
        if running <= (os.cpu_count() or 1) // 2:
            return
        time.sleep(0.01)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP reads it when torch is loaded
