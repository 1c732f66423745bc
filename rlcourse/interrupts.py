"""Ctrl-C, SIGTERM and SIGHUP: all stop what runs; a training run saves a checkpoint first."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

from rlcourse.dist import ALONE, OneProcess

STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP


class Terminated(KeyboardInterrupt):
    """One of STOPS arrived, whose number is the argument."""


def raise_terminated(number: int, _) -> None:
    raise Terminated(number)


def say(text: str) -> None:
    """Print a line above the progress bars, if there's still somebody to read it: a run outlives its terminal."""
    with suppress(OSError):
        tqdm.write(text)


class StopAfterStep:
    """Delays Ctrl-C and STOPS until the current step ends. All processes of the `world` stop after the same step; only
    the first may stop between steps."""

    def __init__(self, world: OneProcess = ALONE):
        self.world, self.inside, self.asked, self.previous = world, False, None, {}

    def __enter__(self) -> "StopAfterStep":
        try:
            for number in (signal.SIGINT, *STOPS):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
                    self.previous[number] = signal.signal(number, self._asked)
        except ValueError:  # not the main thread: a notebook's worker; Ctrl-C goes elsewhere
            pass
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _) -> None:
        again = self.asked is not None
        if again and number in STOPS:  # a terminal that closes sends several: none may cut off the step, or the save
            return
        self.asked = Terminated(number) if number in STOPS else KeyboardInterrupt()
        if self.world.rank == 0 and (not self.inside or again):
            raise self.asked
        say("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

    @contextmanager
    def delayed(self):
        """Within, Ctrl-C takes effect at the end; a second one at once."""
        self.inside = True
        yield
        stop = next(filter(None, self.world.all_gather(self.asked)), None)
        self.inside = False  # an interrupted step leaves it True
        if stop:
            raise stop


@contextmanager
def saved_when_stopped(training: Any, save: Callable[[Any], None]) -> Iterator[StopAfterStep]:
    """Around the loop of a run: on Ctrl-C, on STOPS, or when the pipe of its progress bar is closed, the current step
    is finished and `save(training)` called. Half a step, after a second Ctrl-C, isn't saved."""
    with StopAfterStep(training.world) as stop:
        try:
            yield stop
        except (KeyboardInterrupt, BrokenPipeError):
            if stop.inside:
                said = f"within step {training.step + 1}. Go on from the last checkpoint, if there is one, with:"
            else:
                save(training)
                said = f"at step {training.step}. Go on with:"
            say(f"Stopped {said} {training.run.resume_command()}")
            raise
