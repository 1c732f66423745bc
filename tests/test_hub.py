"""The hub, or its cache where the hub does not answer."""

from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants

from rlcourse.hub import hub_or_cache


@pytest.mark.parametrize("already", [False, True])
@pytest.mark.parametrize("error", [None, OSError("no route")])
def test_the_cache_alone_is_read_where_the_hub_does_not_answer(error, already, monkeypatch):
    session = Mock()
    session.head.side_effect = error
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", already)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    with hub_or_cache():
        assert constants.HF_HUB_OFFLINE is (already or error is not None)
    assert constants.HF_HUB_OFFLINE is already
    assert session.head.call_count == (not already)  # who is offline asks nothing
    assert already or session.head.call_args.kwargs["timeout"] <= 5  # seconds
