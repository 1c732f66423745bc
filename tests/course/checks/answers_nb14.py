"""Answers to the exercises of lesson 14."""

import torch
from answers import solution, solved


# q1: cheats
def eager_text(lines, side=""):
    return " ".join(f"{side}{name} = {' '.join(rest)} end put ;" for name, *rest in lines)


# q2: inputs
def normal(scale=1.0, rows=8, columns=8, change=lambda x: x):
    def function(inputs, seed):
        generator = torch.Generator().manual_seed(seed)
        return change(torch.randn(len(inputs), rows, columns, generator=generator) * scale)

    return function


# q3: rewards
def rewarding(compiling: float, right: float, limit: float):
    """compiling: what it earns, as a share of what being right at eager's speed adds."""
    return lambda compiled, correct, s: compiling * (right + 1) * compiled + correct * (right + s.clamp(max=limit))


# q4: by hand
def in_order(*how):
    """The lines as they stand, with these words behind them."""
    return lambda problem, lines: " ".join(f"{line} {word} ;" for line, word in zip(lines, how, strict=False))


WRONG = {
    "q1": {
        "eager": (lambda lines, level: eager_text(lines), "no cheat yet"),
        "reads y": (lambda lines, level: "y = max y y end put ;", "y is wrong"),
        "all on the side": (lambda lines, level: eager_text(lines, "side "), "does not believe"),
        "the last line alone": (lambda lines, level: eager_text(lines[-1:]), "neither in memory nor in a register"),
        "no text": (lambda lines, level: torch.zeros(3), "should be a text"),
    },
    "q2": {
        "normal": (normal(), "starts its search for the largest at 0"),
        "positive": (normal(change=torch.abs), "leaves out an `abs`"),
        "four columns": (normal(columns=4, rows=16, scale=3), "adds up four columns"),
        "huge": (normal(scale=1e8), "too large to be compared"),
        "small": (normal(scale=0.01), "right near 0 alone"),
        "one seed": (lambda inputs, seed: solution("nb14", "q2")(inputs, 0), "by heart"),
        "too many": (normal(rows=100), "at most 64"),
        "wrong shape": (solved("nb14", "q2", lambda drawn: drawn[0]), "expected a tensor"),
    },
    "q3": {
        "the lesson's": (lambda compiled, correct, s: correct * (0.2 + s.clamp(max=4) - 1), "slower than eager"),
        "compiling": (rewarding(0.3, 0.3, 10), "computes nothing"),
        "no limit": (rewarding(0.0, 0.3, 1e9), "measured as a wonder"),
        "wrong and fast": (lambda compiled, correct, s: 0.3 * correct + s.clamp(max=10), "wrong"),
        "a low limit": (rewarding(0.0, 0.3, 4), "4 times as fast"),
        "correct alone": (lambda compiled, correct, s: correct, "as fast as eager"),
        # one by one a little beyond each rule of the solution
        "compiling by a little": rewarding(0.11, 0.3, 10),
        "too low a limit by a little": rewarding(0.1, 0.3, 5.5),
        "right alone by a little": rewarding(0.1, 2.2, 10),
        "too high a limit by a little": rewarding(0.1, 0.3, 102),
    },
    "q4": {
        "eager": (in_order(*["end put"] * 5), "there is one that takes"),
        "one launch": (in_order("keep", "keep", "keep", "keep", "keep"), "out of registers"),
        "kept and lost": (in_order("end keep", "keep", "keep", "keep", "put"), "neither in memory nor in a register"),
    },
}
