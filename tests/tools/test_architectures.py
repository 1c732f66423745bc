"""Every causal architecture that can be made tiny is right here, or refused in a sentence."""

import pytest

from tools.architectures import kinds, verdict

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
