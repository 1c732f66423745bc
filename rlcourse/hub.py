"""The Hugging Face hub, or its cache alone where the hub cannot be reached."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 5  # for the hub to answer at all


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Within, the hub's libraries use their cache alone if the hub does not answer. Otherwise they would ask for each
    file five times, for half a minute."""
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
