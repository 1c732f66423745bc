"""q3: which engine lied."""

import math

import torch
from torch import Tensor

from rlcourse.course.checks import Question, draw

q3 = Question("q3", "which_engine", hint="Print the gaps of each engine: their sign, their size, what they go with.")

ENGINES = ("ROUNDED", "TRUNCATED", "TEMPERATURE", "STALE", "SHIFTED")
ROUNDED, TRUNCATED, TEMPERATURE, STALE, SHIFTED = range(5)
VOCABULARY = 60


def sample_with(what: int, rows: int, length: int, strength: float, hot: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs as the engine has them and as training has them, nan after the end, and the mask of real tokens.

    strength: from 0 to 1, how strongly the engine differs. hot: whether a temperature is above 1.
    """
    logits = 2.5 * torch.randn(rows, length + 1, VOCABULARY)
    of_engine = logits
    if what == TRUNCATED:
        kept = logits.topk(round(16 - 10 * strength)).values[..., -1:]
        of_engine = logits.masked_fill(logits < kept, -math.inf)
    elif what == TEMPERATURE:
        of_engine = logits / (1.35 + 0.25 * strength if hot else 0.75 - 0.15 * strength)
    elif what == STALE:
        of_engine = logits + (0.25 + 0.25 * strength) * torch.randn_like(logits)
    tokens = torch.distributions.Categorical(logits=of_engine).sample()[..., None]
    sampled, recomputed = (x.log_softmax(-1).gather(-1, tokens)[..., 0] for x in (of_engine, logits))
    recomputed = recomputed + 0.005 * torch.randn_like(recomputed).clamp(-3, 3)  # bfloat16
    recomputed = recomputed[:, 1:] if what == SHIFTED else recomputed[:, :-1]
    sampled = sampled[:, :-1]
    lengths = torch.randint(length // 2, length + 1, (rows,))
    mask = torch.arange(length) < lengths[:, None]
    return sampled.masked_fill(~mask, math.nan), recomputed.masked_fill(~mask, math.nan), mask


def one_of_five(found) -> int:
    """What a function returned, as a number from 0 to 4. Raises AssertionError for anything else."""
    if found is None:
        raise AssertionError("the result is None: does every path return one of the five numbers?")
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(found, int | float) or found not in range(5):
        raise AssertionError(f"the result is {found!r:.40}: return one of the five numbers")
    return int(found)


def seen(sampled: Tensor, recomputed: Tensor, mask: Tensor) -> str:
    """What the gaps look like, in a sentence."""
    a, b = sampled[mask], recomputed[mask]
    gap = b - a
    with_sampled = torch.corrcoef(torch.stack([a, gap]))[0, 1]
    both = torch.corrcoef(torch.stack([a, b]))[0, 1]
    return (
        f"gaps from {gap.min():.2f} to {gap.max():.2f}, {gap.abs().mean():.3f} in size on average, correlation "
        f"{with_sampled:.2f} with the engine's log-prob; between the two log-probs {both:.2f}"
    )


def check_engine(f, what: int, hot: bool) -> None:
    inputs = sample_with(what, 12, 24, torch.rand(()).item(), hot)
    found = one_of_five(f(*inputs))
    if found != what:
        raise AssertionError(f"this engine is {ENGINES[what]}, not {ENGINES[found]}: {seen(*inputs)}")


def engine_case(what: int, name: str) -> None:
    @q3.case(name)
    def _(f):
        for tried, hot in ((what, True), ((what + draw(1, 4)) % 5, True), (what, False), (what, draw(0, 1) == 1)):
            check_engine(f, tried, hot)


engine_case(ROUNDED, "an engine that only rounds")
engine_case(TRUNCATED, "an engine that cuts the tail off")
engine_case(TEMPERATURE, "an engine with a temperature of its own, below 1 or above")
engine_case(STALE, "an engine with the weights of some steps ago")
engine_case(SHIFTED, "log-probs of the neighbouring token")
