"""What is learned: conversations from a file, a task or the hub, as tokens, those of the answers marked."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcourse.chat import Messages, write_chats
from rlcourse.files import digest_of
from rlcourse.hub import load_rows
from rlcourse.interrupts import say
from rlcourse.policy import Policy, positions_of
from rlcourse.settings import shown
from rlcourse.sft.config import SFTConfig, is_task
from rlcourse.tasks import load_task, minigsm
from rlcourse.tasks.jsonl import EMPTY, meant, parse_record, read_each_line
from rlcourse.watch import Warnings, left_out

PROMPTS, ANSWERS = ("prompt", "question"), ("answer", "completion", "response")  # the keys that a record may have
ROLES = ("system", "developer", "user", "assistant", "tool")
EXPECTED = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "answer": "..."}'
HELD_OUT = 10  # one in so many examples is held out at most
MINIGSM_PROBLEMS = 4000  # of the split that is kept for demonstrations: RL trains on others


@dataclass(frozen=True)
class Example:
    """One conversation: ids [n] int32, and learned [n] bool, True on the tokens of its answers, their ends included;
    never on the first, as nothing precedes it."""

    ids: Tensor
    learned: Tensor


@dataclass(frozen=True)
class Data:
    """Examples to learn, examples held out, how many were too long, and the warning if those are many."""

    train: list[Example]
    held_out: list[Example]
    too_long: int
    warnings: Warnings

    @property
    def fingerprint(self) -> str:
        return digest_of((example.ids.tolist(), example.learned.tolist()) for example in (*self.train, *self.held_out))


def load_data(config: SFTConfig, policy: Policy) -> Data:
    """The config's data in the policy's tokens. Of a task, examples of its validation problems are held out; of other
    data a random choice, the same for every seed. Raises FileNotFoundError or ValueError, in one sentence that names
    the line, for data that cannot be used; ConnectionError if the hub cannot be read."""
    if is_task(config.data):
        encoded = of_task(config, policy)
    else:
        every = of_file(config.data_file, policy) if config.data_file else of_hub(config, policy)
        chosen = set(random.Random(0).sample(range(len(every)), min(config.eval_examples, len(every) // HELD_OUT)))
        encoded = [[e for i, e in enumerate(every) if (i in chosen) == held_out] for held_out in (False, True)]
    limit, remedy = config.max_length, "raise --max-length"
    if (positions := positions_of(policy.model)) < limit:
        limit, remedy = positions, "shorten them, or use a model with more positions"
    kept = [[example for example in part if len(example.ids) <= limit] for part in encoded]
    if not kept[0]:
        raise ValueError(f"No example of {config.data} has at most {limit} tokens: {remedy}.")
    learned = {tuple(example.ids.tolist()) for example in kept[0]}
    if shared := sum(tuple(example.ids.tolist()) in learned for example in kept[1]):
        say(f"{shared} of {len(kept[1])} held-out examples are also learned: their loss says nothing about new ones.")
    count, of = sum(map(len, kept)), sum(map(len, encoded))
    return Data(*kept, of - count, left_out(count, of, f"examples, which have more than {limit:,} tokens", remedy))


def of_file(file: Path, policy: Policy) -> list[Example]:
    read = lambda line: encode(policy, conversation_of(parse_record(line, EXPECTED)))  # noqa: E731
    return [example for _, example in read_each_line(file, read, "conversations")]


def of_hub(config: SFTConfig, policy: Policy) -> list[Example]:
    remedy, examples = "name a file that is here, or another data set, --subset or --split", []
    for row in load_rows(config.data, remedy, config.subset, split=config.split):
        try:
            examples.append(encode(policy, conversation_of(row)))
        except ValueError as error:
            raise ValueError(f"{config.data}, row {len(examples)}: {error}") from None
    return examples


def of_task(config: SFTConfig, policy: Policy) -> list[list[Example]]:
    """Examples from a task's worked answers, to learn and to hold out: its own prompts, each continued by the answer
    and its end. Raises ValueError for a problem without a worked answer."""
    task, end = load_task(config.data), policy.end
    train, held_out = task.problems("train"), task.problems("validation")[: config.eval_examples]
    if config.data == "minigsm":  # those that are kept for demonstrations: RL doesn't meet them again
        train = [problem.to_problem() for problem in minigsm.generate(MINIGSM_PROBLEMS, 1, "sft")]

    def example(problem: Any) -> Example:
        answer = getattr(problem, "answer", "")
        if not answer.strip():
            raise ValueError(f"The problems of {config.data} have no worked answers to learn: name a file in --data.")
        prompt, text = task.prompt(problem, policy), answer + end
        learned = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        check_end(policy, learned, f"{config.data}: ")
        ids = torch.tensor([*prompt, *learned], dtype=torch.int32)
        return Example(ids, torch.arange(len(ids)) >= len(prompt))

    return [[example(problem) for problem in problems] for problems in (train, held_out)]


def conversation_of(record: dict[str, Any]) -> Messages:
    """The conversation in a record: `messages`; or a prompt and an answer, each a text, or as trl has them, messages;
    with a text in `system`, that before them. Raises ValueError for what is wrong with it or would not be learned."""
    given, record = record, meant(record)
    messages, system = record.pop("messages", None), record.pop("system", None)
    if messages is None:
        prompt = next((record.pop(key) for key in PROMPTS if key in record), None)
        answer = next((record.pop(key) for key in ANSWERS if key in record), None)
        if prompt is None or answer is None:
            if empty := [key for key in (*PROMPTS, *ANSWERS) if given.get(key) == ""]:
                raise ValueError(f"the {empty[0]} is empty.")
            raise ValueError(f"there are no messages, and no prompt with an answer; expected {EXPECTED}.")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        if isinstance(prompt, list) and isinstance(answer, list):
            messages = prompt + answer
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of objects with role and content.")
    messages = [{"role": "system", "content": system}] * (system is not None) + messages
    for number, message in enumerate(messages, start=1):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"role or content of message {number} is not a text.")
        if message["role"] not in ROLES or (number == 1 and message["role"] == "assistant"):
            known = "user or system" if number == 1 else ", ".join(ROLES)
            raise ValueError(f"message {number} has the role {shown(message['role'])}, expected {known}.")
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError("an answer is empty.")
        if more := [key for key, value in message.items() if key not in ("role", "content") and value not in EMPTY]:
            raise ValueError(f"{more[0]} of message {number} isn't learned: put it into the content, or leave it out.")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError('there is no answer: no message has the role "assistant".')
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    for key, value in record.items():
        if value not in [message["content"] for message in messages]:  # some data sets repeat the question
            raise ValueError(f"the column {key} isn't learned: put it into the messages, or leave it out.")
    return messages


def encode(policy: Policy, messages: Messages) -> Example:
    """The tokens of a conversation up to its last answer, as the policy would read and write them. Raises ValueError if
    the chat template cannot say what an answer is, or an answer holds the token that ends one.

    What precedes an answer is tokenized as a prompt is, and the answer, with its end, separately: so the model
    learns to continue the very tokens that it is given.
    """
    tokenizer, ids, learned, done = policy.tokenizer, [], [], ""

    def add(part: str, is_learned: bool) -> None:
        tokens = tokenizer(part, add_special_tokens=False)["input_ids"]
        ids.extend(tokens)
        learned.extend([is_learned] * len(tokens))

    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        [before] = write_chats(tokenizer, [messages[:number]])
        [after] = write_chats(tokenizer, [messages[: number + 1]], open_turn=False)
        if not before.startswith(done) or not after.startswith(before) or before == done:
            raise ValueError(
                f"the chat template asks for an answer with {shown(before[-20:])}, and writes something else "
                "before one: begin the answer with that, or make it one line an answer."
            )
        answer = up_to_its_end(policy, after[len(before) :], message["content"].strip())
        add(before[len(done) :], False)
        start = len(ids)
        add(answer, True)
        check_end(policy, ids[start:])
        done = before + answer if after.startswith(before + answer) else after
    return Example(torch.tensor(ids, dtype=torch.int32), torch.tensor(learned))


def check_end(policy: Policy, answer: list[int], where: str = "") -> None:
    """Raise ValueError for an answer that has an end before its last token."""
    if any(token in policy.eos_ids for token in answer[:-1]):
        raise ValueError(f"{where}an answer holds {policy.tokenizer.decode(answer[-1])}, which ends one.")


def up_to_its_end(policy: Policy, written: str, content: str) -> str:
    """A template's text of an answer up to the first token that ends it, which is added if there is none."""
    ends = [policy.tokenizer.decode([token]) for token in policy.eos_ids]
    start = written.rfind(content) + len(content) if content in written else 0
    places = [written.find(end, start) + len(end) for end in ends if end in written[start:]]
    return written[: min(places)] if places else written + policy.end
