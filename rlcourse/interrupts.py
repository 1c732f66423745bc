"""Ctrl-C and SIGTERM: both stop what runs; a training run saves a checkpoint first."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived, as rented machines send it before they stop."""


def raise_terminated(*_) -> None:
    """A handler of SIGTERM for where nothing has to be finished first."""
    raise Terminated


class StopAfterStep:
    """Delays Ctrl-C and SIGTERM until the current step ends, so that half a step is never saved.

    agree: at the end of a step, the stop that was asked for, or None → the one that all processes of the run make.
    follows: another process decides, and this one never stops by itself.
    """

    def __init__(self, agree: Callable[[Any], Any] | None = None, follows: bool = False):
        self.agree, self.follows = agree or (lambda stop: stop), follows

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
        if not self.follows and (not self.inside or self.asked):
            raise stop
        self.asked = stop
        tqdm.write("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

    @contextmanager
    def delayed(self):
        """Within, Ctrl-C takes effect at the end; a second one at once."""
        self.inside = True
        yield
        stop = self.agree(self.asked)
        self.inside = False  # an interrupted step leaves it True
        if stop:
            raise stop


@contextmanager
def saved_when_stopped(
    step: Callable[[], int],
    save: Callable[[], None],
    resume_command: Callable[[], str],
    agree: Callable[[Any], Any] | None = None,
    follows: bool = False,
) -> Iterator[StopAfterStep]:
    """The loop of a run: at Ctrl-C or SIGTERM its current step is finished, then `save` is called, and the way to go on
    printed. step: how many steps are done. Half a step, after a second Ctrl-C, is no state to go on from: not saved.
    agree, follows: see `StopAfterStep`."""
    stop = StopAfterStep(agree, follows)
    try:
        with stop:
            yield stop
    except KeyboardInterrupt:
        if stop.inside:
            said = f"Stopped within step {step() + 1}. Go on from the last checkpoint, if there is one, with:"
        else:
            save()
            said = f"Stopped at step {step()}. Go on with:"
        tqdm.write(f"{said} {resume_command()}")
        raise
