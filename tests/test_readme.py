from pathlib import Path

from rlcourse.course.dev.readme import fill

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_records():
    """`python -m rlcourse.course.dev.readme` makes them."""
    assert fill(README) == README


def test_every_file_that_the_readme_points_to_is_there():
    root = Path(__file__).parents[1]
    for name in ("environment.yml", "rlcourse/experience.py", "data/curves/curves.png", "notebooks", "solutions"):
        assert name in README and (root / name).exists()
