"""What is learned: conversations from every source, their tokens beside the chat template's own, and files that are
refused."""

import json

import pytest
from policies import make_policy

from rlcourse.sft import data as module
from rlcourse.sft.config import make_config
from rlcourse.sft.data import conversation_of, encode, load_data
from rlcourse.tasks import MathTask, Problem, load_task, minigsm

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Tom has 3 apples?"},
    {"role": "assistant", "content": "#### 3"},
    {"role": "user", "content": "and 12 more?"},
    {"role": "assistant", "content": "3+12=15\n#### 15"},
]


def told(policy, example) -> tuple[str, list[str]]:
    """The whole text, and each stretch that is learned."""
    ids, learned = example.ids.tolist(), example.learned.tolist()
    stretches, current = [], []
    for token, is_learned in [*zip(ids, learned, strict=True), (None, False)]:
        if is_learned:
            current.append(token)
        elif current:
            stretches.append(policy.tokenizer.decode(current))
            current = []
    return policy.tokenizer.decode(ids), stretches


def lines(path, *records):
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return str(path)


def load(policy, **settings):
    return load_data(make_config(**settings), policy)


def test_every_answer_of_a_chat_is_learned_with_its_end_and_nothing_else(policy):
    text, learned = told(policy, encode(policy, CHAT))
    assert learned == ["#### 3<|im_end|>", "3+12=15\n#### 15<|im_end|>"]
    assert text == policy.tokenizer.apply_chat_template(CHAT, tokenize=False).removesuffix("\n")


def test_the_context_of_an_answer_is_the_prompt_that_sampling_uses(policy):
    example = encode(policy, CHAT[:3])
    prompt = policy.prompt(CHAT[1]["content"], CHAT[0]["content"])
    answer = policy.tokenizer(CHAT[2]["content"], add_special_tokens=False)["input_ids"]
    assert example.ids.tolist() == prompt + answer + [policy.tokenizer.eos_token_id]
    assert example.learned.tolist() == [False] * len(prompt) + [True] * (len(answer) + 1)


def test_the_end_is_added_where_the_template_writes_none(policy):
    policy.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}" + (
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    assert told(policy, encode(policy, CHAT[1:3]))[1] == ["#### 3 <|im_end|>"]


def test_a_template_that_writes_earlier_turns_anew_is_refused(policy):
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}|{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match=r"^the chat template asks for an answer with '.*assistant: ', and"):
        encode(policy, CHAT[1:])


def test_an_answer_that_holds_another_end_is_refused(policy):
    policy.eos_ids.append(policy.tokenizer("!")["input_ids"][0])
    with pytest.raises(ValueError, match=r"^an answer holds .*, which ends one"):
        encode(policy, conversation_of({"prompt": "Why?", "answer": "a! b"}))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT[1:3], "id": 7},
        {"prompt": "Tom has 3 apples?", "answer": "#### 3"},
        {"question": "Tom has 3 apples?", "response": "#### 3", "messages": None},
        {"prompt": CHAT[1:2], "completion": CHAT[2:3]},
        {
            "messages": [CHAT[1] | {"name": None, "tool_calls": []}, CHAT[2]],
            "prompt": CHAT[1]["content"],
            "tools": None,
        },
    ],
)
def test_a_record_may_have_any_of_these_forms(record):
    assert conversation_of(record) == CHAT[1:3]
    assert conversation_of(record | {"system": "Be short."}) == CHAT[:3]


