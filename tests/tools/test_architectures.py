"""Every causal architecture that can be made tiny is right here, or refused in a sentence."""

import pytest

from tools.architectures import kinds, page, verdict

FEW = {"llama": "right", "gemma2": "right", "bart": "refused"}


@pytest.mark.parametrize("kind", FEW)
def test_a_few_architectures_are_right_or_refused(kind):
    what, why = verdict(kind)
    assert what == FEW[kind], why
    assert ("own logits" in why) == (kind == "gemma2")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", kinds())
def test_every_architecture_is_right_or_refused(kind):
    what, why = verdict(kind)
    assert what != "wrong", why
    assert "\n" not in why


def test_the_page_has_every_architecture_with_its_reason():
    text = page(
        {"llama": ("right", ""), "bart": ("refused", "X (the type bart looks ahead): Y."), "b": ("not tried", "")}
    )
    assert "1 right, 1 refused, 1 not tried" in text and "Looks ahead: `bart`." in text and "`llama`." in text
