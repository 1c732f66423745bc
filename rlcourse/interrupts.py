"""Ctrl-C and SIGTERM: both stop what runs; a training run saves a checkpoint first."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from rlcourse.dist import ALONE, OneProcess


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived, as rented machines send it before they stop."""


def raise_terminated(*_) -> None:
    """A handler of SIGTERM for where nothing has to be finished first."""
    raise Terminated


class StopAfterStep:
    """Delays Ctrl-C and SIGTERM until the current step ends, so that half a step is never saved.

    world: the processes of the run. They stop after the same step; only the first may stop between steps.
    """

    def __init__(self, world: OneProcess = ALONE):
        self.world = world

    def __enter__(self) -> "StopAfterStep":
        self.inside, self.asked = False, None
        self.previous = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._asked)
        except ValueError:  # not the main thread: a notebook's worker; Ctrl-C goes elsewhere
            pass
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _) -> None:
        stop = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self.world.rank == 0 and (not self.inside or self.asked):
            raise stop
        self.asked = stop
        tqdm.write("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

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
    """Around the loop of a run: on Ctrl-C or SIGTERM the current step is finished, then `save(training)` is called, and
    the command that goes on is printed. Half a step, after a second Ctrl-C, is not saved."""
    stop = StopAfterStep(training.world)
    try:
        with stop:
            yield stop
    except KeyboardInterrupt:
        if stop.inside:
            message = f"Stopped within step {training.step + 1}. Go on from the last checkpoint, if there is one, with:"
        else:
            save(training)
            message = f"Stopped at step {training.step}. Go on with:"
        tqdm.write(f"{message} {training.run.resume_command()}")
        raise
