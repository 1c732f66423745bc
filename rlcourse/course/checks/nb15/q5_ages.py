"""q5: how old the weights are that sampled each batch."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q5 = Question("q5", "ages", hint="When does sampling of batch i begin? Which updates have ended by then?")

MISTAKES = {
    "at the end": "Weights are taken when sampling begins, not when it ends.",
    "one more": "Batch i waits for update i - 1 - ahead: with ahead = 0 that is the update just before it.",
    "one less": "Your sampler waits for one update too many.",
    "never waits": "Your sampler never waits for the trainer.",
    "updates": "That counts the updates that the sampler had, not those that it lacks.",
}


def by_events(sample: list[float], train: list[float], ahead: int, mistake: str = "") -> list[int]:
    """A clock that goes from event to event: a sampler and a trainer, each busy or not."""
    ahead += {"one more": 1, "one less": -1}.get(mistake, 0)
    count, now, updates = len(sample), 0.0, 0
    has: list[int] = []  # updates that were in the weights of each batch
    sampling = training = None  # (when it ends, which batch)
    queue: list[int] = []
    while updates < count:
        if sampling is None and len(has) < count and (mistake == "never waits" or len(has) <= updates + max(ahead, 0)):
            sampling = (now + sample[len(has)], len(has))
            has.append(updates)
        if training is None and queue:
            training = (now + train[queue[0]], queue.pop(0))
        if sampling is None and training is None:
            raise AssertionError("nobody can go on")
        now = min(event[0] for event in (sampling, training) if event is not None)
        if training is not None and training[0] == now:
            updates, training = updates + 1, None
        if sampling is not None and sampling[0] == now:
            queue.append(sampling[1])
            if mistake == "at the end":
                has[sampling[1]] = updates
            sampling = None
    return has if mistake == "updates" else [i - h for i, h in enumerate(has)]


def check_ages(f, sample: Tensor, train: Tensor, ahead: int) -> None:
    given = (sample.tolist(), train.tolist(), ahead)
    mistakes = {sentence: torch.tensor(by_events(*given, mistake)) for mistake, sentence in MISTAKES.items()}
    compare(f(sample, train, ahead), torch.tensor(by_events(*given)), mistakes, what="the ages")


def times(count: int, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(count, dtype=torch.float64)


@q5.case("a slow trainer: the sampler runs ahead as far as it may")
def _(f):
    for ahead in (1, draw(2, 3)):
        count = draw(8, 12)
        check_ages(f, times(count, 1, 2), times(count, 4, 6), ahead)


@q5.case("a slow sampler")
def _(f):
    count = draw(6, 9)
    check_ages(f, times(count, 6, 9), times(count, 4, 8), draw(2, 4))


@q5.case("not ahead at all, then one batch")
def _(f):
    count = draw(6, 9)
    sample, train = times(count, 1, 5), times(count, 1, 5)
    if not torch.equal(torch.as_tensor(f(sample, train, 0)), torch.zeros(count, dtype=torch.long)):
        raise AssertionError("with ahead = 0 each batch is sampled with the newest weights: all ages are 0")
    check_ages(f, sample, train, 1)


@q5.case("times that vary, some of them long")
def _(f):
    for ahead in (draw(1, 2), draw(3, 5)):
        count = draw(12, 20)
        sample = times(count, 1, 3) + 12 * (torch.rand(count) < 0.2)
        check_ages(f, sample, times(count, 1, 6), ahead)
