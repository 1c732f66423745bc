"""The Hugging Face hub, or its cache alone where the hub cannot be reached."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 5  # for the hub to answer at all


def load_rows(name: str, remedy: str, *options: str, **more: str) -> Any:
    """A data set of the hub, as `datasets.load_dataset` has it. remedy: what to do without a network. Raises
    ConnectionError."""
    import datasets

    try:
        with hub_or_cache():
            return datasets.load_dataset(name, *options, **more)
    except Exception as error:  # without a network it may be any of a dozen, from three libraries
        raise ConnectionError(
            f"{name} could not be loaded from the Hugging Face hub ({type(error).__name__}): check the network, or "
            f"{remedy}."
        ) from error


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Within, the hub's libraries use their cache alone if the hub doesn't answer: they'd ask five times per file."""
    from huggingface_hub import constants, get_session

    libraries = [constants]
    if "datasets" in sys.modules:  # keeps a copy of the switch
        libraries.append(sys.modules["datasets"].config)
    before = [library.HF_HUB_OFFLINE for library in libraries]
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception:  # of whichever library makes its requests
            for library in libraries:
                library.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for library, value in zip(libraries, before, strict=True):
            library.HF_HUB_OFFLINE = value
