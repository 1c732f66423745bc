"""The templates of `minigsm`, which `templates.jsonl` holds, and the words that fill them.

In a template {x} {y} {z} {w} {v} are numbers, and k is a number written as a word: {times} ("three times") or {part}
("a third"). {A} {B} {C} are people; {he} {He} {him} stand for {A}; {things} are what they have and {boxes} (one {box})
hold them. A step has its calculation in brackets; r1 is the result of the first step, r2 of the second.
"""

from dataclasses import dataclass

from rlcourse.files import read_lines
from rlcourse.paths import data_folder


@dataclass(frozen=True)
class Template:
    """One kind of problem. `ranges` bounds each number, ends included; `minigsm.solve` says which combinations can
    be used."""

    name: str
    question: str
    steps: list[str]
    ranges: dict[str, tuple[int, int]]

    @property
    def level(self) -> int:
        return len(self.steps)


TEMPLATES = [Template(**line) for line in read_lines(data_folder() / "minigsm" / "templates.jsonl")]
BOYS = ["Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Ravi", "Juan"]
GIRLS = ["Anna", "Mia", "Zoe", "Lily", "Emma", "Nina", "Sara", "Mei"]
THINGS = ["apples", "books", "cards", "coins", "shells", "stamps", "beads", "stickers", "marbles", "pencils"]
BOXES = {"boxes": "box", "bags": "bag", "packs": "pack", "baskets": "basket"}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
