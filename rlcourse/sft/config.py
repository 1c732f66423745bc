"""Every setting of supervised fine-tuning in one dataclass. The defaults train the embedded model on a laptop."""

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rlcourse.config import TrainConfig
from rlcourse.settings import COUNT, COUNT_OR_NONE, SEED, Settings, setting
from rlcourse.tasks import TASKS, check_task_name


def is_task(data: str) -> bool:
    """Whether `data` names a task, one that ships or module:object."""
    try:
        check_task_name(data)
    except ValueError:
        return False
    return True


def same(name: str, default: Any = MISSING):
    """A field like that of `rlcourse train`, perhaps with another default."""
    theirs = TrainConfig.__dataclass_fields__[name]
    return field(default=theirs.default if default is MISSING else default, metadata=theirs.metadata)


@dataclass
class SFTConfig(Settings):
    command = "sft"
    shard = False  # one process
    panels: ClassVar = {
        "model": "Model and data",
        "lora_rank": "LoRA",
        "epochs": "Optimisation",
        "eval_every": "Evaluation",
        "seed": "The run",
    }

    model: str = same("model")
    data: str = setting(
        "minigsm",
        f"what is learned: the worked answers of a task ({', '.join(TASKS)}, or module:object), a file of JSON lines, "
        "or a data set on the hub; each line has messages, or prompt and answer",
    )
    subset: str | None = setting(None, "name of the part of a data set on the hub that has several")
    split: str = setting("train", "split of a data set on the hub")
    task: str | None = setting(
        None, "task whose validation problems are answered, too, named as for `rlcourse train`; by default that in data"
    )

    lora_rank: int = same("lora_rank")

    epochs: int = setting(1, "passes over the data", within=COUNT)
    steps: int | None = setting(None, "optimizer steps, instead of whole epochs", within=COUNT)
    batch_size: int = setting(64, "examples a step", within=COUNT)
    max_length: int = setting(256, "examples of more tokens are left out; also the width of a packed row", within=COUNT)
    packing: bool = setting(True, "put several examples in a row, each with its own positions and attention")
    micro_batch_tokens: int = same("micro_batch_tokens")
    lr: float = same("lr", 3e-4)
    schedule: str = same("schedule", "cosine")
    warmup_steps: int = same("warmup_steps", 5)
    gradient_checkpointing: bool = same("gradient_checkpointing")
    logprob_chunk: int = same("logprob_chunk")
    dtype: str = same("dtype")
    compile: bool = same("compile")
    device: str = same("device")

    eval_every: int = setting(20, "steps between evaluations; 0 for one before and one after", within=COUNT_OR_NONE)
    eval_examples: int = setting(
        200, "examples held out to measure the loss on, a tenth of them all at most; 0 for none", within=COUNT_OR_NONE
    )
    eval_problems: int = setting(
        200, "validation problems of the task answered greedily; 0 for none", within=COUNT_OR_NONE
    )
    max_new_tokens: int = setting(80, "tokens of such an answer at most", within=COUNT)

    seed: int = setting(0, "seed of the order of examples and of an adapter's first weights", within=SEED)
    output: str = same("output")
    name: str | None = setting(None, "name of the run; by default made of data and seed")
    save_every: int = same("save_every", 100)
    log_to: str = same("log_to")

    @property
    def run_name(self) -> str:
        return self.name or f"sft-{Path(self.data).stem}-seed{self.seed}"

    @property
    def evaluated_task(self) -> str | None:
        return self.task or (self.data if is_task(self.data) else None)

    @property
    def data_file(self) -> Path | None:
        """The file that `data` names, whether it exists or not; None for a task or a data set on the hub."""
        path = Path(self.data).expanduser()
        named = path.exists() or self.data.startswith((".", "/", "~")) or path.suffix in (".jsonl", ".json")
        return path if named and not is_task(self.data) else None

    def check(self) -> None:
        super().check()
        if self.task is not None:
            check_task_name(self.task)


def make_config(**settings: Any) -> SFTConfig:
    """A checked config. Raises ValueError, in one sentence, for an unknown setting, a value that cannot be, or a
    setting that another one leaves without effect."""
    config = SFTConfig(**SFTConfig.check_settings(settings))
    config.check()
    if config.steps and "epochs" in settings:
        raise ValueError("--steps ends a run whatever --epochs says: leave out one of them.")
    if not {"subset", "split"}.isdisjoint(settings) and (is_task(config.data) or config.data_file):
        raise ValueError("--subset and --split are for a data set on the hub: leave them out.")
    if not config.evaluated_task and not {"eval_problems", "max_new_tokens"}.isdisjoint(settings):
        raise ValueError("--eval-problems and --max-new-tokens are for the answers to a task: name one with --task.")
    return config
