"""What every notebook of the course starts with: where it lives, which machine this is, which profile to run. Imports
nothing heavy. The repository's address is here and nowhere else."""

import os

from rlcourse import __version__
from rlcourse.course.figures import use_style
from rlcourse.measure.records import device_name
from rlcourse.openmp import spare_busy_cores

REPOSITORY = "rlcourse/rlcourse"  # on GitHub


def start(version: str) -> None:
    """Check the package against the notebook's `version`, set the look of figures, print the machine and the profile.
    Raises RuntimeError in one sentence if they do not belong together."""
    if version != __version__:
        raise RuntimeError(
            f"This notebook belongs to rlcourse {version}, but {__version__} is installed: "
            f'run `%pip install --no-deps "rlcourse @ git+https://github.com/{REPOSITORY}@v{version}"` and restart.'
        )
    spare_busy_cores()
    use_style()
    print(f"rlcourse {__version__} on {device_name()}, profile {profile()}")


def profile() -> str:
    """`smoke` where RLCOURSE_PROFILE says so: everything runs, small and fast. Else `full`. Raises RuntimeError for a
    profile that does not exist."""
    name = os.environ.get("RLCOURSE_PROFILE", "full")
    if name not in ("smoke", "full"):
        raise RuntimeError(f"Unknown RLCOURSE_PROFILE {name!r}: use smoke or full.")
    return name


def pick(smoke, full):
    """The value for the profile that runs: `steps = pick(smoke=2, full=60)`."""
    return smoke if profile() == "smoke" else full
