import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcourse.tasks import load_task
from rlcourse.tasks.tokenizer import train_tokenizer
from tools.embedded.minigsm import minigsm_texts


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(minigsm_texts())


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == unicodedata.normalize("NFC", text)


def test_every_shipped_problem_comes_back_and_fits(tokenizer):
    task = load_task("minigsm")
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


def test_special_tokens_are_single_and_have_their_roles(tokenizer):
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.bos_token is None
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        assert ids(tokenizer, f"a{token}b")[1:-1] == [tokenizer.convert_tokens_to_ids(token)]
        assert tokenizer.decode(ids(tokenizer, f"a{token}b"), skip_special_tokens=True) == "ab"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")}) == 3


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


def test_training_repeats_itself():
    one, two = (train_tokenizer(minigsm_texts(500), 400) for _ in range(2))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    assert list(minigsm_texts(50)) == list(minigsm_texts(50)) != list(minigsm_texts(50, seed=8))
