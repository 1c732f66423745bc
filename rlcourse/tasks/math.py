r"""Mathematics with answers in `\boxed{}`, from the hub or a local folder. DeepMath-103K to train on (He et al. 2025,
arXiv:2504.11456), MATH-500 to test (Hendrycks et al. 2021, arXiv:2103.03874, in the choice of Lightman et al. 2023,
arXiv:2305.20050). Answers are compared by value with math-verify. SymPy can take forever or all memory to simplify a
policy's LaTeX, so that is done in a process with limits."""

import functools
import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rlcourse.hub import load_rows
from rlcourse.settings import MANY
from rlcourse.tasks.jsonl import check_columns, hold_out, read_train_and_test, texts_of
from rlcourse.tasks.pool import Failed, JudgePool
from rlcourse.tasks.task import Attempt, MathTask, Problem
from rlcourse.tasks.verify import Readings, to_number

SECONDS, MEMORY_GB, PROCESSES = 5.0, 4.0, 8  # for one answer; processes at most
TAIL = 500  # characters in which an answer without a box is looked for
INSTRUCTION = r"Solve the problem step by step. Put your final answer within \boxed{}."
SOLUTIONS = {"solution", *(f"r1_solution_{n}" for n in (1, 2, 3))}  # worked answers, which nothing reads
EXAMPLE = '{"question": "...", "final_answer": "..."}'
HUB = (
    ("zwhe99/DeepMath-103K", "train", ["question", "final_answer", "difficulty"]),
    ("HuggingFaceH4/MATH-500", "test", ["problem", "answer", "level"]),
)

