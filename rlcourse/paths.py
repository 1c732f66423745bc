"""Where the files that ship with the course lie."""

from pathlib import Path


def data_folder() -> Path:
    """The repository's `data/`, beside the package. Raises FileNotFoundError for an install without it."""
    folder = Path(__file__).resolve().parent.parent / "data"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"The course's data is not at {folder}: clone the repository and install it with `pip install -e .` there."
        )
    return folder
