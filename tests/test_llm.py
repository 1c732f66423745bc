"""The engine as a program of one's own would use it."""
# ruff: noqa: F811 (a fixture of toy.py)

import pytest
import torch
from policies import logprobs_alone
from toy import folder  # noqa: F401

from rlcourse.llm import LLM
from rlcourse.sampling import GREEDY, Sampling


@pytest.fixture(autouse=True)
def _ordinary_ends(monkeypatch):
    monkeypatch.setattr("rlcourse.chat.is_special", lambda *_: True)


@pytest.mark.parametrize("engine", ["fast", "hf-dynamic"])
@pytest.mark.parametrize("sampling", [None, GREEDY, Sampling(0.7, top_k=4)])
def test_tokens_texts_and_logprobs_belong_together(folder, engine, sampling):
    llm = LLM(folder, engine, device="cpu")
    prompts = ["What is 3+4?", [5, 9, 40, 7], [11]]
    torch.manual_seed(0)
    found = llm.generate(prompts, sampling, max_new_tokens=12, num_generations=3)
    assert [len(group) for group in found] == [3, 3, 3]
    for prompt, group in zip(prompts, found, strict=True):
        ids = llm.policy.prompt(prompt) if isinstance(prompt, str) else prompt
        for answer in group:
            ends = [token in llm.policy.eos_ids for token in answer.tokens]
            assert not any(ends[:-1]) and answer.finished == ends[-1] and (ends[-1] or len(ends) == 12)
            assert answer.text == llm.policy.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            alone = logprobs_alone(llm.policy.model, ids, answer.tokens, None if sampling == GREEDY else sampling)
            torch.testing.assert_close(torch.tensor(answer.logprobs), alone.detach(), atol=1e-4, rtol=0)
    if sampling == GREEDY:
        assert all(answer.tokens == group[0].tokens for group in found for answer in group)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([[]],), "Every prompt needs a token"),
        (([[5], [100_000]],), "an id from 0 to "),
        (([[5]], None, 4, 0), "at least 1"),
        (([[5]], None, 100_000), "positions"),
        (("What is 1+1?",), "prompts is a list of questions"),
        (([5, 9, 40],), "put a single one in brackets"),
        (([["What?"]],), "Every prompt needs a token"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_a_sentence(folder, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        LLM(folder, device="cpu").generate(*arguments)
