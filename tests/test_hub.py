"""The hub, or its cache where the hub does not answer."""

import huggingface_hub
import pytest
from huggingface_hub import constants

from rlcourse.hub import hub_or_cache


class Session:
    """Answers a request, or fails."""

    def __init__(self, error=None):
        self.error, self.asked = error, []

    def head(self, url, timeout):
        self.asked.append((url, timeout))
        if self.error:
            raise self.error


@pytest.mark.parametrize(("error", "offline"), [(None, False), (OSError("no route"), True)])
def test_the_cache_alone_is_read_where_the_hub_does_not_answer(error, offline, monkeypatch):
    session = Session(error)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    with hub_or_cache():
        assert constants.HF_HUB_OFFLINE is offline
    assert constants.HF_HUB_OFFLINE is False
    assert len(session.asked) == 1 and session.asked[0][1] <= 5  # seconds


def test_who_is_offline_already_asks_nothing(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: 1 / 0)
    with hub_or_cache():
        assert constants.HF_HUB_OFFLINE is True
    assert constants.HF_HUB_OFFLINE is True
