"""What a template of `minigsm` is, and the words that fill it."""

from dataclasses import dataclass


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


BOYS = ["Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Ravi", "Juan"]
GIRLS = ["Anna", "Mia", "Zoe", "Lily", "Emma", "Nina", "Sara", "Mei"]
THINGS = ["apples", "books", "cards", "coins", "shells", "stamps", "beads", "stickers", "marbles", "pencils"]
BOXES = {"boxes": "box", "bags": "bag", "packs": "pack", "baskets": "basket"}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
