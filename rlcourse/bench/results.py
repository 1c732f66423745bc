"""The rows of a benchmark, in the order in which they are measured."""

from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]


class Results:
    """The setup of a benchmark, and its rows so far."""

    def __init__(self):
        self.setup: dict[str, Any] = {}
        self.rows: Rows = []

    def begin(self, setup: dict[str, Any]) -> None:
        """Before the first row: the setup of all of them."""
        self.setup = setup

    def measure(self, what: dict[str, Any], run: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Add the row of `what`, the variant and whatever else tells it from others, and `run(*args)`."""
        self.rows.append(what | run(*args))
