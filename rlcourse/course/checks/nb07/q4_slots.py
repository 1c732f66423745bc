"""q4: how many slots to take."""

import functools
import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw

q4 = Question("q4", "best_slots", hint="After how many steps has the last answer ended, with so many slots? Try all.")


@functools.lru_cache(maxsize=10_000)
def steps_needed(lengths: tuple[int, ...], slots: int) -> int:
    """Steps until all answers have ended, by going through all steps one by one."""
    left, waiting, step = [], list(lengths), 0
    while left or waiting:
        while waiting and len(left) < slots:
            left.append(waiting.pop(0))
        step += 1
        left = [n - 1 for n in left if n > 1]
    return step


def in_batches(lengths: tuple[int, ...], slots: int) -> int:
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def in_turn(lengths: tuple[int, ...], slots: int) -> int:
    return max(sum(lengths[s::slots]) for s in range(slots))


def sorted_first(lengths: tuple[int, ...], slots: int) -> int:
    return steps_needed(tuple(sorted(lengths, reverse=True)), slots)


def evenly(lengths: tuple[int, ...], slots: int) -> int:
    return -(-sum(lengths) // slots)


def step_time(slots: int, host: float, fixed: float, row: float) -> float:
    return max(host, fixed + row * slots)


def best(lengths: tuple[int, ...], most: int, steps, time) -> int:
    """The number of slots with the least steps x time."""
    return min(range(1, most + 1), key=lambda slots: steps(lengths, slots) * time(slots))


def slot_mistakes(lengths: tuple[int, ...], host: float, fixed: float, row: float, most: int) -> dict[str, int]:
    def time(slots: int) -> float:
        return step_time(slots, host, fixed, row)

    free_host = math.floor((host - fixed) / row) if row else most
    return {
        "You wait for the longest of each batch: a free slot takes the next answer at once.": best(
            lengths, most, in_batches, time
        ),
        "You divided the tokens evenly: an answer stays in its slot until it ends.": best(lengths, most, evenly, time),
        "You sorted the longest first: they wait in the order given.": best(lengths, most, sorted_first, time),
        "You dealt the answers out in turn: the next one takes the slot that is free first.": best(
            lengths, most, in_turn, time
        ),
        "You left the host out: a step never takes less than that.": best(
            lengths, most, steps_needed, lambda slots: fixed + row * slots
        ),
        "You added the host's time: it launches while the device works, so the longer of the two counts.": best(
            lengths, most, steps_needed, lambda slots: host + fixed + row * slots
        ),
        "You left out what is fixed in a step.": best(
            lengths, most, steps_needed, lambda slots: max(host, row * slots)
        ),
        "You made the steps few, not the time short: more slots make each step longer.": best(
            lengths, most, steps_needed, lambda slots: 1.0
        ),
        "That is as many slots as the host hides: more of them may still be faster, or fewer.": max(
            1, min(most, free_host)
        ),
        "As many slots as possible make each step as long as possible.": most,
    }


def check_slots(f, lengths: tuple[int, ...], host: float, fixed: float, row: float, most: int) -> None:
    found = f(torch.tensor(lengths), host, fixed, row, most)
    if isinstance(found, Tensor) and found.numel() == 1 and not found.dtype.is_floating_point:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int):
        raise AssertionError(f"return a whole number, not {type(found).__name__}.")
    if not 1 <= found <= most:
        raise AssertionError(f"{found} slots are not between 1 and {most}.")
    times = {slots: steps_needed(lengths, slots) * step_time(slots, host, fixed, row) for slots in range(1, most + 1)}
    least = min(times.values())
    if times[found] <= least * (1 + 1e-6):
        return
    said = [said for said, wrong in slot_mistakes(lengths, host, fixed, row, most).items() if found == wrong]
    if said:
        raise AssertionError(" Or: ".join(said))
    raise AssertionError(f"{found} slots take {times[found]:.4g} ms, the best number of them {least:.4g} ms.")


def deceiving(make, *names: str) -> tuple:
    """Inputs of `make()` on which the rules whose sentences hold one of `names` are not best, nor 1, 2 and `most`."""
    for _ in range(300):
        inputs = make()
        lengths, *prices, most = inputs
        times = {s: steps_needed(lengths, s) * step_time(s, *prices) for s in range(1, most + 1)}
        least = min(times.values())
        rules = [wrong for said, wrong in slot_mistakes(*inputs).items() if any(name in said for name in names)]
        if all(times[slots] > least * 1.001 for slots in (*rules, 1, 2, most)):
            return inputs
    return inputs


def some_lengths(count: int, mean: float) -> tuple[int, ...]:
    return tuple((1 + torch.distributions.Geometric(1 / mean).sample((count,)).long()).clamp(max=200).tolist())


def part(low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), dtype=torch.float64).item()


@q4.case("a host that hides some rows")
def _(f):
    def make() -> tuple:
        return some_lengths(24, 9), part(2.0, 3.0), part(0.3, 0.6), part(0.1, 0.2), 24

    check_slots(f, *deceiving(make, "left the host out", "added the host", "As many"))
    check_slots(f, *deceiving(make, "left the host out", "that the host hides", "as the host hides"))


@q4.case("rows that cost, and a price for each step")
def _(f):
    def make() -> tuple:
        return some_lengths(30, 8), 0.01, part(1.0, 2.0), part(0.05, 0.2), 20

    check_slots(f, *deceiving(make, "left out what is fixed", "steps few", "divided the tokens"))
    check_slots(f, *deceiving(make, "longest of each batch", "divided the tokens"))


@q4.case("the order in which they wait")
def _(f):
    def make() -> tuple:
        return some_lengths(16, 12), part(0.2, 0.8), part(0.3, 0.9), part(0.05, 0.3), 12

    check_slots(f, *deceiving(make, "sorted the longest", "dealt the answers"))
    check_slots(f, *deceiving(make, "dealt the answers"))
    check_slots(f, *deceiving(make, "sorted the longest"))


@q4.case("one answer that is much longer than the others")
def _(f):
    def make() -> tuple:
        lengths = list(some_lengths(20, 5))
        lengths[draw(8, 19)] = draw(60, 120)
        return tuple(lengths), 0.0, part(0.5, 1.0), part(0.02, 0.1), 20

    check_slots(f, *deceiving(make, "divided the tokens", "longest of each batch"))
