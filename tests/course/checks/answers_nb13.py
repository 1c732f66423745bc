"""Answers to the exercises of lesson 13."""

import torch
from answers import ruled, solution, solved

from rlcourse.course.checks.nb13 import MERGES, PLACES, ROWS, WAITS, by_places, judged, merged, waiting


# q1: what is wrong with a row
def diagnose_with(ids, labels, prompts, lengths, eos, mistake):
    rows = zip(*(each.tolist() for each in (ids, labels, prompts, lengths)), strict=True)
    return torch.tensor([judged(*row, mistake=mistake) for row in rows])


# q2: examples in one row
def keep_apart_with(lengths, answers, width, mistake):
    return by_places(lengths.tolist(), answers.tolist(), width, mistake)


# q3: ranks from one budget
def one_by_one(worth):
    def found(updates, budget):
        values, way = torch.linalg.svdvals(updates), [0] * len(updates)
        for _ in range(budget):
            left = [i for i in range(len(way)) if way[i] < values.shape[1]]
            way[max(left, key=lambda i: worth(values[i], way[i]).item())] += 1
        return torch.tensor(way)

    return found


# q5: the wait
def rounded_away(rates, group, prompts):
    """The formula as it stands, in float64."""
    return 1 / (1 - (1 - (1 - (1 - rates) ** group - rates**group).mean()) ** prompts)


WRONG = {
    "q1": ruled(diagnose_with, ROWS, "mistake"),
    "q2": ruled(keep_apart_with, PLACES, "mistake")
    | {"not itself": solved("nb13", "q2", lambda found: (found[0], found[1].tril(-1), found[2]))},
    "q3": {
        "shares": (one_by_one(lambda v, r: v[r] ** 2 / (v**2).sum()), "compared shares"),
        "whole": one_by_one(lambda v, r: (v**2).sum() / (r + 1)),
        "left": (one_by_one(lambda v, r: (v[r:] ** 2).sum()), "ONE more rank"),
        "small": one_by_one(lambda v, r: -v[r]),
        "one more": lambda updates, budget: solution("nb13", "q3")(updates, budget + 1),
    },
    "q4": ruled(merged, MERGES, "mistake")
    | {"dtype": (solved("nb13", "q4", lambda weight: weight.float()), "dtype torch.float32")},
    "q5": ruled(waiting, WAITS, "mistake")
    | {
        "rounded away": (rounded_away, "tiny rates are lost"),
        "one less": solved("nb13", "q5", lambda steps: steps - 1),
    },
}
