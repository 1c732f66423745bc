"""What `rlcourse bench` can be asked for."""

from dataclasses import dataclass

POSITIONS = {  # shapes, and the tokens of their longest row
    "qwen2.5-0.5b": 32768, "qwen2.5-1.5b": 32768, "qwen2.5-3b": 32768, "qwen2.5-7b": 32768, "qwen3-0.6b": 32768,
    "llama-3.2-1b": 32768, "tiny": 32768, "embedded": 512,
}  # fmt: skip
LENGTHS = ("equal", "skewed")
BENCHMARKS = ("decode", "step")


@dataclass(frozen=True)
class Options:
    """The options of the command. Each benchmark takes those that it needs."""

    shape: str = "qwen2.5-0.5b"
    rows: tuple[int, ...] = (16, 64)
    prompt_tokens: int = 128
    new_tokens: int = 256
    lengths: str = "equal"
    repeats: int = 5

    def check(self, what: str, benchmarks: tuple[str, ...] = BENCHMARKS) -> None:
        """Raise ValueError, before anything is loaded, for options that the benchmark `what` cannot run with."""
        if what not in benchmarks:
            raise ValueError(f"Unknown benchmark {what!r}: use {', '.join(benchmarks[:-1])} or {benchmarks[-1]}.")
        shapes = [shape for shape in POSITIONS if shape != "embedded" or what == "decode"]
        if self.shape not in shapes:
            raise ValueError(f"Unknown shape {self.shape!r}: use one of {', '.join(shapes)}.")
        if self.lengths not in LENGTHS:
            raise ValueError(f"Unknown lengths {self.lengths!r}: use {' or '.join(LENGTHS)}.")
        tokens, positions = self.prompt_tokens + self.new_tokens, POSITIONS[self.shape]
        if tokens > positions:
            raise ValueError(
                f"--prompt-tokens and --new-tokens are {tokens:,} together, and {self.shape} has {positions:,} "
                "positions: lower one."
            )
