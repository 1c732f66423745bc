"""The course around the package: what its notebooks start with, checks and grading, experiments."""

from rlcourse.course.start import REPOSITORY, pick, profile, start

__all__ = ["REPOSITORY", "pick", "profile", "start"]
