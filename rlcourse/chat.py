"""Chats as a model's template writes them, and how an answer ends in them. A template is somebody else's program: it
may drop a turn, cut reasoning from an answer, or write today's date, so its output is compared with its input."""

import datetime
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcourse.settings import shown

Messages = list[dict[str, str]]  # a conversation: role and content of each turn

DATE = datetime.date(2024, 7, 26)  # every day's prompts are those of this day
# Qwen3 answers at once; some templates write the date, which else would be today's. Others ignore the words.
TEMPLATE = {"enable_thinking": False, "date_string": DATE.strftime("%d %b %Y")}
TODAY = re.compile(r"strftime_now\s*\(\s*(['\"])(.*?)\1\s*\)")
TODAY_SOMEHOW = re.compile(r"strftime_now(?!\s+is\s+(?:not\s+)?defined)")
RANDOM = re.compile(r"\|\s*random\b|\blipsum\s*\(")
ASKED, ANSWERED = "1+1?", "It is 2."


def write_chats(tokenizer: PreTrainedTokenizerBase, chats: list[Messages], open_turn: bool = True) -> list[str]:
    """Each chat as the tokenizer's template writes it, with or without the open turn of an answer. Where it has no
    system turns, an instruction comes before the first question. Raises ValueError if there's no template, or it
    refuses a chat, or leaves out or changes a turn; or for a text that holds a special token, which would begin or end
    a turn."""
    if tokenizer.chat_template is None:
        raise ValueError("The model's tokenizer has no chat template: use an instruction-tuned model.")
    every = "\n".join(message["content"] for chat in chats for message in chat)
    if token := next((token for token in tokenizer.all_special_tokens if token and token in every), None):
        raise ValueError(f"A message holds {token}, a special token of the model: take it out (templates add them).")
    if any(chat[0]["role"] == "system" for chat in chats) and not has_system_turns(tokenizer):
        chats = [without_system_turn(chat) for chat in chats]
    try:
        texts = apply_template(tokenizer, chats, open_turn)
    except Exception as error:  # whatever a template does, such as refusing a role
        why = next(iter(str(error).splitlines()), "").rstrip(".")
        raise ValueError(
            f"The model's chat template refuses a chat ({why}): change the chat or the template."
        ) from None
    for chat, rest in zip(chats, texts, strict=True):
        for message in chat:
            content = message["content"].strip()  # Llama's template strips, too
            if "\n" in content:  # but an indented first line
                content = message["content"].rstrip().lstrip("\n")
            _, found, rest = rest.partition(content) if content else ("", True, rest)
            if not found:
                raise ValueError(
                    f"The model's chat template leaves out or changes a part of the {message['role']} turn "
                    f"{shown(content)}: correct chat_template.jinja, or leave that part out yourself."
                )
    return texts


def apply_template(tokenizer: PreTrainedTokenizerBase, chats: list[Messages], open_turn: bool) -> list[str]:
    """Each chat as the template writes it on `DATE`."""
    frozen = TODAY.sub(lambda call: repr(DATE.strftime(call[2])), tokenizer.get_chat_template())
    if TODAY_SOMEHOW.search(frozen):
        raise ValueError("it asks for today's date in a format that is not written there")
    if RANDOM.search(frozen):
        raise ValueError("it writes something random")
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_turn, "chat_template": frozen}
    return tokenizer.apply_chat_template(chats, **options, **TEMPLATE)


def has_system_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes a system turn, and does not refuse or drop it."""
    chat = [{"role": "system", "content": ANSWERED}, {"role": "user", "content": ASKED}]
    try:
        return ANSWERED in apply_template(tokenizer, [chat], open_turn=True)[0]
    except Exception:  # whatever a template does
        return False


def without_system_turn(chat: Messages) -> Messages:
    """The chat with its first turn, if that is a system turn, moved into the user turn behind it."""
    if chat[0]["role"] != "system" or len(chat) < 2 or chat[1]["role"] != "user":
        return chat
    return [chat[1] | {"content": f"{chat[0]['content']}\n\n{chat[1]['content']}"}, *chat[2:]]


def template_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the template writes behind an answer; None if it writes none. Raises ValueError for a
    template that writes a turn twice."""
    chat = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    try:
        [text] = write_chats(tokenizer, [chat], open_turn=False)
    except ValueError:  # it has no answers
        return None
    if text.count(ASKED) > 1 or text.count(ANSWERED) > 1:
        raise ValueError("The model's chat template writes a turn twice: correct chat_template.jinja.")
    behind = tokenizer(text.rpartition(ANSWERED)[2], add_special_tokens=False)["input_ids"]
    return next((token for token in behind if is_special(tokenizer, token)), None)


def is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Whether the token stands for no text that anybody writes."""
    return token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder


def ends_of(tokenizer: PreTrainedTokenizerBase, named: int | list[int] | None, path: str) -> list[int]:
    """The tokens that end an answer: those of the model's files, the tokenizer and the template. named: eos_token_id of
    generation_config.json. Raises ValueError for one that's no token, or ordinary text."""
    named = named if isinstance(named, list) else [] if named is None else [named]
    ends: list[int] = []
    for end in [*named, tokenizer.eos_token_id, template_end(tokenizer)]:
        if end is None or end in ends:
            continue
        if type(end) is not int or end not in tokenizer.get_vocab().values():
            raise ValueError(f"eos_token_id in {path} is not a token of the model, but {end!r}: correct it there.")
        if not is_special(tokenizer, end):
            raise ValueError(
                f"eos_token_id in {path} is {end}, the ordinary text {tokenizer.decode([end])!r}, which would cut "
                f"answers short: name {tokenizer.eos_token} there."
            )
        ends.append(end)
    return ends
