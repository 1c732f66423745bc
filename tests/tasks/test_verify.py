"""The verifier: example tables for each reading, properties over generated texts, and a bound on the time it takes."""

import time
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thinned

from rlcourse.tasks import Attempt, MathTask, Problem
from rlcourse.tasks.verify import MAX_DIGITS, Readings, extract_lenient, extract_strict, to_number, verify

STRICT = {
    # what the model is asked for
    "#### 12": "12", "5 + 7 = 12\n#### 12": "12", "#### 12\n\nSo there are 13 apples.": "12", "####\t12": "12",
    # the same number, dressed
    "#### -$3": "-3", "#### £1,234.50": "1234.50", "#### 1,234.00.": "1234.00", "#### .5": ".5",
    "#### 1/1,000": "1/1000", "#### –5": "-5",
    # units
    "#### 60 km/h": "60", "#### 20°C": "20", "#### 50 %.": "50",
    # the last one that can be read
    "#### 1\n#### 2\n#### 3": "3", "#### 12\n#### 1/0": "12", "#### 12\n#### Explanation\n1. Add.": "12",
    # not read
    **dict.fromkeys([
        "####12", "##### 12", "####\n12", "#### - 3", "#### **12**", "#### 3 4", "#### 3,4", "#### 1. Add both",
        "#### 1,23", "#### 0,123", "#### 12.5.3", "#### 1e3", "#### 3/4.5", "#### ١٢", "#### 2½", "#### 3 million",
        "#### 1.5 Thousand dollars", "#### $5k", "#### 3:30", "#### 1 234", "#### 1 1/2", "#### 2 x 10^3",
    ]),
}  # fmt: skip

LENIENT = {
    "\\boxed{7} The answer is 8.\n#### 12\n13": "12",  # strictly readable: nothing else counts
    # boxed
    "so \\boxed{\\$1,234} for 5 days": "1234", "\\boxed{1{,}234}": "1234", "\\boxed{\\frac{3}{4}} of 8": "3/4",
    "\\boxed{\\frac12}": "1/2", "\\boxed{2 + 3 = 5} or 6": "5", "\\boxed{2} \\boxed{x} 3": "2", "\\boxed{5": "5",
    "\\boxed{} 6": "6",
    # "the answer is"
    "the final ANSWER IS: 5 apples of the 9": "5", "The answer is $\\frac{3}{4}$ of 8.": "3/4",
    "The answer is 3. No, the answer is 4, not 5.": "4", "The answer is 3.\nThe answer is unclear. 9": "9",
    "The answer is 3.\nThe answer is unclear.\n9": "3", "The answer is 3/0, or 5": "5",
    # the last number
    "####12": "12", "She has 12 apples and 3, 4 pears": "4", "1,234 or 1,234,567": "1234567",
    "10-3": "3", "x=-3.50!": "-3.50", "1/2 or 3/0": "1/2",
    "25 cm^2": "25", "2^{-3} or 4": "4", "1.5e+3, no, 7**2, 3": "3", "so –5": "-5",
    "1'234 or 1\u00a0234\u00a0567": "1234567",
    # none
    "10^3": None, "2^{-3}": None, "1e3 1.5e-3": None, "5²": None, "2½": None, "10^{13} 2**10": None,
    "no number": None, "$-,./%": None,
    # no number as a whole
    **dict.fromkeys([
        "\\boxed{1\\frac{3}{4}}", "\\boxed{2 \\frac12}", "The answer is 1,234,5", "3/4/2020", "at 3:30", "5 1/2",
        "1.234,5", "12,34,567", "1.234.567", "1 234 567", "\\boxed{3\\text{ million}}", "\\boxed{1.5 \\times 10^3}",
        "2*10^3", "10K",
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), STRICT.items())
def test_strict_reading(text, expected):
    assert extract_strict(text) == expected


@pytest.mark.parametrize(("text", "expected"), LENIENT.items())
def test_lenient_reading(text, expected):
    assert extract_lenient(text) == expected


VALUES = {
    "1,234.00": 1234, "-2/4": Fraction(-1, 2), "−$1,000": -1000, "-0": 0, "1/0": None, "1_000": None, "nan": None,
    "12345678901234567890.000000000000000000001": Fraction(12345678901234567890 * 10**21 + 1, 10**21), "٣": None,
    "9" * MAX_DIGITS: 10**MAX_DIGITS - 1, "9" * (MAX_DIGITS + 1): None,
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), VALUES.items(), ids=lambda value: str(value)[:40])
def test_numbers_have_exact_values(text, value):
    assert to_number(text) == value


RIGHT = Readings(True, True, True, "1")
LENIENTLY_RIGHT = Readings(False, True, False, "1")
WRONG = Readings(False, False, True, "2")
LENIENTLY_WRONG = Readings(False, False, False, "2")
NOTHING = Readings(False, False, False, None)


