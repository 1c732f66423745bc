"""Train the embedded models' tokenizers, of Qwen2's kind: byte-level BPE, each digit a token, ChatML turns."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from rlcourse.tasks.kernels.language import WORDS

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SMALLEST = 3 + 256  # the special tokens and every byte, so that any text can be encoded

# Qwen2.5-Instruct's template without its default system turn and its tools.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 576) -> PreTrainedTokenizerFast:
    """A left-padding tokenizer of at most `vocab_size` entries; pad is <|endoftext|>, eos is <|im_end|>. The same texts
    give the same tokenizer. Text that isn't in Unicode's composed form (NFC) comes back composed, as with Qwen2. Raises
    ValueError for a `vocab_size` below the 256 bytes and 3 special tokens."""
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size must be at least {SMALLEST} (256 bytes, 3 special tokens), not {vocab_size}.")
    # Qwen2's own class, because `AutoTokenizer` loads any tokenizer beside a Qwen2 model with it. It brings the split
    # pattern, byte-level coding and NFC; the merges are learned here.
    tokens = {"pad_token": PAD, "eos_token": END, "extra_special_tokens": [START]}
    vocab = {PAD: 0, START: 1, END: 2}
    untrained = Qwen2Tokenizer(vocab, [], padding_side="left", chat_template=CHAT_TEMPLATE, **tokens)
    return untrained.train_new_from_iterator(texts, vocab_size, show_progress=False)


def kernel_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer in `data/kernels/model`: bytes, special tokens, and every word of the language with its space."""
    longest = sum(map(len, WORDS))  # merges that it can take to make words of letters, at most
    tokenizer = train_tokenizer([f" {word}" for word in WORDS], vocab_size=SMALLEST + longest)
    # No turns: the prompt is text to be continued. Every word comes after a space, or it would be another token.
    tokenizer.chat_template = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}{{ ' =>' }}"
    return tokenizer
