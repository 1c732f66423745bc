"""What bitwise-equal log-probs change: training with them, and with the train-inference mismatch put back."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from rlcourse.batch import Rollout
from rlcourse.config import TrainConfig, make_config
from rlcourse.logprobs import PlainPass
from rlcourse.rollout import make_engine
from rlcourse.sampling import Sampling
from rlcourse.train import Trainer
from tools.bench.learn import one_run
from tools.bench.results import Rows

SEEDS = (0, 1, 2)
LOSS_SCALE = 2.0**14  # float16 has nothing below 6e-8, and a token's share of the gradient is often less
ONE, OWN, TWO, HALF = "bitwise-equal", "separate, recomputed", "separate", "separate, float16"
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # what is trained, and with which kernels
    "dr_grpo, 1 update": ({"algorithm": "dr_grpo"}, (ONE, TWO)),
    "dr_grpo, 8 updates": ({"algorithm": "dr_grpo", "minibatches": 8}, (ONE, OWN, TWO)),
    "gspo, 2 updates": ({"algorithm": "gspo"}, (ONE, OWN, TWO, HALF)),
    "gspo, 8 updates": ({"algorithm": "gspo", "minibatches": 8}, (ONE, OWN, TWO, HALF)),
}


def gap(config: TrainConfig) -> tuple[dict[str, Any], Rows]:
    """Accuracy, clipped tokens and the gap of the embedded model, with three seeds: bitwise-equal; with
    transformers' layers in the trainer ("separate"), whose ratio compares them with the sampler's log-probs, or with
    their own ("recomputed"); and with the former in float16. config: steps and size of the evaluation. There is
    no gap in a row where the sampler's log-probs are the old ones of several updates: nothing computes others.

    Raises ValueError on a GPU where sampler and trainer are not known to agree.
    """
    common = {
        "dtype": "bfloat16",
        "steps": config.steps,
        "eval_problems": min(config.eval_problems, 500),
        "eval_every": 0,
        "pass_k": 0,
        "save_every": 0,
    }
    rows: Rows = []
    for (name, (settings, ways)), seed in itertools.product(SETTINGS.items(), SEEDS):
        for way in ways:
            row = {"variant": f"{name}, {way}", "seed": seed}
            try:
                row |= one_run(common | settings | {"seed": seed}, lambda trainer, way=way: put_back(trainer, way))
            except RuntimeError as error:  # of a kernel, say: the other ways still tell something
                row |= {"error": f"{type(error).__name__}: {error}"[:200]}
            if way in (TWO, HALF) and make_config(**settings).minibatches > 1:
                row |= {"mismatch_mean": None, "mismatch_max": None}
            rows.append(row)
            Console(width=200).print(row, highlight=False)
    return {"model": "embedded", "task": "minigsm"} | common, rows


def put_back(trainer: Trainer, way: str) -> None:
    """Have the trainer compute log-probs in one of the ways that `gap` compares."""
    if not (trainer.engine.exact and trainer.learner.exact):
        raise ValueError("Sampler and trainer agree only on Hopper in 16 bits: measure `mismatch` instead.")
    if way == ONE:
        return
    model, dtype = trainer.policy.model, trainer.config.dtype
    if way == HALF:
        trainer.engine = make_engine(trainer.policy, "fast", torch.float16)
        dtype = "float16"
    trainer.learner.policy_pass = ApartPass(model, dtype, exact=way != OWN)


class ApartPass(PlainPass):
    """transformers' layers, whose numbers are not the engine's. exact: pass for exact all the same, so that the
    importance ratio is taken against the sampler's log-probs."""

    def __init__(self, model: torch.nn.Module, dtype: str, exact: bool):
        super().__init__(model, dtype)
        self.exact = exact
        if dtype == "float16":
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient / LOSS_SCALE)

    def token_logprobs(self, rollout: Rollout, sampling: Sampling, chunk: int) -> tuple[Tensor, Tensor]:
        """See `PlainPass`. In float16 the gradient passes the layers times `LOSS_SCALE`."""
        logprobs, hidden = super().token_logprobs(rollout, sampling, chunk)
        if self.dtype == "float16" and logprobs.requires_grad:
            logprobs.register_hook(lambda gradient: gradient * LOSS_SCALE)
        return logprobs, hidden

    @contextmanager
    def _as_asked(self) -> Iterator[None]:
        if self.dtype != "float16":
            with super()._as_asked():
                yield
            return
        with torch.autocast(self.model.device.type, torch.float16, cache_enabled=False):
            yield
