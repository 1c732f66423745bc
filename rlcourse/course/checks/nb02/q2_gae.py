"""q2: GAE across the answer of a tool."""

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw
from rlcourse.course.checks.nb02.padding import compare_finite, junk

q2 = Question("q2", "gae_with_tool", hint="What should a token that is not the policy's own change in what you carry?")


def gae_sums(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, carry: float | None = None):
    """GAE as a double sum over the policy's own tokens, as if there were no others: [rows, length], float64.

    carry: the factor in place of gamma * lam.
    """
    carry = gamma * lam if carry is None else carry
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0].tolist()
        r, v = rewards[row, places].double().tolist(), [*values[row, places].double().tolist(), 0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(places))]
        for k, t in enumerate(places):
            found[row, t] = sum(carry ** (j - k) * deltas[j] for j in range(k, len(places)))
    return found


def gae_columns(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, fill: bool, decay: bool):
    """GAE over the columns as the lesson's, which knows of no gaps. fill: the tool's values are 0, else they stand;
    decay: what is carried fades on the tool's tokens, else on one's own alone."""
    clean = values.double().masked_fill(~mask, 0.0) if fill else values.double()
    r, found = rewards.double().masked_fill(~mask, 0.0), torch.zeros(mask.shape, dtype=torch.float64)
    carried = after = torch.zeros(len(mask), dtype=torch.float64)
    for t in reversed(range(mask.shape[1])):
        delta = r[:, t] + gamma * after - clean[:, t]
        if not decay:
            delta = torch.where(mask[:, t], delta, 0.0)
        carried = delta + (gamma * lam if decay else torch.where(mask[:, t], gamma * lam, 1.0)) * carried
        found[:, t], after = torch.where(mask[:, t], carried, 0.0), clean[:, t]
    return found


def gae_from_last(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """What comes after the last own token is taken to be worth its value again."""
    longer = rewards.clone()
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0]
        if len(places):
            longer[row, places[-1]] += gamma * values[row, places[-1]]
    return gae_sums(longer, values, mask, gamma, lam)


def gae_fading(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The right TD errors, but what is carried fades on the tool's tokens too."""
    deltas = gae_sums(rewards, values, mask, gamma, 0.0)
    return gae_columns(deltas, torch.zeros_like(values), mask, gamma, lam, fill=True, decay=True)


def gae_mistakes(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> dict[str, Tensor]:
    """What usual mistakes give: [rows, length]."""
    given = (rewards, values, mask, gamma, lam)
    right, every = gae_sums(*given), torch.ones_like(mask)
    deltas = gae_sums(rewards, values, mask, gamma, 0.0)
    forward = gae_sums(deltas.flip(1), torch.zeros_like(values), mask.flip(1), 1.0, gamma * lam).flip(1)
    returns = right + values.double().masked_fill(~mask, 0.0)
    no_gamma = gae_sums(rewards, values, mask, 1.0, lam, carry=gamma * lam)
    return {
        "The tool's words end the answer for you: the next value is that before the next token of one's own.": (
            gae_columns(*given, fill=True, decay=True)
        ),
        "What you carry fades on the tool's words: it should fade on the policy's own tokens alone.": gae_fading(
            *given
        ),
        "The value before a tool's word is not the next value: take that before the next token of one's own.": (
            gae_columns(*given, fill=False, decay=False)
        ),
        "You bootstrapped from the last value: after the last token of one's own the value is 0.": gae_from_last(
            *given
        ),
        "The tool's words have advantages: they must be 0 where mask is False.": gae_sums(
            rewards, values, every, gamma, lam
        ),
        "You let the tool's words count as the policy's own.": gae_sums(rewards, values, every, gamma, lam) * mask,
        "You returned advantages plus values: these are the returns.": returns,
        "You ran forwards: an advantage holds what comes later, so start at the end.": forward,
        "The sign of the values is wrong: r_t + gamma V_next - V_t.": gae_sums(rewards, -values, mask, gamma, lam),
        "The TD error lacks its gamma: r_t + gamma V_next - V_t.": no_gamma,
        "These are the TD errors alone: carry the advantage.": deltas,
        "You carried it with lam alone, not gamma * lam.": gae_sums(*given, carry=lam),
        "lam is not used: you carried it with gamma alone.": gae_sums(rewards, values, mask, gamma, 1.0),
    }


def with_gaps(rows: int, length: int) -> Tensor:
    """Masks of answers in which a tool speaks, once at least, and padding: bool [rows, length]."""
    mask = torch.rand(rows, length) < 0.6
    mask[:, 0], mask[:, 1:3] = True, False
    mask[:, 3], mask[:, -1] = True, False
    return mask


def check_gae(f, mask: Tensor, gamma: float, lam: float) -> None:
    rewards, values = (junk(torch.randn(mask.shape), mask, value) for value in (5.0, -4.0))
    given = (rewards, values, mask, gamma, lam)
    compare(f(*given), gae_sums(*given), gae_mistakes(*given))


@q2.case("one tool call in the middle")
def _(f):
    own = draw(2, 3)
    row = [True] * own + [False] * draw(2, 4) + [True] * 2
    check_gae(f, torch.tensor([row]), 0.9, 0.7)


@q2.case("several calls, and padding; lam = 0 and lam = 1")
def _(f):
    for gamma, lam in ((0.9, 0.7), (1.0, 0.0), (1.0, 1.0)):
        check_gae(f, with_gaps(5, 9), gamma, lam)


@q2.case("no call at all, a tool that has the last word, and a row without a token of one's own")
def _(f):
    mask = with_gaps(5, 7)
    mask[0] = torch.arange(7) < draw(2, 5)
    mask[1] = torch.arange(7) < 3
    mask[2] = False
    check_gae(f, mask, 0.95, 0.8)


@q2.case("nan among the tool's words does no harm")
def _(f):
    mask = with_gaps(3, 6)
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    found = f(junk(rewards, mask, torch.nan), junk(values, mask, torch.nan), mask, 0.9, 0.7)
    given = (rewards, values, mask, 0.9, 0.7)
    compare_finite(found, gae_sums(*given), gae_mistakes(*given), "the result")