@pytest.mark.parametrize(
    ("verdict", "strict", "lenient"),
    [(RIGHT, 1, 1), (LENIENTLY_RIGHT, 0, 1), (WRONG, 0.1, 0.1), (LENIENTLY_WRONG, 0, 0.1), (NOTHING, 0, 0)],
)
def test_reward_is_that_of_the_chosen_reading(verdict, strict, lenient):
    verdict = replace(verdict, reward_format=0.1)
    by_lenient = replace(verdict, rewarded="lenient")
    assert (verdict.reward, by_lenient.reward) == (strict, lenient)
    assert (verdict.right, by_lenient.right) == (strict == 1, lenient == 1)
    assert list(by_lenient.metrics) == ["accuracy_lenient", "accuracy", "formatted"]  # what counts comes first
    assert by_lenient.metrics == verdict.metrics
    words = {RIGHT: "right", LENIENTLY_RIGHT: "right, but not in the form that was asked for"}
    assert verdict.words == words.get(replace(verdict, reward_format=0.0), "wrong")


@pytest.mark.parametrize(
    ("text", "parser"), [("#### 1", "strict"), ("the answer is 1", "lenient"), ("#### 2", "strict")]
)
def test_an_unfinished_attempt_earns_nothing_whatever_it_says(text, parser):
    task, problem = MathTask("numbers", "", [], [], [], (), parser, 0.1), Problem("", "", "1")
    whole, cut = task.judge([Attempt(problem, text, 1, finished) for finished in (True, False)], training=True)
    assert whole == replace(verify(text, "1"), rewarded=parser, reward_format=0.1) and cut.reward == 0
    assert not (cut.right or cut.lenient or cut.formatted)


settings.register_profile("no deadline", deadline=None)  # a busy machine may pause for longer than an example may take
settings.load_profile("no deadline")

integers = st.integers(-(10**15), 10**15)
# Texts made of what the patterns look for are likelier to upset them than texts of any characters.
SNIPPETS = [
    *("#### ", "#", "\\boxed{", "{", "}", "answer is", "\\frac{1}{2}", "\n", " ", ",", ".", "/", "-", "−", "$", "\\"),
    *("%", "0", "7", "12", "345", "1,234", "apples", "٣", "²", "é"),
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(SNIPPETS)).map("".join))

SIGNED = ["{sign}{digits}", "{sign}${digits}", "${sign}{digits}", "{sign}€ {digits}", "{sign}{digits}/1"]
AFTER = ["", ".", ".00", ".0.", "%", " apples", " square feet.", " \n\nThat is all."]


@given(integers, st.booleans(), st.booleans(), st.sampled_from(SIGNED), st.sampled_from(AFTER))
def test_an_integer_in_any_style_extracts_to_itself(n, commas, unicode_minus, style, after):
    sign = ("−" if unicode_minus else "-") if n < 0 else ""
    digits = f"{abs(n):,}" if commas else str(abs(n))
    if style.endswith("/1") and after.startswith(".0"):
        after = ""
    number = style.format(sign=sign, digits=digits) + after
    for announced in (f"Add 1 and 2.\n#### {number}", f"#### 99\n#### {number}"):
        answer = extract_strict(announced)
        assert to_number(answer) == n
        assert extract_lenient(announced) == answer
    for announced in (f"The answer is {number}", f"1 + 2 is 3, so {number}"):
        assert to_number(extract_lenient(announced)) == n
        assert verify(announced, str(n)) == Readings(False, True, False, extract_lenient(announced))


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=6))
def test_decimals_compare_by_exact_value(number):
    text = f"{number:f}"
    assert to_number(text) == Fraction(number)
    assert verify(f"#### {text}", str(Fraction(number))).strict
    assert not verify(f"#### {text}1", text).strict or number == 0


@given(texts, integers)
def test_any_text_gets_a_consistent_verdict(text, gold):
    verdict = verify(text, str(gold))
    assert verdict.lenient or not verdict.strict
    assert verdict.formatted == (extract_strict(text) is not None)
    assert verdict.answer == extract_lenient(text)
    if verdict.answer is not None:
        assert verdict.answer.isascii()
        assert to_number(verdict.answer) is not None
        assert verdict.lenient == (to_number(verdict.answer) == gold)


@given(texts, integers, integers)
def test_a_later_answer_line_decides(text, n, other):
    assert verify(f"{text}\n#### {n}", str(n)) == Readings(True, True, True, str(n))
    verdict = verify(f"{text}\n#### {n}\n#### {other}", str(n))
    assert verdict.strict == verdict.lenient == (n == other)
    assert verdict.answer == str(other)


MEGABYTE = 1_000_000
HARD = [  # how a text begins, and what it then repeats
    ("\\boxed{", "{}"), ("#### 1", ",234"), ("answer is ", "1/0 "), ("", "-$"), ("#### ", " "), ("#### 1 ", "a"),
    ("", "#### 1/0\n"), ("", "\\boxed{{}"), ("", "\\frac{1}{"), ("", "the answer is 1/0 "),
]  # fmt: skip


@pytest.mark.parametrize(("start", "unit"), thinned(HARD, every=4))
def test_a_megabyte_of_anything_takes_linear_time(start, unit):
    text = start + unit * (MEGABYTE // len(unit)) + "!"
    before = time.process_time()
    verify(text, "12")
    assert time.process_time() - before < 5  # something quadratic would take hours


def test_an_answer_beside_a_megabyte_of_digits_is_read():
    assert verify("12, " + "1" * MEGABYTE, "12") == Readings(False, True, False, "12")
