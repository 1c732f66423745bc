"""Every setting of a training run in one dataclass, and the algorithms as sets of switches: GRPO, Dr. GRPO, DAPO and
the rest are one trainer. What is set by hand overrides the algorithm, which overrides the preset.

With one update a rollout the importance ratio is exactly 1: clips and sequence ratios then change nothing, GSPO is GRPO
and CISPO is DAPO without its sampling. So PPO, GSPO and CISPO make two updates; `minibatches 1` turns that off.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlcourse.presets import PRESETS
from rlcourse.settings import (
    COUNT,
    COUNT_OR_NONE,
    RANK,
    REWARD,
    SEED,
    SHARE,
    TEMPERATURE,
    TOP_P,
    WEIGHT,
    Range,
    Settings,
    model_and_address,
    setting,
    shown,
)

if TYPE_CHECKING:
    from rlcourse.sampling import Sampling


GROUPED = ("leave_one_out", "group_centered", "group_normalized")  # advantages that compare a prompt's completions
ENGINES = ("hf-dynamic", "hf-static", "fast", "vllm")
EVALUATION = (  # what `rlcourse eval` depends on: its options
    "preset", "model", "task", "examples", "reward_parser", "engine", "cache_gb", "max_new_tokens", "temperature",
    "top_k", "top_p", "dtype", "compile", "device", "eval_problems", "pass_k", "seed",
)  # fmt: skip


_REINFORCE = {"surrogate": "reinforce", "aggregation": "constant"}
_GRPO = {"advantage": "group_normalized", "aggregation": "sequence_mean"}
_DAPO = _GRPO | {"aggregation": "token_mean", "clip_high": 0.28}
_TWO_UPDATES = {"minibatches": 2}  # with one, the ratio is 1 and what an algorithm does with it has no effect

ALGORITHMS: dict[str, dict[str, Any]] = {
    # Williams 1992
    "reinforce": _REINFORCE | {"advantage": "reward"},
    "reinforce_baseline": _REINFORCE | {"advantage": "batch_centered"},
    # Ahmadian et al. 2024, arXiv:2402.14740
    "rloo": _REINFORCE | {"advantage": "leave_one_out"},
    # Schulman et al. 2017, arXiv:1707.06347
    "ppo": _TWO_UPDATES | {"advantage": "gae", "surrogate": "clip", "aggregation": "token_mean"},
    # Shao et al. 2024, arXiv:2402.03300
    "grpo": _GRPO,
    # Liu et al. 2025, arXiv:2503.20783
    "dr_grpo": {"advantage": "group_centered", "aggregation": "constant"},
    # Yu et al. 2025, arXiv:2503.14476
    "dapo": _DAPO | {"leave_out": "both"},
    # Zheng et al. 2025, arXiv:2507.18071
    "gspo": _TWO_UPDATES | _GRPO | {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax 2025, arXiv:2506.13585
    "cispo": _TWO_UPDATES | _DAPO | {"surrogate": "cispo", "clip_high": 4.0},
}


@dataclass
class TrainConfig(Settings):
    command = "train"
    panels: ClassVar = {
        "preset": "Model and task",
        "lora_rank": "LoRA",
        "advantage": "Algorithm switches",
        "reward_parser": "Reward",
        "judge": "Judge",
        "engine": "Rollout",
        "steps": "Optimisation",
        "micro_batch_tokens": "Memory and speed",
        "eval_every": "Evaluation",
        "seed": "The run",
    }

    preset: str = setting("laptop", "named set of defaults", tuple(PRESETS))
    algorithm: str = setting(
        "dr_grpo",
        "named set of switches, listed in rlcourse/config.py; ppo, gspo and cispo set 2 mini-batches, the others 1, "
        "with which the importance ratio is 1 and clips do nothing",
        tuple(ALGORITHMS),
    )
    model: str = setting("embedded", "'embedded', 'embedded-kernels', a folder, or a name on the Hugging Face hub")
    task: str = setting(
        "minigsm",
        "problems, and their judge: minigsm, gsm8k, math, kernelbench, kernels, or module:object for one of your own; "
        "TASK@FOLDER reads train.jsonl and test.jsonl there (minigsm: and validation.jsonl), not the usual source",
    )
    examples: int = setting(0, "worked training problems shown before each question", within=Range(0, 64))

    lora_rank: int = setting(
        0,
        "rank of a low-rank adapter of all linear layers that learns instead of the weights, with 10 times their "
        "learning rate; 0 for all weights",
        within=RANK,
    )

    advantage: str = setting(
        "group_centered",
        "how rewards become advantages",
        ("reward", "batch_centered", *GROUPED, "gae"),
    )
    surrogate: str = setting("clip", "loss of one token", ("reinforce", "clip", "cispo"))
    ratio: str = setting(
        "token", "importance ratio of each token, or one for the sequence (GSPO)", ("token", "sequence")
    )
    aggregation: str = setting(
        "constant",
        "mean over sequences of their token means, mean over all tokens, or sum over rows x max_new_tokens",
        ("sequence_mean", "token_mean", "constant"),
    )
    clip_low: float = setting(0.2, "the ratio is clipped below 1 - clip_low", within=SHARE)
    clip_high: float = setting(0.2, "the ratio is clipped above 1 + clip_high", within=WEIGHT)
    sampler_correction: str = setting(
        "off",
        "weight losses by how much more probable a token, or a completion, is to the trainer than to the sampler, "
        "2 at most (truncated importance sampling)",
        ("off", "token", "sequence"),
    )
    kl_coef: float | None = setting(
        None,
        "weight of the KL divergence to the frozen reference (k3, in the loss); 0 only measures it, and left out there "
        "is no reference",
        within=WEIGHT,
    )
    leave_out: str = setting(
        "nothing",
        "what a step does without (DAPO): groups whose rewards are all equal, sampled anew in 4 rounds at most; "
        "completions cut off at the token limit, out of the loss; or both",
        ("nothing", "groups", "truncated", "both"),
    )

    reward_parser: str = setting("strict", "which reading of an answer counts as right", ("strict", "lenient"))
    reward_format: float = setting(
        0.0, "reward of a wrong answer that can be read; a right one earns 1, anything else 0", within=REWARD
    )

    judge: str | None = setting(
        None,
        "language model that scores answers, too, from 0 to 1; the reward is the mean of what is measured and judged: "
        "MODEL@ADDRESS of an OpenAI-compatible endpoint, such as qwen@http://localhost:8000/v1 (its key in the "
        "variable RLCOURSE_JUDGE_KEY)",
    )

    engine: str = setting(
        "fast", f"rollout engine: {', '.join(ENGINES)}, or vllm@http://HOST:PORT for a vLLM server; see docs/vllm.md"
    )
    sleep: bool = setting(False, "free the memory of the rollout's cache and graphs for the update")
    cache_gb: float = setting(
        0.0,
        "GB of a paged cache on a GPU; 0: the fast engine has room for each completion at its full length, vllm 4 GB",
        within=WEIGHT,
    )
    num_prompts: int = setting(16, "prompts per step", within=Range(1, 10_000))
    num_generations: int = setting(8, "completions of each prompt: the group", within=Range(1, 1024))
    max_prompt_tokens: int = setting(64, "problems with longer prompts are left out", within=COUNT)
    max_new_tokens: int = setting(80, "tokens of a completion at most", within=COUNT)
    temperature: float = setting(1.0, "sampling temperature, applied in training too", within=TEMPERATURE)
    top_k: int = setting(0, "sample from the k most probable tokens, in training too; 0 for all", within=COUNT_OR_NONE)
    top_p: float = setting(1.0, "sample from the smallest set with this mass, in training too; 1 for all", within=TOP_P)

    steps: int = setting(30, "training steps: rollout, then update", within=COUNT)
    lr: float = setting(4e-5, "peak learning rate (AdamW, no weight decay)", within=SHARE)
    schedule: str = setting("constant", "what the learning rate does after warm-up", ("constant", "linear", "cosine"))
    warmup_steps: int = setting(5, "steps over which the learning rate rises from 0", within=COUNT_OR_NONE)
    inner_epochs: int = setting(1, "passes over each rollout", within=Range(1, 1000))
    minibatches: int = setting(
        1, "optimizer steps in each pass; old log-probs are the trainer's own before the first", within=COUNT
    )
    micro_batch_tokens: int = setting(
        2048,
        "tokens that one forward and backward computes, padding too; a longer row goes alone, and gradients accumulate",
        within=COUNT,
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    logprob_chunk: int = setting(4096, "tokens whose logits are in memory at once", within=COUNT)
    dtype: str = setting("float32", "precision of forward passes; weights stay float32", ("float32", "bfloat16"))
    compile: bool = setting(False, "torch.compile the fast engine's decode step and the layers in training")
    shard: bool = setting(
        False, "each of torchrun's processes keeps a part of weights, gradients and moments alone (FSDP2)"
    )
    device: str = setting("auto", "'auto' uses a GPU if there is one", ("auto", "cpu", "cuda"))

    eval_every: int = setting(
        5, "steps between greedy evaluations on validation problems; 0 for none", within=COUNT_OR_NONE
    )
    eval_validation: int = setting(200, "validation problems in each of them", within=COUNT)
    eval_problems: int = setting(1000, "test problems of the greedy evaluation before and after training", within=COUNT)
    pass_k: int = setting(
        8, "samples of each of 64 test problems for pass@k, before and after; 0 for none", within=Range(0, 1024)
    )

    seed: int = setting(0, "seed of prompts, sampling and the value head", within=SEED)
    output: str = setting("runs", "folder of runs")
    name: str | None = setting(None, "name of the run; by default made of preset, algorithm and seed")
    save_every: int = setting(
        20, "steps between checkpoints; the last two stay; 0: one at the end", within=COUNT_OR_NONE
    )
    log_to: str = setting("none", "also log to", ("none", "tensorboard", "wandb"))

    @property
    def sampling(self) -> "Sampling":
        from rlcourse.sampling import Sampling  # imports torch, which a config alone does not need

        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def dynamic_sampling(self) -> bool:  # whether groups without signal are sampled anew
        return self.leave_out in ("groups", "both")

    @property
    def mask_truncated(self) -> bool:  # whether completions that hit the token limit are out of the loss
        return self.leave_out in ("truncated", "both")

    @property
    def rows(self) -> int:  # completions per step
        return self.num_prompts * self.num_generations

    @property
    def needs_reference(self) -> bool:  # a frozen copy of the starting policy
        return self.kl_coef is not None

    @property
    def run_name(self) -> str:
        return self.name or f"{self.preset}-{self.algorithm}-seed{self.seed}"

    def check(self) -> None:
        """Raise ValueError for a setting out of range, or settings that can't go together."""
        super().check()
        if self.num_generations < 2 and self.advantage in GROUPED:
            raise ValueError(f"advantage {self.advantage!r} compares completions of a prompt: num_generations >= 2.")
        if self.surrogate == "reinforce" and self.inner_epochs * self.minibatches > 1:
            raise ValueError("surrogate 'reinforce' has no importance ratio: use inner_epochs 1 and minibatches 1.")
        if self.minibatches > self.rows:
            raise ValueError(f"minibatches ({self.minibatches}) must not exceed the rows of a step ({self.rows}).")
        if self.shard and self.lora_rank:
            raise ValueError(
                "--shard splits weights that learn, and with an adapter few do: leave out --shard or --lora-rank."
            )
        if self.judge is not None:
            name, address = model_and_address(self.judge)
            if not (name and address):
                raise ValueError("A judge needs a model and an address: --judge MODEL@http://HOST:PORT/v1.")
            if any(sign in address for sign in "@?#"):  # the config is saved
                raise ValueError("judge has no user, password or query: the key is in RLCOURSE_JUDGE_KEY.")
        if self.cache_gb and (self.engine not in ("fast", "vllm") or self.device == "cpu"):
            raise ValueError("A paged cache is for the engines fast and vllm on a GPU: leave out --cache-gb.")
        if self.engine == "vllm" and self.device == "cpu":
            raise ValueError("The engine vllm needs an NVIDIA GPU: use --engine fast or hf-dynamic.")
        engine, server = model_and_address(self.engine)
        if engine not in ENGINES or (server and engine != "vllm"):
            raise ValueError(f"Unknown engine {shown(self.engine)}: use {', '.join(ENGINES)} or vllm@http://HOST:PORT.")
        if server and (self.cache_gb or self.sleep):
            raise ValueError("A vLLM server has its own cache: leave out --cache-gb and --sleep.")


def make_config(preset: str = "laptop", **overrides: Any) -> TrainConfig:
    """A checked config: a preset, overridden by its algorithm's switches, overridden by `overrides`. Raises ValueError,
    in one sentence, for an unknown preset, algorithm, field or choice, or a value out of range."""
    settings = TrainConfig.check_settings({"preset": preset} | overrides)
    algorithm = (PRESETS[preset] | settings).get("algorithm", TrainConfig.algorithm)
    config = TrainConfig(**PRESETS[preset] | ALGORITHMS[algorithm] | settings)
    config.check()
    return config
