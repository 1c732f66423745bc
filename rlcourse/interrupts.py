"""Ctrl-C, SIGTERM and SIGHUP: all stop what runs; a training run saves a checkpoint first."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP


class Terminated(KeyboardInterrupt):
    """One of STOPS arrived, whose number is the argument."""


def raise_terminated(number: int, _) -> None:
    raise Terminated(number)


def say(text: str) -> None:
    """Print a line above the progress bars, if there's still somebody to read it: a run outlives its terminal."""
    with suppress(OSError):
        tqdm.write(text)


def progress_bar(desc: str | None, total: int, unit: str = "step", **options: Any) -> tqdm:
    """A progress bar called `desc`; nothing without a name, or in a log file, which would keep all it ever showed."""
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(total=total, desc=desc, unit=unit, disable=desc is None or not watched, dynamic_ncols=True, **options)


class StopAfterStep:
    """Around the loop of a run: Ctrl-C and STOPS take effect when the current step ends, and `save(training)` is called
    then. Half a step, after a second Ctrl-C, isn't saved. All processes of a world stop after the same step; only the
    first may stop between steps."""

    def __init__(self, training: Any, save: Callable[[Any], None]):
        self.training, self.save, self.inside, self.asked, self.previous = training, save, False, None, {}

    def __enter__(self) -> "StopAfterStep":
        try:
            for number in (signal.SIGINT, *STOPS):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
                    self.previous[number] = signal.signal(number, self._asked)
        except ValueError:  # not the main thread: a notebook's worker; Ctrl-C goes elsewhere
            pass
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        try:
            if kind and issubclass(kind, KeyboardInterrupt):
                said = f"within step {self.training.step + 1}. Go on from the last checkpoint, if there is one, with:"
                if not self.inside:
                    self.save(self.training)
                    said = f"at step {self.training.step}. Go on with:"
                say(f"Stopped {said} {self.training.run.resume_command()}")
        finally:
            for number, handler in self.previous.items():
                signal.signal(number, handler)

    def _asked(self, number: int, _) -> None:
        again = self.asked is not None
        if again and number in STOPS:  # a terminal that closes sends several: none may cut off the step, or the save
            return
        self.asked = Terminated(number) if number in STOPS else KeyboardInterrupt()
        if self.training.world.rank == 0 and (not self.inside or again):
            raise self.asked
        say("Finishing this step, then saving. Press Ctrl-C again to stop at once.")

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Within, Ctrl-C takes effect at the end; a second one at once."""
        self.inside = True
        yield
        stop = next(filter(None, self.training.world.all_gather(self.asked)), None)
        self.inside = False  # an interrupted step leaves it True
        if stop:
            raise stop
