"""The course around the package: what its notebooks start with, checks and grading, experiments."""

from rlcourse.course.start import BOOTSTRAP, REPOSITORY, TAG, colab_url, pick, profile, start

__all__ = ["BOOTSTRAP", "REPOSITORY", "TAG", "colab_url", "pick", "profile", "start"]
