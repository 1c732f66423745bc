"""q5: a decode-attention kernel."""

import math

import torch
from torch import Tensor

import ptx_interpreter as ptx
from rlcourse.course.checks import Question, compare
from rlcourse.course.checks.kernels import SECONDS, Maker, execute, meaning

q5 = Question(
    "q5",
    "WarpAttention",
    hint="Begin with the score of one slot: products of a lane, then a sum over lanes.",
    seconds=SECONDS,
    caller=Maker,
)


MEANING = {
    ptx.Uninitialised: "Something is read that was never written: a part of `out`?",
    ptx.OutOfBounds: "An access beside its tensor: check first, last and the lane's elements.",
    ptx.Race: "Two blocks write the same place: each has its own pair.",
}


def check_kernel(f, spans: list[tuple[int, int]], slots: int, size: int = 64, scores=None) -> None:
    """spans: (first, last) of each pair. Slots outside hold nan, so that whoever reads them is found out. scores: what
    the scores shall be, [slots], the same for all pairs; random ones if not given."""
    pairs, inside = len(spans), torch.zeros(len(spans), slots, dtype=torch.bool)
    for pair, (first, last) in enumerate(spans):
        inside[pair, first:last] = True
    q, keys, values = torch.randn(pairs, size), *torch.randn(2, pairs, slots, size).unbind(0)
    if scores is not None:  # replace the part of the keys that lies along the query
        along = q / q.square().sum(1, keepdim=True)
        wanted = scores * math.sqrt(size) - torch.einsum("pd,psd->ps", q, keys)
        keys = keys + wanted[..., None] * along[:, None]
    first, last = (torch.tensor(ends, dtype=torch.int32) for ends in zip(*spans, strict=True))
    poisoned = [x.masked_fill(~inside[..., None], torch.nan) for x in (keys, values)]
    out = torch.full((pairs, size), torch.nan)
    tensors = {"q": q, "keys": poisoned[0], "values": poisoned[1], "first": first, "last": last, "out": out}
    execute(lambda: f(size), tensors, says=lambda error: MEANING.get(type(error)) or meaning(error))

    def attend(scale=size**-0.5, spans=spans, divide=True, power=math.e, lane=slice(None)) -> Tensor:
        found = torch.zeros(pairs, size, dtype=torch.float64)
        for pair, (a, b) in enumerate(spans):
            if b > a:
                products = keys[pair, a:b, lane].double() @ q[pair, lane].double()
                weights = (scale * math.log(power) * (products - products.max())).exp()
                found[pair] = weights @ values[pair, a:b].double() / (weights.sum() if divide else 1)
        return found.float()

    def online(start=-1e30, rescale_l=True, rescale_acc=True) -> Tensor:
        """Slot by slot in float32, as the kernel does it, with a mistake in it."""
        found = torch.zeros(pairs, size)
        for pair, (a, b) in enumerate(spans):
            m, total, acc = torch.tensor(start), torch.tensor(0.0), torch.zeros(size)
            for slot in range(a, b):
                score = keys[pair, slot] @ q[pair] * (math.log2(math.e) * size**-0.5)
                m_new = torch.maximum(m, score)
                alpha, weight = (m - m_new).exp2(), (score - m_new).exp2()
                total = total * (alpha if rescale_l else 1) + weight
                acc = acc * (alpha if rescale_acc else 1) + weight * values[pair, slot]
                m = m_new
            found[pair] = acc / total.clamp(min=1e-30)
        return found

    own = torch.cat([attend(lane=slice(d, None, 32))[:, d::32, None] for d in range(32)], dim=2).flatten(1)
    mistakes = {
        "The scores are not scaled: divide by the square root of the head size.": attend(scale=1.0),
        "A power of 2 needs scores times log2(e).": attend(power=2),
        "The sum is not divided by l.": attend(divide=False),
        "The last slot, last - 1, is left out.": attend(spans=[(a, max(a, b - 1)) for a, b in spans]),
        "The first slot is left out.": attend(spans=[(min(a + 1, b), b) for a, b in spans]),
        "A lane's part of the product is not the score: sum it over all lanes of the warp.": own,
        "m begins at 0, and all scores may be far below it: begin with a number that is lower than any score.": (
            online(start=0.0)
        ),
        "acc is not rescaled where a new maximum is met: what it holds has the old one.": online(rescale_acc=False),
        "l is not rescaled where a new maximum is met: what it holds has the old one.": online(rescale_l=False),
        "Neither l nor acc is rescaled where a new maximum is met: what they hold has the old one.": (
            online(rescale_l=False, rescale_acc=False)
        ),
    }
    if torch.as_tensor(out).isnan().any():
        if scores is not None:
            raise AssertionError(
                "The result has nan where scores are large: a power of a score is infinite unless the maximum so far "
                "is taken off first."
            )
        raise AssertionError(
            "The result has nan: a slot outside first..last - 1 was read (they hold nan here), an element of `out` was "
            "not written, or 0 / 0 in a row without slots."
        )
    compare(out, attend(), mistakes, atol=2e-3)


@q5.case("two pairs, all slots")
def _(f):
    check_kernel(f, [(0, 12), (0, 12)], 12)


@q5.case("left padding and unused slots, poisoned with nan")
def _(f):
    check_kernel(f, [(3, 10), (0, 7), (9, 14)], 16)


@q5.case("one token, a row without any, and the last slot of the cache")
def _(f):
    check_kernel(f, [(0, 1), (4, 4), (7, 8)], 8)


@q5.case("scores that rise, and scores that fall")
def _(f):
    rising = (6 * torch.rand(14)).cumsum(0) / 8
    check_kernel(f, [(0, 14)], 14, scores=rising)
    check_kernel(f, [(0, 14)], 14, scores=-rising)


@q5.case("scores far above zero, and all of them far below it")
def _(f):
    check_kernel(f, [(0, 10), (2, 9)], 10, scores=300 + 4 * torch.rand(10))
    check_kernel(f, [(0, 10), (2, 9)], 10, scores=-300 - 4 * torch.rand(10))


@q5.case("heads of 128")
def _(f):
    check_kernel(f, [(2, 9)], 10, size=128)