BAD = {
    "not JSON": ('{"prompt": \n', "the line is not JSON; expected"),
    "nothing known": ({"text": "a"}, "there are no messages, and no prompt with an answer; expected"),
    "no answer": ({"prompt": "a", "answer": ""}, "the answer is empty"),
    "a blank answer": ({"prompt": "a", "answer": " \n"}, "an answer is empty"),
    "an answer that is a number": ({"prompt": "a", "answer": 5}, "role or content of message 2 is not a text"),
    "an end in a question": (
        {"prompt": "a<|im_end|>", "answer": "b"},
        r"A message holds <\|im_end\|>, a special token",
    ),
    "a turn in an answer": ({"prompt": "a", "answer": "<|im_start|>"}, r"A message holds <\|im_start\|>, a special"),
    "reasoning": ({"messages": [CHAT[1], CHAT[2] | {"reasoning_content": "3"}]}, "reasoning_content of message 2"),
    "a weight": ({"messages": [CHAT[1], CHAT[2] | {"weight": 0}]}, "weight of message 2 isn't learned"),
    "a call": ({"messages": [CHAT[1], CHAT[2] | {"tool_calls": [{"name": "add"}]}]}, "tool_calls of message 2 isn't"),
    "tools": ({"messages": CHAT, "tools": [{"name": "add"}]}, "the column tools isn't learned"),
    "a context": ({"prompt": "a", "answer": "b", "context": "c"}, "the column context isn't learned"),
    "two answers": ({"prompt": "a", "answer": "b", "response": "c"}, "the column response isn't learned"),
    "a bad example": ({"prompt": "a", "completion": "b", "label": False}, "the column label isn't learned"),
    "another name for a role": (
        {"messages": [CHAT[1], CHAT[2], CHAT[1], CHAT[2] | {"role": "Assistant"}]},
        "message 4 has the role 'Assistant', expected system, developer,",
    ),
    "an answer to nothing": ({"messages": CHAT[2:]}, "message 1 has the role 'assistant', expected user or system"),
    "no assistant": ({"messages": CHAT[:2]}, "there is no answer: no message has the role"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_line_that_cannot_be_used_is_named_in_one_sentence(what, policy, tmp_path):
    record, sentence = BAD[what]
    path = lines(tmp_path / "chats.jsonl", {"prompt": "a", "answer": "b"}, "\n", record)
    with pytest.raises(ValueError, match=rf"chats\.jsonl, line 3: {sentence}") as refusal:
        load(policy, data=path)
    assert "\n" not in str(refusal.value)


def numbered(path, count):
    return lines(path, *[{"prompt": f"What is {n}?", "answer": str(n)} for n in range(count)])


def test_a_tenth_is_held_out_at_most_the_same_for_every_seed(policy, tmp_path):
    path, every = numbered(tmp_path / "numbers.jsonl", 40), {str(n) for n in range(40)}
    for asked, count in ((3, 3), (200, 4), (0, 0)):
        parts = [load(policy, data=path, eval_examples=asked, seed=seed) for seed in (0, 1)]
        train, held_out = (
            [told(policy, e)[1][0].removesuffix("<|im_end|>") for e in part]
            for part in (parts[0].train, parts[0].held_out)
        )
        assert len(held_out) == count and {*train, *held_out} == every and len(train) == 40 - count
        assert train == sorted(train, key=int)
        assert parts[0].fingerprint == parts[1].fingerprint
    assert load(policy, data=path, eval_examples=3).fingerprint != load(policy, data=path).fingerprint


def test_held_out_examples_that_are_also_learned_are_counted(policy, tmp_path, capsys):
    load(policy, data=lines(tmp_path / "same.jsonl", *[{"prompt": "a", "answer": "b"}] * 20))
    assert capsys.readouterr().out.startswith("2 of 2 held-out examples are also learned: ")
    load(policy, data=numbered(tmp_path / "numbers.jsonl", 20))
    assert not capsys.readouterr().out


def test_examples_that_are_too_long_are_left_out_and_counted(policy, tmp_path):
    records = [{"prompt": "a", "answer": "b" * n} for n in (1, 500, 2)]
    path = lines(tmp_path / "long.jsonl", *records)
    found = load(policy, data=path, max_length=40)
    assert found.too_long == 1 and [told(policy, e)[1] for e in found.train] == [["b<|im_end|>"], ["bb<|im_end|>"]]
    assert load(policy, data=path, max_length=10_000).too_long == 1  # the model has 256 positions
    longest = max(len(example.ids) for example in found.train)
    assert load(policy, data=path, max_length=longest).too_long == 1
    assert load(policy, data=path, max_length=longest - 1).too_long == 2
    with pytest.raises(ValueError, match=r"No example of .* has at most 3 tokens: raise --max-length"):
        load(policy, data=path, max_length=3)
    few = make_policy(max_position_embeddings=4)
    with pytest.raises(ValueError, match=r"has at most 4 tokens: shorten them, or use a model with more positions"):
        load(few, data=path, max_length=1000)


def test_minigsm_is_learned_from_problems_that_rl_does_not_meet(policy, monkeypatch):
    monkeypatch.setattr(module, "MINIGSM_PROBLEMS", 40)
    found = load(make_policy(max_position_embeddings=1000), max_length=1000, eval_examples=5)
    problems = minigsm.generate(40, 1, "sft")
    assert len(found.held_out) == 5
    kept = {minigsm.split_of(problem.identity) for problem in problems}
    assert kept == {"sft"}
    texts = {told(policy, e)[1][0] for e in found.train}
    assert texts <= {problem.to_problem().answer + "<|im_end|>" for problem in problems} and texts
    validation = load_task("minigsm").problems("validation")[:5]
    assert [told(policy, e)[1] for e in found.held_out] == [[p.answer + "<|im_end|>"] for p in validation]


def test_a_worked_answer_of_a_task_that_holds_an_end_is_refused(policy, monkeypatch):
    problems = [Problem("1+1?", "It is<|im_end|> 2.\n#### 2", "2")]
    monkeypatch.setattr(module, "load_task", lambda name: MathTask("own", "", problems, problems, problems))
    with pytest.raises(ValueError, match=r"gsm8k: an answer holds <\|im_end\|>, which ends one"):
        load(policy, data="gsm8k")


def test_a_data_set_on_the_hub_is_loaded_by_name_subset_and_split(policy, monkeypatch):
    import datasets

    calls = []
    rows = [{"messages": CHAT}, {"messages": CHAT[1:3]}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or rows)
    found = load(policy, data="some/chats", subset="main", split="test")
    assert calls == [(("some/chats", "main"), {"split": "test"})] and len(found.train) == 2
    rows.append({"messages": CHAT[:1]})
    with pytest.raises(ValueError, match="some/chats, row 2: there is no answer"):
        load(policy, data="some/chats")
