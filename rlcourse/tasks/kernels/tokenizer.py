"""The tokenizer of the tile language: each word a token, and a prompt that is the computation and `=>`."""

from transformers import PreTrainedTokenizerFast

from rlcourse.tasks.kernels.language import WORDS
from rlcourse.tasks.tokenizer import train_tokenizer

# No turns: the prompt is text to be continued. Every word comes after a space, or it would be another token.
TEMPLATE = "{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}{{ ' =>' }}"


def kernel_tokenizer() -> PreTrainedTokenizerFast:
    """The embedded model's tokenizer: bytes, the special tokens, and every word of the language with its space."""
    longest = sum(map(len, WORDS))  # merges that it can take to make words of letters, at most
    tokenizer = train_tokenizer([f" {word}" for word in WORDS], vocab_size=259 + longest)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
