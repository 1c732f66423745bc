"""Other people's chat templates: every turn comes through whole, or the template is refused."""

import pytest
import torch
from policies import make_policy

from rlcourse.chat import DATE, ends_of, template_end, write_chats
from rlcourse.sft.data import encode

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QUESTION, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def policy_with(template: str):
    policy = make_policy()
    policy.tokenizer.chat_template = template
    return policy


def written(content: str, before: str = "") -> str:
    """A template whose turns have this instead of the content."""
    return before + TURNS.replace("CONTENT", content) + OPEN


REASONING = {"role": "assistant", "content": "<think>one and one</think>2"}
CUTS = {
    "reasoning": (written("m.content.split('</think>')[-1]"), REASONING),
    "lines": (written("m.content.split('\n')[0]"), {"role": "assistant", "content": "So\n#### 2"}),
    "case": (written("m.content | lower"), {"role": "assistant", "content": "TWO"}),
    "indentation": (written("m.content | trim"), {"role": "assistant", "content": "    if x:\n        return 2"}),
    "length": (written("m.content[:20]"), {"role": "assistant", "content": "2" * 30}),
    "escaped": (written("m.content | escape"), {"role": "assistant", "content": "1 < 2"}),
}


@pytest.mark.parametrize("kind", CUTS)
def test_a_template_that_cuts_or_rewrites_an_answer_is_refused(kind):
    template, answer = CUTS[kind]
    policy = policy_with(template)
    with pytest.raises(ValueError, match=r"^The model's chat template leaves out or changes a part of the assi"):
        encode(policy, [QUESTION, answer])
    assert policy.tokenizer.decode(encode(policy, [QUESTION, ANSWER]).ids).endswith("\n2<|im_end|>")


def test_a_template_that_cuts_a_question_is_refused_in_training():
    policy = policy_with(written("m.content[:9]"))
    policy.prompt("1+1?")
    with pytest.raises(ValueError, match=r"part of the user turn 'Tom has 3 apples\.': correct"):
        policy.prompt("Tom has 3 apples.")


REFUSES = written(
    "m.content", "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
SKIPS = written("m.content").replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


@pytest.mark.parametrize("template", [REFUSES, SKIPS], ids=["refuses", "skips"])
def test_without_a_system_role_the_instruction_comes_before_the_question(template):
    policy = policy_with(template)
    prompt = policy.tokenizer.decode(policy.prompt("1+1?", "Be brief."))
    assert prompt == "<|im_start|>user\nBe brief.\n\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    shown = policy.tokenizer.decode(policy.prompt("1+1?", "Be brief.", [("2+2?", "4")]))
    assert shown.startswith("<|im_start|>user\nBe brief.\n\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>")
    learned = encode(policy, [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER])
    assert policy.tokenizer.decode(learned.ids) == prompt + "2<|im_end|>"


@pytest.mark.parametrize("date", ["strftime_now('%d %b %Y')", 'strftime_now ( "%d %b %Y" )', "date_string"])
def test_a_template_with_the_date_writes_the_same_one_every_day(date):
    policy = policy_with("{{ messages[0].content }} on {{ DATE }}".replace("DATE", date))
    assert policy.tokenizer.decode(policy.prompt("1+1?")) == "1+1? on 26 Jul 2024" == f"1+1? on {DATE:%d %b %Y}"


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        ("{% set form = '%d' %}{% set d = strftime_now(form) %}", "asks for today's date in a format that is not wri"),
        ("{% set t = strftime_now %}", "asks for today's date in a format that is not written there"),
        ("{{ ['Hello', 'Hi'] | random }}", "writes something random"),
    ],
)
def test_what_cannot_be_frozen_is_refused(ask, why):
    policy = policy_with(f"{{% if strftime_now is defined %}}{ask}{{% endif %}}{{{{ messages[0].content }}}}")
    with pytest.raises(ValueError, match=why):
        policy.prompt("1+1?")


def test_a_chat_that_a_template_refuses_says_why():
    policy = policy_with("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"^The model's chat template refuses a chat \(roles must alternate\)"):
        write_chats(policy.tokenizer, [[QUESTION, QUESTION]])


# Ends


def test_the_first_of_two_ends_is_learned_and_the_engine_stops_at_both():
    """As Phi-3 has it: an end of the turn, and one of the text."""
    policy = policy_with(written("m.content") + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}")
    policy.eos_ids = ends_of(policy.tokenizer, [0], "")
    assert policy.eos_ids == [0, 2] and template_end(policy.tokenizer) == 2
    example = encode(policy, [QUESTION, ANSWER, QUESTION, ANSWER])
    assert policy.tokenizer.decode(example.ids[example.learned]) == "2<|im_end|>2<|im_end|>"


def test_what_is_taught_is_an_end_whatever_the_tokenizer_calls_its_own():
    policy = policy_with(written("m.content"))
    policy.tokenizer.eos_token = "<|endoftext|>"
    assert policy.end == "<|im_end|>" and 2 in ends_of(policy.tokenizer, 0, "")
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert policy.end == "<|endoftext|>" and ends_of(policy.tokenizer, None, "") == [0]


@pytest.mark.parametrize("named", [2.0, [[2]], "2", -1, True])
def test_an_end_that_is_no_token_is_refused(named):
    with pytest.raises(ValueError, match=r"^eos_token_id in F is not a token of the model, but "):
        ends_of(make_policy().tokenizer, named, "F")


def test_ids_with_holes_are_read():
    policy = make_policy()
    plain = policy.tokenizer.get_vocab()
    kind = type(policy.tokenizer)
    moved = {token: 350 if token == "4" else i for token, i in plain.items()}

    class Moved(kind):
        def get_vocab(self):
            return moved

        def batch_decode(self, rows, skip_special_tokens):
            back = {350: plain["4"]}
            assert {i for row in rows for i in row} <= {*moved.values()}, "a slow tokenizer fails on ids without text"
            return super().batch_decode([[back.get(i, i) for i in row] for row in rows], skip_special_tokens=True)

    policy.tokenizer.__class__ = Moved
    ids = torch.tensor([[plain["#"], 350, plain["2"], 349]])
    assert policy.texts(ids, torch.ones_like(ids, dtype=torch.bool)) == ["#42"]