# No answer, unless the gold one has it: SymPy would compute the integral that the problem asks for, and find it equal.
TO_COMPUTE = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|limsup|liminf|sup|inf|max|min|gcd|lcm|det)(?![a-zA-Z])"
    r"|\\[dt]?frac\{?(?:d|\\partial)\}?\s*\{?(?:d|\\partial)"
    r"|\\operatorname|\\begin\{vmatrix\}"
)
TOKEN = re.compile(r"\\boxed\s*+\{|\\.|[{}]", re.DOTALL)
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textit)\s*+\{([^{}]*+)\}")
DIGITS = 300  # to which numbers that are no decimals are compared; 15, as is usual, finds 1/2^98 and 1/2^99 equal
SPACES = re.compile(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\s|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\$")

# Between two numbers, 1 2; but not in 1 234, \frac1 2 and \log_2 8.
GAP = r"(?<=[0-9])(?<![_c][0-9])(?<!c [0-9])(?:\s|\\[,;:! ]|~)+(?=[0-9])(?![0-9]{3}(?![0-9]))"

# math-verify drops these, or reads them as something else: bases, primes, moduli, dots; 1/2x as 1/(2x), 1e5 as 5e.
UNREAD = re.compile(
    r"[0-9]\s*[eE][-+]?[0-9]|[0-9]\s*_|[0-9A-F]{2,}\s*_|\)\s*_"  # bases
    r"|['\"′″]|\\prime|!!|\\[bp]?mod(?![a-z])|\\equiv|\\angle|\\[lcdv]?dots|…|\.\.|\^\{?T"
    r"|/(?:[0-9]+|[a-zA-Z])(?=[a-zA-Z(]|\\[a-z])|(?<![0-9:])[0-9]{1,2}:[0-9]{2}(?![0-9:])"  # 1/2x, 12:30
    rf"|{GAP}|\b(?:hundred|thousand|million|billion|trillion|dozen)s?\b"
)
LOG = re.compile(r"\\log(?!\s*_|[a-zA-Z])")  # of which base?
DEGREES = re.compile(r"\^?\{?\\circ\}?|°|\\degree")
UNIT = re.compile(
    r"(?<=[^\s{(])(?:\s|\\[,;:! ]|~)*(?:\\(?:text|textbf|textrm|mathrm|mbox)\s*\{~?([^{}]*)\}"
    r"|(?<=[0-9}])\s+((?:[cmk]m|kg|mph|[a-z]{4,})[a-z/ ]*))((?:\^\{?[0-9]\}?)?)\.?$"
)
DECIMAL = re.compile(r"(?<![0-9,.])([0-9]+)\.([0-9]+)(?![0-9.])")


@dataclass(frozen=True)
class BoxedTask(MathTask):
    r"""The strict reading is the last `\boxed{}`; without one, the lenient one looks in the last `TAIL` characters.
    Answers are compared by `compare`, for at most `SECONDS`."""

    def verify(self, text: str, gold: str) -> Readings:
        [readings] = self.judge([Attempt(Problem("", "", gold), text, 0, finished=True)], training=True)
        return readings

    def judge(self, attempts: list[Attempt], training: bool) -> list[Readings]:
        """An unfinished attempt is never right, nor one that cannot be compared in time."""
        boxes = [last_box(a.text) if a.finished else None for a in attempts]
        items = {
            i: (a.problem.gold, box or a.text[-TAIL:], box is not None)
            for i, (a, box) in enumerate(zip(attempts, boxes, strict=True))
            if a.finished and not (box and is_copied(box, a.problem))
        }
        found = compare_all(items.values())  # answers of a group are often the same
        verdicts = []
        for i, box in enumerate(boxes):
            right, answer = found[items[i]] if i in items else (False, box)
            boxed = box is not None
            verdicts.append(Readings(right and boxed, right, boxed, answer, self.rewarded, self.reward_format))
        return verdicts


def is_copied(box: str, problem: Problem) -> bool:
    """Whether the answer is an expression copied from the question, which asks for its value. A number may be."""
    written = as_written(box)
    if written == as_written(problem.gold) or to_number(written) is not None:
        return False
    return any(sign in written for sign in "+-*/^\\") and written in as_written(problem.question)


def compare_all(items: Iterable[tuple[str, str, bool]]) -> dict[tuple[str, str, bool], tuple[bool, str | None]]:
    """(right, answer) by (gold, written, boxed). A process compares those not written like the gold answer."""
    found = {item: (True, item[1]) for item in items}
    hard = [item for item in found if not (item[2] and as_written(item[0]) == as_written(item[1]))]
    for item, result in zip(hard, pool().map(hard) if hard else (), strict=True):
        found[item] = (False, item[1] if item[2] else None) if isinstance(result, Failed) else result
    return found


@functools.cache
def pool() -> JudgePool:
    return JudgePool("rlcourse.tasks.math:compare", min(PROCESSES, os.cpu_count() or 1), SECONDS, MEMORY_GB)


def load(data_dir: str | None = None) -> BoxedTask:
    """The task: about 102,500 problems to train on, 512 for validation (the last of the train file), 500 to test.

    Reads train.jsonl and test.jsonl from `data_dir`, with DeepMath's fields (question, final_answer, difficulty) or
    MATH's (problem, answer, level), else loads both through `datasets`, 2 GB. Raises ValueError if math-verify is
    missing, a line can't be used, or too few problems are left for training; FileNotFoundError or ConnectionError.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("Task math compares answers with math-verify: `python -m pip install 'rlcourse[math]'`.")
    if data_dir:
        remedy = "in --task math@FOLDER, or leave it out to load DeepMath-103K and MATH-500 from the Hugging Face hub"
        train, test = read_train_and_test(data_dir, remedy, problem_of, EXAMPLE)
    else:
        remedy = "put train.jsonl and test.jsonl in a folder and name it: --task math@FOLDER"
        train, test = (
            [problem_of(row) for row in load_rows(name, remedy, split=split).select_columns(columns)]
            for name, split, columns in HUB
        )
    return BoxedTask("math", INSTRUCTION, *hold_out(train), test)


def problem_of(record: dict[str, Any]) -> Problem:
    """The problem in a record of DeepMath or MATH. Raises ValueError for others."""
    both = ("question", "problem"), ("final_answer", "answer")
    keys = [next((name for name in names if name in record), names[0]) for names in both]
    question, answer = texts_of(record, keys)
    check_columns(record, SOLUTIONS.union(keys))
    if "####" in answer:
        raise ValueError(f"{keys[1]!r} is worked, as GSM8K's are: use --task gsm8k@FOLDER, or leave the working out.")
    level = record.get("level", record.get("difficulty"))
    graded = type(level) in (int, float) and 0 <= level <= MANY  # DeepMath has -1 for a difficulty that is not known
    return Problem(question.strip(), "", answer.strip(), int(level) if graded else None)


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that is closed and not empty, the inner one if nested, in one pass; else
    None. `\{` and `\}` are text."""
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
    r"""The answer without what doesn't change its meaning: dollar signs, `\left`, `\text{}` around words, kinds of
    `\frac`, a full stop at the end, and spaces except between two numbers."""
    answer = SPACES.sub("", re.sub(GAP, "|", WRAPPED.sub(r"\1", answer.replace(r"\$", ""))))
    answer = re.sub(r"([_^])\{(\w|\\circ)\}", r"\1\2", re.sub(r"\\[dt]frac", r"\\frac", answer))
    return re.sub(r"(?<!\.)\.$", "", answer)


def apart_from_unit(answer: str) -> tuple[str, str]:
    """The answer without words for a unit at its end, and these."""
    found = UNIT.search(answer)
    return (answer, "") if found is None else (answer[: found.start()], "".join(map(str, found.groups(""))).strip())


def must_be_alike(answer: str) -> bool:
    """Whether math-verify would read something else than is written: a base, degrees in an expression, a word."""
    number = re.fullmatch(r"(?:\\[dt]?frac|[-+−0-9.,/{}() ])*", rest := DEGREES.sub("", answer))
    return bool(UNREAD.search(answer)) or (rest != answer and not number)


def of_another_kind(gold: str, answer: str) -> bool:
    """Whether these are two words, which math-verify would read as products of letters, or a set and a tuple."""
    if gold.isalpha() and answer.isalpha():
        return gold.lower() != answer.lower() or len(gold) == 1
    return {gold[:2] == r"\{", answer[:2] == r"\{"} == {True, False} and {gold[:1], answer[:1]} & {*"(["} != set()


def places(*answers: str) -> int:
    """The decimals to compare: of the decimal that has fewest, but 6 at least, and more where they begin with zeros."""
    decimals = [max(map(len, found)) for answer in answers if (found := re.findall(r"\.([0-9]+)", answer))]
    zeros = [len(found) for answer in answers for found in re.findall(r"(?<![0-9])0?\.(0+)[1-9]", answer)]
    return max([6, min(decimals, default=0), *(5 + n for n in zeros)])


def compare(item: tuple[str, str, bool]) -> tuple[bool, str | None]:
    """(gold, written, boxed) → (right, the answer as read or None). Whether the answer equals the gold one as
    mathematics.

    boxed: `written` is the answer; else a text that ends in it: in dollars, after "the answer is", or the last number.
    Integers, fractions, expressions, sets, intervals, inequalities, tuples and matrices are compared exactly, decimals
    to 6 places at least (`places`), without percent signs and a unit that only one has; anything else must be written
    alike.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold, written, boxed = item
    usual = LatexExtractionConfig().normalization_config
    latex = LatexExtractionConfig(normalization_config=replace(usual, units=False))  # its units: the t of 3t
    answer = written
    if not boxed:
        found = parse(written, [latex, ExprExtractionConfig()], parsing_timeout=None)
        answer = str(found[-1]) if found else None
    if answer is None or (TO_COMPUTE.search(answer) and not TO_COMPUTE.search(gold)):
        return False, answer
    if as_written(answer) == as_written(gold):
        return True, answer
    (expected, unit), (given, other) = map(apart_from_unit, (gold, answer))
    if must_be_alike(gold) or must_be_alike(answer) or (unit and other and unit != other):
        return False, answer
    if of_another_kind(as_written(expected), as_written(given)) or bool(LOG.search(gold)) != bool(LOG.search(answer)):
        return False, answer
    pair = [DEGREES.sub("", text) for text in (expected, given)]
    exact = [DECIMAL.sub(lambda d: rf"(\frac{{{d[1]}{d[2]}}}{{{10 ** len(d[2])}}})", text) for text in pair]
    for texts in [pair] if exact == pair else [pair, exact]:
        parsed = (parse(in_dollars(text), [latex], parsing_timeout=None) for text in texts)
        precision = {"float_rounding": places(gold, answer), "numeric_precision": DIGITS}
        if verify(*parsed, timeout_seconds=None, allow_set_relation_comp=True, **precision):
            return True, answer
    return False, answer


def in_dollars(answer: str) -> str:
    """The answer as inline mathematics, without dollar signs of its own and the full stop at its end."""
    inner = answer.replace(r"\$", "").replace("$", "").replace("\n", " ").strip()
    return f"${inner.rstrip('.')}$"
