"""The counted time of a program: what its launches, bytes and operations cost on a GPU. Time is counted, not measured,
so that it is the same on every machine and its minimum can be found by search. For memory-bound operations like these,
it depends on the passes over memory and the number of launches."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlcourse.tasks.kernels.language import Launch

ELEMENT_BYTES = 4  # float32


@dataclass(frozen=True)
class Card:
    """The cost of a launch, and the data sheet's rates for memory and float32."""

    name: str
    launch_us: float
    bytes_per_us: float
    operations_per_us: float
    rows: int = 1024  # of every matrix
    columns: int = 1024


# Launching from Python usually takes the host 5 us: an assumption, the same for both.
A10G = Card("A10G", launch_us=5.0, bytes_per_us=600e3, operations_per_us=31.2e6)
H200 = Card("H200", launch_us=5.0, bytes_per_us=4800e3, operations_per_us=67e6)


def launch_us(launch: Launch, card: Card = A10G) -> float:
    """Microseconds of one launch: its start, its loads and stores, and an operation per element."""

    def elements(name: str) -> int:
        return card.rows * (1 if name in launch.narrow else card.columns)

    moved = sum(map(elements, (*launch.loads, *launch.stores))) * ELEMENT_BYTES
    operations = sum(max(map(elements, (s.line.name, *s.line.args))) for s in launch.statements)
    return card.launch_us + moved / card.bytes_per_us + operations / card.operations_per_us


def program_us(launches: Iterable[Launch], card: Card = A10G, side_is_timed: bool = True) -> float:
    """Microseconds of all launches; without `side_is_timed`, of those on the main stream alone (a loophole)."""
    return sum(launch_us(launch, card) for launch in launches if side_is_timed or not launch.side)
