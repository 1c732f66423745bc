r"""Find answers in `\boxed{...}`, and compare mathematics by value with math-verify.

`compare` lets SymPy simplify LaTeX written by a policy, which can take forever or all memory: call it in a process with
limits, like `rlcourse.tasks.math`.
"""

import re

# These are no answer: SymPy would compute the integral that the problem asks for, and find it equal.
TO_COMPUTE = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|limsup|liminf|sup|inf|max|min|gcd|lcm|det)(?![a-zA-Z])"
    r"|\\[dt]?frac\{?(?:d|\\partial)\}?\s*\{?(?:d|\\partial)"
    r"|\\operatorname|\\begin\{vmatrix\}"
)
TOKEN = re.compile(r"\\boxed\s*+\{|\\.|[{}]", re.DOTALL)
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textit)\s*+\{([^{}]*+)\}")
SPACES = re.compile(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\s|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\$")


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that is closed and not empty, the inner one if nested; None without one.
    Takes one pass over the text. Escaped braces, `\{` and `\}`, are text."""
    opened, best = [], (-1, None)
    for token in TOKEN.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            opened.append((token.end(), token[0] != "{"))
        elif token[0] == "}" and opened:
            start, is_box = opened.pop()
            content = text[start : token.start()].strip()
            if is_box and content and start > best[0]:
                best = (start, content)
    return best[1]


def as_written(answer: str) -> str:
    r"""The answer without spaces, dollar signs, `\left` and `\right`, `\text{}` around words, kinds of `\frac` and a
    full stop at the end, which don't change its meaning."""
    answer = SPACES.sub("", WRAPPED.sub(r"\1", answer.replace(r"\$", "")))
    return re.sub(r"\\[dt]frac", r"\\frac", answer).rstrip(".")


def left_to_compute(answer: str, gold: str) -> bool:
    """Whether the answer leaves a computation undone that the gold answer doesn't."""
    return bool(TO_COMPUTE.search(answer)) and not TO_COMPUTE.search(gold)


def compare(item: tuple[str, str, bool]) -> tuple[bool, str | None]:
    """(gold, written, boxed) → (right, answer). Whether the answer equals the gold one as mathematics.

    boxed: `written` is the answer; else it is a text that ends in it: in dollars, after "the answer is", or the last
    number. answer: as it was read, or None. Compares integers, fractions, decimals to 6 places, expressions, sets,
    intervals and inequalities, tuples and matrices; units and percent signs don't count. Anything else must be written
    alike.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold, written, boxed = item
    latex = LatexExtractionConfig()
    if boxed:
        answer, found = written, parse(in_dollars(written), [latex], parsing_timeout=None)
    else:
        found = parse(written, [latex, ExprExtractionConfig()], parsing_timeout=None)
        answer = str(found[-1]) if found else None
    if answer is None or left_to_compute(answer, gold):
        return False, answer
    if as_written(answer) == as_written(gold):
        return True, answer
    expected = parse(in_dollars(gold), [latex], parsing_timeout=None)
    return bool(verify(expected, found, timeout_seconds=None, allow_set_relation_comp=True)), answer


def in_dollars(answer: str) -> str:
    """The answer as inline mathematics, without dollar signs of its own and the full stop at its end."""
    inner = answer.replace(r"\$", "").replace("$", "").replace("\n", " ").strip()
    return f"${inner.rstrip('.')}$"
