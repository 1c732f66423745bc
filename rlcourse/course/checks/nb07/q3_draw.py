"""q3: a draw by tiles with four mistakes to mend."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare

q3 = Question("q3", "mended_draw", hint="Follow one u by hand on four tokens in two tiles, line by line.")

# The planted mistakes, in the order in which a card names those that are left.
PLANTED = {
    "scale": "each tile is measured by its own largest logit: bring all of a row to one scale",
    "left": "within the tile, look for what is left of the goal: take off the mass of the tiles before it",
    "reach": "the running sum must exceed the goal, not reach it: a token of probability 0 was drawn",
    "tile": "the log-prob is that within the tile: divide by the mass of the whole row",
}


def wrong_draw(logits: Tensor, tile: int, uniform: Tensor, wrong: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs with some of the planted mistakes, row by row in float64."""
    tokens, logprobs = [], []
    for row, u in zip(logits.double(), uniform.tolist(), strict=True):
        tiles = [piece for piece in row.split(tile)]
        tops = [piece.max() if "scale" in wrong else row.max() for piece in tiles]
        masses = [(piece - top).exp() for piece, top in zip(tiles, tops, strict=True)]
        sums = [mass.sum().item() for mass in masses]
        goal = u * sum(sums)

        def first(values: list[float], goal: float) -> int:
            """The first place whose running sum gets there; 0 if none does."""
            running = 0.0
            for place, value in enumerate(values):
                running += value
                if running > goal or ("reach" in wrong and running == goal):
                    return place
            return 0

        which = first(sums, goal)
        place = first(masses[which].tolist(), goal if "left" in wrong else goal - sum(sums[:which]))
        tokens.append(which * tile + place)
        whole = sums[which] if "tile" in wrong else sum(sums)
        logprobs.append((masses[which][place] / whole).log().item())
    return torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64)


def middles(logits: Tensor, tokens: Tensor) -> Tensor:
    """The uniform number in the middle of each token's piece of [0, 1]: [rows]."""
    pi = logits.double().softmax(-1)
    at = tokens[:, None]
    return (pi.cumsum(-1).gather(1, at) - pi.gather(1, at) / 2)[:, 0].float()


def check_draw(f, logits: Tensor, tile: int, tokens: Tensor, uniform: Tensor | None = None) -> None:
    """Token `tokens[i]` is the one that `uniform[i]`, its middle if not given, falls on."""
    uniform = middles(logits, tokens) if uniform is None else uniform
    result = f(logits, tile, uniform)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise AssertionError("return two tensors: the tokens, and their log-probs.")
    if not isinstance(result[0], Tensor):
        raise AssertionError("the first of the two results should be a tensor of token ids.")
    of_tokens = {}
    for count in range(1, 4):
        for wrong in itertools.combinations(("scale", "left", "reach"), count):
            left = "One mistake is left" if count == 1 else f"{count} mistakes are left, one of them"
            of_tokens[f"{left}: {PLANTED[wrong[0]]} ({', '.join(wrong)})."] = wrong_draw(logits, tile, uniform, wrong)[
                0
            ]
    of_tokens |= {
        "That is the place within the tile: add the tokens of the tiles before it.": tokens % tile,
        "That is the number of the tile, not the token.": tokens // tile,
        "That is the most probable token: where u falls decides.": logits.argmax(-1),
        "You are one token too far: it is the first at which the running sum exceeds u.": tokens + 1,
    }
    compare(result[0].long(), tokens, of_tokens, what="the token ids")
    wide = logits.double()
    chosen = wide.gather(1, tokens[:, None])[:, 0]
    expected = chosen - wide.logsumexp(-1)
    within = torch.stack(
        [row.split(tile)[t // tile].log_softmax(0)[t % tile] for row, t in zip(wide, tokens.tolist(), strict=True)]
    )
    own = torch.stack([sum((p - p.max()).exp().sum() for p in row.split(tile)).log() for row in wide])
    tops = torch.stack([row.split(tile)[t // tile].max() for row, t in zip(wide, tokens.tolist(), strict=True)])
    mistakes = {
        f"One mistake is left: {PLANTED['tile']} (tile).": within,
        f"One mistake is left, in the log-probs: {PLANTED['scale']} (scale).": chosen - tops - own,
        "That is the logit of the token: take off the log of the sum of exponentials.": chosen,
        "That is the probability: take its logarithm.": expected.exp(),
        "The total mass is measured from the largest logit: take that off as well.": expected + wide.amax(1),
    }
    compare(result[1], expected, mistakes, what="the log-probs", atol=1e-4)


def likely(logits: Tensor) -> Tensor:
    """A token of each row that is not too improbable to aim at: [rows]."""
    pi = logits.softmax(-1)
    return torch.multinomial((pi > 0.01) * pi, 1)[:, 0]


@q3.case("tiles that divide the vocabulary, of one token and of all")
def _(f):
    logits = 1.5 * torch.randn(16, 24)
    for tile in (6, 1, 24):
        check_draw(f, logits, tile, likely(logits))


@q3.case("a last tile that is not full")
def _(f):
    logits = torch.randn(12, 23)
    tokens = likely(logits)
    tokens[:3] = torch.tensor([22, 21, 20])
    check_draw(f, logits, 5, tokens)


@q3.case("large logits: exp of them is infinite")
def _(f):
    logits = torch.randn(6, 12) + 200.0
    check_draw(f, logits, 4, likely(logits))


@q3.case("tiles of very different size")
def _(f):
    logits = torch.randn(8, 12) - 4.0 * (torch.arange(12) // 4 == 1)
    check_draw(f, logits, 4, likely(logits))


@q3.case("u = 0 falls on the first token that can be drawn")
def _(f):
    logits = torch.randn(3, 8)
    logits[:, 0] = -torch.inf
    logits[1, 1] = -torch.inf
    check_draw(f, logits, 4, torch.tensor([1, 2, 1]), torch.zeros(3))
    logits = torch.randn(2, 12)
    logits[:, 0], logits[:, 1:4] = -torch.inf, logits[:, 1:4] - 10_000  # a tile whose mass rounds to 0
    check_draw(f, logits, 4, torch.tensor([4, 4]), torch.zeros(2))
