"""The reward of word problems: read the final number of a completion and compare it with the gold answer, exactly.

A number is ASCII digits, with an optional sign (+, - or one of Unicode's), currency sign ($, €, £) and decimal part,
and commas only where they group by threes. A minus after a digit, a letter or a bracket subtracts: `10-3` ends in 3.
`3/4` without spaces is a fraction, `3/0` no number. Percent signs and words are units: 50% is 50.

What isn't such a number as a whole isn't read in part: `12,34`, `1.234,5`, `3:30`, `1/2/2020`, `1 234` and `1 1/2`,
whose digits are joined by one character; the powers `10^3`, `1e3`, `5²` and `2 x 10^3`; `2½`, `3 million` and `3k`.

Every pattern takes time linear in the length of the text: repeats are possessive (`*+`, `++`), so none backtracks.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain

MAX_DIGITS = 500  # more is not read as a number: int() takes quadratic time, and Python refuses it beyond a limit

_DASHES = "−–‑‐-"
_SIGN = rf"(?<![\w)\]}}+{_DASHES}])[+{_DASHES}]"
_CURRENCY = r"\\?[$€£][ ]?"
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})++|[0-9]++)"
_UNSIGNED = rf"(?:{_INTEGER}/{_INTEGER}|{_INTEGER}(?:\.[0-9]++)?+|(?<![0-9])\.[0-9]++)"
_NOT_JOINED = r"(?<![0-9][.,:/ ])(?<![0-9^])(?<!\*\*)(?<!\^[{(-])(?<!\^\{-)(?<![0-9][eE])(?<![0-9][eE][+-])"
_NOT_GOING_ON = (
    r"(?![.,:/ ]?[0-9]|[½¼¾⅓⅔²³⁰¹⁴-⁹^]|\*\*|[eE][+-]?[0-9]| ?(?:[x×*]|\\times|\\cdot) ?10 ?\^|[kKMB]\b"
    r"|(?:[ ~-]|\\[ ,]|\\text\{){0,4}+(?i:hundred|thousand|million|billion|trillion))"
)
_NUMBER = rf"(?:{_SIGN}(?:{_CURRENCY})?|{_CURRENCY}[+{_DASHES}]?)?{_NOT_JOINED}{_UNSIGNED}{_NOT_GOING_ON}"
_UNIT = r"[A-Za-z%°€£$][A-Za-z°²³/' \t-]*+"  # no digits and no operators: `#### 5 + 7 = 12` is not read as 5

NUMBER = re.compile(_NUMBER)
WHOLE_NUMBER = re.compile(rf"{_NUMBER}%?\.?")
STRICT = re.compile(rf"(?<!#)####[ \t]++({_NUMBER})[ \t]*+(?:{_UNIT})?\.?[^\S\n]*+(?=\n|\Z)")
BOXED = re.compile(r"\\boxed\{((?:[^{}]++|\{[^{}]*+\})*+)\}")  # braces nest once: \boxed{5\text{ apples}}
ANSWER_IS = re.compile(r"\banswer is\b", re.IGNORECASE)
MIXED = re.compile(r"(?<=[0-9])\s*+\\[dt]?frac")
FRAC = re.compile(r"\\[dt]?frac(?:\{([^{}]*+)\}| ?([0-9]))(?:\{([^{}]*+)\}| ?([0-9]))")
# 1{,}234 and 1\,234 and 1,\!234; and groups by an apostrophe or a space that doesn't break
GROUPING = re.compile(r"\{,\}|\\[!,]|(?<=[0-9])['’\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")


@dataclass(frozen=True)
class Readings:
    """The two readings of a completion, a verdict. Right strictly is right leniently, too."""

    strict: bool  # the number found by this reading equals the gold answer
    lenient: bool
    formatted: bool  # the strict reading found a number
    answer: str | None  # the number that was read, by the strict reading if it found one, else by the lenient one
    rewarded: str = "strict"  # or "lenient": decides what is right, what is paid, and which metric is first
    reward_format: float = 0.0  # of a wrong answer in which the rewarded reading found a number

    @property
    def right(self) -> bool:
        return self.strict if self.rewarded == "strict" else self.lenient

    @property
    def metrics(self) -> dict[str, float | None]:
        found = {"accuracy": self.strict, "accuracy_lenient": self.lenient, "formatted": self.formatted}
        return found if self.rewarded == "strict" else {"accuracy_lenient": self.lenient} | found

    @property
    def words(self) -> str:
        if self.lenient and not self.right:
            return "right, but not in the form that was asked for"
        return "right" if self.right else "wrong"

    @property
    def reward(self) -> float:
        """1 if the answer is right, else `reward_format` if the rewarded reading found a number, else 0."""
        if self.right:
            return 1.0
        readable = self.formatted if self.rewarded == "strict" else self.answer is not None
        return self.reward_format if readable else 0.0


CUT_OFF = Readings(strict=False, lenient=False, formatted=False, answer=None)  # whatever it says


def verify(text: str, gold: str) -> Readings:
    """Judge a completion against the gold answer, a number as text, by value: 1,234.00 equals 1234 and 0.5 equals 1/2.
    Never raises for any `text`; raises ValueError if `gold` is not a number."""
    expected = to_number(gold)
    if expected is None:
        raise ValueError(f"The gold answer {gold!r} is not a number: a problem needs one, such as 1,234 or 3/4.")
    answer = extract_strict(text)
    formatted = answer is not None
    if not formatted:
        answer = extract_lenient(text)
    right = answer is not None and to_number(answer) == expected
    return Readings(strict=right and formatted, lenient=right, formatted=formatted, answer=answer)


def extract_strict(text: str) -> str | None:
    r"""The number of the last readable `#### NUMBER`, GSM8K's own form, as plain text (`#### $1,234.00` gives
    "1234.00"), or None.

    Exactly four #, anywhere in a line, then spaces or tabs, then the number. The rest of the line may hold a unit
    without digits and a full stop, nothing else: `#### 12 apples.`, `#### 60 km/h`, `#### 50%` are read; `####12`,
    `#### x = 12`, `#### 3 million`, `#### 5 + 7 = 12`, `#### 1. Add both`, `#### **12**` are passed over, so an earlier
    one counts. GSM8K's own grader takes the first match of `#### (\-?[0-9\.\,]+)`: it ignores the rest of the line and
    refuses a currency sign.
    """
    return _first_readable(reversed(STRICT.findall(text)))


def extract_lenient(text: str) -> str | None:
    r"""The final number of a text, however it is announced, as plain text; None if there is no number. The first of
    these that yields one: the strict reading; the last number in the last `\boxed{}` that holds any; the first number
    after the last "answer is" that has one on its line; the last number in the text."""
    strict = reversed(STRICT.findall(text))
    text = GROUPING.sub("", FRAC.sub(r"\1\2/\3\4", MIXED.sub(r" \\frac", text)))
    boxes = (number for box in reversed(BOXED.findall(text)) for number in reversed(NUMBER.findall(box)))
    lines = (after.partition("\n")[0] for after in reversed(ANSWER_IS.split(text)[1:]))
    stated = (number for line in lines for number in NUMBER.findall(line))
    return _first_readable(chain(strict, boxes, stated, reversed(NUMBER.findall(text))))


@lru_cache(maxsize=4096)  # a step reads a right answer once for each completion of its group
def to_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number, with or without a percent sign or a full stop; else None."""
    text = text.strip()
    if not WHOLE_NUMBER.fullmatch(text):
        return None
    digits = plain(text)
    numerator, slash, denominator = digits.partition("/")
    if len(digits) > MAX_DIGITS or (slash and not denominator.strip("0")):
        return None
    return Fraction(numerator) / int(denominator or 1)


def plain(number: str) -> str:
    """A matched number without commas, currency, plus and percent signs and final full stop, with an ASCII minus."""
    return re.sub(r"[−–‑‐]", "-", re.sub(r"[,+$€£\\ %]", "", number)).rstrip(".")


def _first_readable(numbers: Iterable[str]) -> str | None:
    """The first of the matched numbers that has a value; `3/0` and endless digits have none."""
    return next((plain(number) for number in numbers if to_number(number) is not None), None)
