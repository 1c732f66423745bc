"""Where the files that ship with the course are."""

from pathlib import Path

EMBEDDED_MODELS = {"embedded": "minigsm/model", "embedded-kernels": "kernels/model"}  # by name, folders of data/


def data_folder() -> Path:
    """The course's `data/`: beside the package in a clone of the repository, inside it where a wheel was installed.

    Raises FileNotFoundError for an install without it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "data", package / "data"):
        if (folder / "minigsm").is_dir():
            return folder
    raise FileNotFoundError(
        f"The course's data is not at {package / 'data'}: clone the repository and install it with `pip install -e .`."
    )


def model_folder(name: str) -> Path | None:
    """The folder that a model's name stands for, whether it exists or not; None for a name on the hub."""
    if name in EMBEDDED_MODELS:
        return data_folder() / EMBEDDED_MODELS[name]
    return Path(name).expanduser() if Path(name).exists() or name.startswith((".", "/", "~")) else None
