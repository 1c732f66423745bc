import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcourse.policy import load_policy
from rlcourse.tasks import load_task
from rlcourse.tasks.tokenizer import train_tokenizer
from tools.embedded.minigsm import minigsm_texts


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(minigsm_texts(2000))


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == unicodedata.normalize("NFC", text)


def test_every_shipped_problem_comes_back_and_fits():
    task, tokenizer = load_task("minigsm"), load_policy("embedded").tokenizer
    for split in ("train", "validation", "test"):
        problems = task.problems(split)
        texts = [p.question for p in problems] + [p.answer for p in problems]
        encoded = tokenizer(texts)["input_ids"]
        assert tokenizer.batch_decode(encoded) == texts
        assert max(map(len, encoded)) < 80 - 1  # an answer and its EOS within the laptop preset's max_new_tokens


def test_each_digit_is_its_own_token(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(ids(tokenizer, "Tom has 120+75=195 apples."))
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("12075195")
    assert all(t.isdigit() <= (len(t) == 1) for t in tokenizer.get_vocab())
    assert not any(len(t) > 1 and any(c.isascii() and c.isdigit() for c in t) for t in tokenizer.get_vocab())


def test_turns_are_chatml_without_a_default_system_turn(tokenizer):
    user, system = {"role": "user", "content": "How many?"}, {"role": "system", "content": "Be brief."}
    reply = {"role": "assistant", "content": "#### 2"}

    def render(*messages, prompt):
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)

    asked = "<|im_start|>user\nHow many?<|im_end|>\n"
    assert render(user, prompt=True) == asked + "<|im_start|>assistant\n"
    assert render(system, user, prompt=False) == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked
    assert render(user, reply, prompt=False) == asked + "<|im_start|>assistant\n#### 2<|im_end|>\n"
    encoded = tokenizer.apply_chat_template([user], add_generation_prompt=True)["input_ids"]
    assert encoded == ids(tokenizer, render(user, prompt=True))
