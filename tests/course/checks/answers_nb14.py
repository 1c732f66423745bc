"""Answers to the exercises of lesson 14."""

import torch


# q1: cheats
def eager_text(lines, side=""):
    return " ".join(f"{side}{name} = {' '.join(rest)} end put ;" for name, *rest in lines)


def fused_text(lines):
    return " ".join(f"{name} = {' '.join(rest)} {'end put' if name == 'y' else 'keep'} ;" for name, *rest in lines)


def skipping(lines, ops=("rowsum", "rowmax", "relu", "abs")):
    """One launch without the lines that give back what they get, if that is an input or a column."""
    text = fused_text([line for line in lines])
    for name, op, *args in lines[:-1]:
        if op in ops and (op.startswith("row") or args[0] in "uvwx"):
            text = text.replace(f"{name} = {op} {args[0]} keep ; ", "", 1)
            words = text.split()
            text = " ".join(args[0] if word == name else word for word in words)
            lines = [[n, o, *(args[0] if a == name else a for a in rest)] for n, o, *rest in lines if n != name]
            return skipping(lines, ops)
    return text


def cheat(lines, level):
    if level == 3:
        return skipping(lines)
    return ("" if level == 1 else eager_text(lines[:-1], "side ") + " ") + eager_text(lines[-1:])


# q2: inputs
def trial(inputs, seed):
    found = []
    for number in range(len(inputs)):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        x = torch.randn(8, 8, generator=generator)
        x[3:5] = x[3:5] * 6
        x[5] = x[5] * 0.2
        x[6] = x[6].abs() + 0.5
        x[7] = -x[7].abs() - 0.5
        found.append(x)
    return torch.stack(found)


def normal(scale=1.0, rows=8, columns=8, change=lambda x: x):
    def function(inputs, seed):
        generator = torch.Generator().manual_seed(seed)
        return change(torch.randn(len(inputs), rows, columns, generator=generator) * scale)

    return function


# q3: rewards
def reward(compiled, correct, speedup):
    return correct * (1 + speedup.clamp(max=20))


def rewarding(compiling: float, right: float, limit: float):
    """compiling: what it earns, as a share of what being right at eager's speed adds."""
    return lambda compiled, correct, s: compiling * (right + 1) * compiled + correct * (right + s.clamp(max=limit))


# q4: by hand
def by_hand(problem, lines):
    order = {1: (1, 0, 2), 2: (1, 2, 0, 3), 3: (1, 2, 0, 3, 4), 4: (1, 2, 0, 3)}[problem]
    cut = {1: 0, 4: 1}.get(problem)
    words = []
    for place, line in enumerate(order):
        last = place == len(order) - 1
        words.append(f"{lines[line]} {'end put' if last or place == cut else 'keep'} ;")
    return " ".join(words)


def in_order(*how):
    """The lines as they stand, with these words behind them."""
    return lambda problem, lines: " ".join(f"{line} {word} ;" for line, word in zip(lines, how, strict=False))


RIGHT = {"q1": cheat, "q2": trial, "q3": reward, "q4": by_hand}

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
        "one seed": (lambda inputs, seed: trial(inputs, 0), "by heart"),
        "too many": (normal(rows=100), "at most 64"),
        "wrong shape": (lambda inputs, seed: trial(inputs, seed)[0], "expected a tensor"),
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
