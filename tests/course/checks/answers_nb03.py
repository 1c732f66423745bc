"""Answers to the exercises of lesson 03."""

import functools

import torch


# q2: a data set
def mixture(mean, share, n, least=None, problems=1000):
    least = mean**n + (1 - mean) ** n if least is None else least
    extreme = round(problems * (share - least) / (1 - least))
    solved = round(extreme * mean)
    return torch.tensor([1.0] * solved + [0.0] * (extreme - solved) + [mean] * (problems - extreme))


# q3: a penalty
def k2(new, ref):
    return (new - ref) ** 2 / 2


def k3(new, ref):
    return (ref - new).exp() - 1 - (ref - new)


def value_and_gradient(new, ref, value=k3, gradient=k2):
    return value(new, ref).detach() + gradient(new, ref) - gradient(new, ref).detach()


RIGHT = {"q2": mixture, "q3": value_and_gradient}
WRONG = {
    "q2": {
        "all alike": (lambda mean, share, n: torch.full((100,), mean), "silent groups"),
        "the ends alone": lambda mean, share, n: mixture(mean, 1.0, n),
        "a share of ends": lambda mean, share, n: mixture(mean, share, n, least=0.0),
        "mirrored": (lambda mean, share, n: 1 - mixture(mean, share, n), "your problems have mean"),
        "too many": (lambda mean, share, n: mixture(mean, share, n, problems=100_000), "return 1 to 1000"),
        "not probabilities": (lambda mean, share, n: torch.tensor([mean - 2.0, mean + 2.0]), "between 0 and 1"),
    },
    "q3": {
        "reversed": (lambda new, ref: k3(ref, new), "the other way round"),
        "k1": (lambda new, ref: new - ref, "The value is negative, as k1"),
        "k2": (k2, "That is k2"),
        "k3": (k3, "gradient of k3"),
        "sum of two": (lambda new, ref: k3(new, ref) + k2(new, ref) - k2(new, ref).detach(), "added up"),
        "no half": functools.partial(value_and_gradient, gradient=lambda new, ref: (new - ref) ** 2),
        "wrong sign": (lambda new, ref: k3(new, ref).detach() - k2(new, ref) + k2(new, ref).detach(), "wrong sign"),
        "clamped": (lambda new, ref: (new - ref).clamp(min=0), "The value is 0 where"),
        "mean": (lambda new, ref: value_and_gradient(new, ref).mean(), "one for each token"),
        "the whole vocabulary": (
            functools.partial(value_and_gradient, value=lambda new, ref: (new.exp() * (new - ref)).sum()),
            "the others in the batch",
        ),
    },
    "q4": {
        "exact": lambda logits, rewards, n: (logits.softmax(0) * (rewards - logits.softmax(0) @ rewards)).expand(2, -1),
    },
}
