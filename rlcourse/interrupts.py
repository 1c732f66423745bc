"""Ctrl-C and SIGTERM: both end what runs, and a training run ends with a checkpoint."""

import signal
from contextlib import contextmanager

from tqdm import tqdm


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived, as rented machines send it before they stop."""


def raise_terminated(*_) -> None:
    """The handler of SIGTERM wherever nothing has to be finished first."""
    raise Terminated


class StopAfterStep:
    """Holds Ctrl-C and SIGTERM back while a step is under way, so that what is saved is never half a step."""

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
        if not self.inside or self.asked:
            raise stop
        self.asked = stop
        tqdm.write("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

    @contextmanager
    def delayed(self):
        """While inside, Ctrl-C waits for the end; a second one does not."""
        self.inside = True
        yield
        self.inside = False  # an interrupted step leaves it True
        if self.asked:
            raise self.asked
