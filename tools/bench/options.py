"""What a benchmark can be asked for."""

from dataclasses import dataclass

LENGTHS = ("equal", "skewed")


@dataclass(frozen=True)
class Options:
    """Options of the command. Each benchmark takes those that it needs."""

    shape: str = "qwen2.5-0.5b"
    rows: tuple[int, ...] = (16, 64)
    prompt_tokens: int = 128
    new_tokens: int = 256
    lengths: str = "equal"
    repeats: int = 5
