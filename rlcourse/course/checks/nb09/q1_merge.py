"""q1: merge what others have normalised."""

import torch

from rlcourse.course.checks import Question, compare, draw

q1 = Question("q1", "merge_outputs", hint="How much of the weight of all tokens falls to one place? And to the sink?")


def check_merge(
    f, heads: int, lengths: list[int], spread: float = 1.0, shift: float = 0.0, apart: float = 0.0, sink: bool = True
) -> None:
    """Places with so many random tokens each, against one softmax over all tokens and the sink in float64. apart: how
    much higher the scores of each head are than those of the head before."""
    size, n, height = draw(3, 6), sum(lengths), shift + apart * torch.arange(heads)
    scores, values = spread * torch.randn(heads, n) + height[:, None], torch.randn(n, size)
    sinks = spread * torch.randn(heads) + height if sink else torch.full((heads,), -torch.inf)
    logs = torch.stack([part.logsumexp(1) for part in scores.split(lengths, 1)])
    outputs = torch.stack(
        [
            part.softmax(1) @ value if len(value) else torch.zeros(heads, size)
            for part, value in zip(scores.split(lengths, 1), values.split(lengths), strict=True)
        ]
    )
    expected = torch.zeros(heads, size, dtype=torch.float64)
    for head in range(heads):  # one softmax over all tokens and the sink, whose value is nothing
        if n:
            weights = torch.cat([scores[head], sinks[head, None]]).double().softmax(0)
            expected[head] = weights[:-1] @ values.double()

    with_sink = torch.cat([logs, sinks[None]]).double()
    weights = (with_sink - with_sink.amax(0).clamp(min=-1e30)).exp()
    parts = weights[:-1, :, None] * outputs
    shares = weights[:-1].sum(0).clamp(min=1e-30)
    for_all = (with_sink - with_sink.max().clamp(min=-1e30)).float().exp()
    mistakes = {
        "You took the mean of the outputs: a place with more weight counts more.": outputs.mean(0),
        "You added the outputs as they are: each is normalised by itself.": outputs.sum(0),
        "The sink takes its share of the weight: it belongs into what you divide by.": parts.sum(0) / shares[:, None],
        "The weights are not divided by their sum.": parts.sum(0),
        "You kept the place with the largest log-sum: the others count too.": outputs.gather(
            0, logs.argmax(0)[None, :, None].expand(1, *outputs.shape[1:])
        )[0],
        "Each head has a largest log-sum of its own: you took one for all heads.": (
            (for_all[:-1, :, None] * outputs).sum(0) / for_all.sum(0).clamp(min=1e-30)[:, None]
        ),
        "You weighted by the log-sums themselves: the weight of a place is the exponential of its log-sum.": (
            (logs.double()[..., None] * outputs).sum(0) / with_sink.sum(0)[:, None]
        ),
        "The sink is a score like others, not a number of tokens: take its exponential, too.": (
            parts.sum(0) / (shares + sinks.double())[:, None]
        ),
    }
    compare(f(outputs, logs, sinks), expected.float(), mistakes, atol=1e-4)


@q1.case("places of different lengths, no sink")
def _(f):
    check_merge(f, 3, [draw(2, 5), 1, draw(6, 10)], sink=False)
    check_merge(f, 2, [draw(3, 9)], sink=False)


@q1.case("a sink")
def _(f):
    check_merge(f, 3, [draw(2, 5), 1, draw(6, 10)])
    check_merge(f, 2, [6, 6], spread=3.0)


@q1.case("scores in the hundreds: exp of a log-sum alone is infinite, or zero")
def _(f):
    for shift in (400.0, -400.0, 800.0, -800.0):  # the latter are too much for float64 as well
        check_merge(f, 2, [draw(3, 6), 5, 5], spread=3.0, shift=shift)


@q1.case("heads whose scores lie hundreds apart")
def _(f):
    check_merge(f, 3, [draw(3, 6), 5, 5], spread=3.0, shift=-300.0, apart=300.0)


@q1.case("a place that saw nothing (log-sum -inf)")
def _(f):
    check_merge(f, 3, [0, draw(2, 6), 3], sink=False)
    check_merge(f, 3, [draw(2, 6), 0])


@q1.case("a head of which nobody saw anything gives zeros")
def _(f):
    check_merge(f, 2, [0, 0], sink=False)
    check_merge(f, 2, [0, 0])
    check_merge(f, 2, [draw(2, 4), 5])
