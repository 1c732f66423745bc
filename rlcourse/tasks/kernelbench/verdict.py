"""How candidates are judged, and what one earned."""

from dataclasses import dataclass, field

# What torch may do in a forward pass: make memory, look at it otherwise, move it.
ALLOWED = """empty empty_like empty_strided new_empty new_empty_strided new_zeros new_ones new_full zeros zeros_like
ones ones_like full full_like fill_ zero_ view _unsafe_view reshape alias as_strided detach clone copy_ _to_copy t
transpose permute expand slice select squeeze unsqueeze unbind split view_as is_pinned set_ _local_scalar_dense
lift_fresh"""
OPERATIONS = frozenset(ALLOWED.split())
COMPILED, CORRECT, MOST_SPEEDUP = 0.1, 0.3, 5.0  # reward for compiling, for being right, and for speed at most


@dataclass(frozen=True)
class Settings:
    """Trials for each shape and kind (`cases`); timed `trials`, fewer where they take more than `timing_seconds`;
    seconds to load the text, for the first pass, in which Triton and CuTe DSL compile, and for each other one."""

    cases: int = 2
    trials: int = 100
    compile_seconds: float = 240.0
    first_seconds: float = 90.0
    run_seconds: float = 20.0
    timing_seconds: float = 30.0
    memory_bytes: int = 8 << 30
    gpu_bytes: int = 24 << 30
    torch_compile: bool = True  # whether to time torch.compile as well


@dataclass
class Verdict:
    """What a candidate earned. reason: "" for a right one, else a name; text: more of it. Times are in milliseconds."""

    reason: str = ""
    text: str = ""
    metrics: dict[str, float] = field(default_factory=lambda: {"compiled": 0.0, "correct": 0.0, "refused": 0.0})

    @property
    def reward(self) -> float:
        """0 for a cheat, else COMPILED · compiled + correct · (CORRECT + speed-up, up to MOST_SPEEDUP)."""
        if self.metrics["refused"]:
            return 0.0
        speed = min(self.metrics.get("speedup", 0.0), MOST_SPEEDUP)
        return COMPILED * self.metrics["compiled"] + self.metrics["correct"] * (CORRECT + speed)
