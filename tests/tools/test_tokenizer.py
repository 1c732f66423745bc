import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcourse.course.lessons.warm_start import kernel_policy
from rlcourse.policy import load_policy
from rlcourse.tasks import load_task
from tools.embedded.minigsm import minigsm_texts
from tools.embedded.tokenizer import kernel_tokenizer, train_tokenizer


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
    assert not any(len(t) > 1 and any(c.isascii() and c.isdigit() for c in t) for t in tokenizer.get_vocab())


def test_turns_are_chatml_without_a_default_system_turn(tokenizer):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    asked = "<|im_start|>user\nHow many?<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(turns[1:], tokenize=False, add_generation_prompt=True)
    assert prompt == asked + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(turns[1:], add_generation_prompt=True)["input_ids"] == ids(tokenizer, prompt)
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert whole == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked


def test_the_kernel_tokenizer_is_the_one_that_ships():
    made, shipped = kernel_tokenizer(), kernel_policy(hidden_size=32, num_hidden_layers=1).tokenizer
    assert made.get_vocab() == shipped.get_vocab() and made.chat_template == shipped.chat_template
    assert (made.eos_token_id, made.pad_token_id) == (shipped.eos_token_id, shipped.pad_token_id)
    text = " a = add u v end put ; =>"
    assert ids(made, text) == ids(shipped, text) and len(ids(made, text)) == len(text.split())
