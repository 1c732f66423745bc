"""Answers to the exercises of lesson 01."""

import re

import torch

from rlcourse.course.checks.builders import policy_loss


# q1: a draw
def by_gumbel(logits):
    return (logits - (-torch.rand_like(logits).log()).log()).argmax(-1)


# q3: the strict reading
def last_announced(text, gold):
    found = re.findall(r"#### (-?[\d,]+\.?\d*)", text)
    return 1.0 if found and float(found[-1].replace(",", "")) == float(gold) else 0.0


# q7: a verifier, and the one that q6 cheats
def sloppy(text, gold):
    return float(gold in re.findall(r"[0-9]+", text))


NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"


def last_line(text):
    return text.strip().split("\n")[-1] if text.strip() else ""


def one_claim(text, gold):
    found = re.findall(NUMBER, last_line(text))
    return 1.0 if len(found) == 1 and float(found[0].replace(",", "")) == float(gold) else 0.0


RIGHT = {"q1": by_gumbel, "q3": last_announced, "q7": one_claim}
WRONG = {
    "q1": {
        "greedy": (lambda logits: logits.argmax(-1), "greedy decoding"),
        "uniform": (lambda logits: torch.randint(0, logits.shape[1], logits.shape[:1]), "equally likely"),
        "twice": (lambda logits: by_gumbel(logits.softmax(-1)), "softmax twice"),
        "one for all": (lambda logits: by_gumbel(logits[:1]).expand(len(logits)), "one for each row"),
        "a column": (lambda logits: by_gumbel(logits)[:, None], "a token number per row"),
    },
    "q3": {
        "sloppy": sloppy,
        "the first": lambda text, gold: last_announced(text[: text.find("####") + 8], gold),
        "as text": (lambda text, gold: float(f"#### {gold}" in text), "must not be paid where"),
        "no decimals": (lambda text, gold: float(re.findall(r"#### (\S+)|$", text)[-1] == gold), "must be paid where"),
    },
    "q5": {"detached": (lambda new, *rest: policy_loss(new.detach(), *rest), "no gradient flows")},
    "q6": {
        "the numbers": (lambda question: ",".join(re.findall(r"\d+", question)), "it earns on"),
        "no limit": (lambda question: ",".join(map(str, range(2, 101))), "never generated"),
        "a number": (lambda question: 14, "return the text"),
    },
    "q7": {
        "sloppy": sloppy,
        "any line": lambda text, gold: float(any(one_claim(line, gold) for line in text.split("\n"))),
        "no minus": lambda text, gold: one_claim(text.replace("-", ""), gold),
        "text": (lambda text, gold: text, "return 1.0 or 0.0"),
    },
}
