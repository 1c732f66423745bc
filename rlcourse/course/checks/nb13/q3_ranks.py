"""q3: ranks for several matrices from one budget."""

import itertools

import torch
from torch import Tensor

from rlcourse.course.checks import Question, compare, draw

q3 = Question("q3", "ranks", hint="How much less is left out if this matrix gets one rank more?", seconds=20)


def update(values: list[float], rows: int, columns: int) -> Tensor:
    """A matrix with these singular values: [rows, columns] float32."""
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64))[0]
    return (left * torch.tensor(values, dtype=torch.float64) @ right.T).float()


def squares(matrix: Tensor) -> list[float]:
    """The squares of its singular values, the largest first, as eigenvalues of the smaller Gram matrix."""
    m = matrix.double()
    gram = m @ m.T if m.shape[0] < m.shape[1] else m.T @ m
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).tolist()


def best(updates: Tensor, budget: int) -> Tensor:
    """Of all ways to give the budget away, the one that leaves out least: int64 [matrices]."""
    found = [squares(matrix) for matrix in updates]
    ways = (w for w in itertools.product(range(len(found[0]) + 1), repeat=len(found)) if sum(w) == budget)
    return torch.tensor(min(ways, key=lambda way: sum(sum(s[r:]) for s, r in zip(found, way, strict=True))))


def greedy(updates: Tensor, budget: int, worth) -> Tensor:
    """Ranks given one by one to the matrix for which `worth(its squares, its rank)` is largest."""
    found, way = [squares(matrix) for matrix in updates], [0] * len(updates)
    for _ in range(budget):
        open_ = [i for i in range(len(way)) if way[i] < len(found[i])]
        way[max(open_, key=lambda i: worth(found[i], way[i]))] += 1
    return torch.tensor(way)


def check_ranks(f, spectra: list[list[float]], budget: int) -> None:
    count = len(spectra)
    updates = torch.stack([update(values, 7, 5) for values in spectra])
    equal = torch.tensor([budget // count + (i < budget % count) for i in range(count)])
    mistakes = {
        "All ranks alike: some matrices changed more than others.": equal,
        "You compared shares of each matrix: what counts is what is left out of all of them together.": greedy(
            updates, budget, lambda s, r: s[r] / sum(s)
        ),
        "You went by the whole size of a matrix: a large one may be of rank 1.": greedy(
            updates, budget, lambda s, r: sum(s) / (r + 1)
        ),
        "You went by what a matrix leaves out in all: what counts is what ONE more rank takes of it.": greedy(
            updates, budget, lambda s, r: sum(s[r:])
        ),
        "Those are the small singular values: an adapter should keep the large ones.": greedy(
            updates, budget, lambda s, r: -s[r]
        ),
    }
    compare(f(updates, budget), best(updates, budget), mistakes, what="the ranks")


def spectrum(first: float, falls: float) -> list[float]:
    """Five singular values that fall by a factor, each moved a little so that no two matrices agree."""
    return [first * falls**i * (1 + 0.05 * torch.rand(()).item()) for i in range(5)]


@q3.case("some fall fast and some slowly")
def _(f):
    check_ranks(f, [spectrum(4, 0.25), spectrum(2, 0.8), spectrum(1.6, 0.6)], draw(4, 6))


@q3.case("a large matrix of rank 1")
def _(f):
    check_ranks(f, [spectrum(30, 0.001), spectrum(1, 0.9), spectrum(2, 0.7)], draw(4, 6))


@q3.case("one that hardly changed")
def _(f):
    check_ranks(f, [spectrum(3, 0.8), spectrum(0.01, 0.5), spectrum(2.2, 0.75)], draw(5, 8))


@q3.case("a flat one beside two large values")
def _(f):
    large = [2 + 0.1 * torch.rand(()).item(), 1.7 + 0.1 * torch.rand(()).item(), 0.05, 0.03, 0.01]
    check_ranks(f, [spectrum(1.15, 0.98), large, spectrum(0.4, 0.9)], draw(3, 4))


@q3.case("the whole budget of a matrix")
def _(f):
    check_ranks(f, [spectrum(0.1, 0.9), spectrum(9, 0.9), spectrum(1, 0.5)], draw(6, 8))
