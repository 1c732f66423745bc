"""What a cache that is smaller than all completions at full length gives where they differ in length."""

import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlcourse.batch import Rollout
from rlcourse.config import make_config
from rlcourse.device import find_device
from rlcourse.measure.timing import measure, seconds
from rlcourse.policy import Policy, load_policy
from rlcourse.rollout import make_engine, vllm
from rlcourse.rollout.gpu_engine import GPUEngine
from rlcourse.rollout.scheduler import Plan
from rlcourse.sampling import Sampling
from rlcourse.tasks import load_task
from tools.bench.decode import GROUP, random_prompts, skewed
from tools.bench.models import write_random_model
from tools.bench.peers import vllm_decode
from tools.bench.results import Rows, median_and_spread

COMPLETIONS, LONGEST = 1024, 2048  # of the skewed part, and tokens of each at most
MEDIAN = 300
FULL = 256  # completions of full length that the budget has room for
DTYPE = torch.bfloat16


class Watched(GPUEngine):
    """Keeps the plans of its last rollout."""

    plans: list[Plan]

    def generate(self, *arguments) -> Rollout:
        self.plans = []
        return super().generate(*arguments)

    def _run(self, plan: Plan, *arguments):
        self.plans.append(plan)
        return super()._run(plan, *arguments)


def paged(shape: str, prompt_tokens: int = 128, repeats: int = 5) -> tuple[dict[str, Any], Rows]:
    """(setup, rows). `COMPLETIONS` answers of up to `LONGEST` tokens with median `MEDIAN`, `GROUP` of a prompt, in the
    memory of `FULL` of full length: "unpaged" decodes so many at once, as runs do without a budget; "paged" as many as
    have blocks. differ: answers that are not those of "unpaged", log-probs included. vLLM, where it is, has the same
    budget and answers as long.

    Raises ValueError where our kernels do not run.
    """
    device = find_device(make_config())
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(shape, load_task("minigsm"), Path(folder))
        policy = load_policy(folder, device)
        make_engine(policy, "fast", DTYPE, cache_gb=_budget(policy, prompt_tokens))  # refuses a machine at once
        found, lengths = _skewed(policy, prompt_tokens, repeats)
        if vllm.runs_on(device):  # last: it has settings of its own
            found.append(_vllm(folder, policy, prompt_tokens, lengths, repeats))
    setup = {"shape": shape, "dtype": "bfloat16", "rows_a_prompt": GROUP, "temperature": 1.0, "repeats": repeats}
    setup |= {"prompt_tokens": prompt_tokens, "longest": LONGEST, "median": MEDIAN}
    return setup | {"budget_gb": _budget(policy, prompt_tokens)}, found


def _budget(policy: Policy, prompt_tokens: int) -> float:
    """GB of a cache for `FULL` completions of full length."""
    config = policy.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = config.num_hidden_layers * 2 * config.num_key_value_heads * size * 2
    return FULL * (prompt_tokens + LONGEST) * token / 1e9


def _skewed(policy: Policy, prompt_tokens: int, repeats: int) -> tuple[Rows, list[int]]:
    """The rows, and how long the answers are."""
    vocabulary = policy.model.config.vocab_size
    policy = dataclasses.replace(policy, eos_ids=skewed(vocabulary, MEDIAN))
    prompts = random_prompts(COMPLETIONS, prompt_tokens, vocabulary)
    found, first = [], None
    for variant, budget in (("unpaged", 0.0), ("paged", _budget(policy, prompt_tokens))):
        engine = Watched(policy, DTYPE, budget, max_slots=None if budget else FULL)
        row, rollout = _time(engine, policy, prompts, LONGEST, repeats)
        first = first or rollout
        found.append({"variant": variant, "lengths": "skewed", "rows": COMPLETIONS} | row | _differ(rollout, first))
        steps = sum(plan.steps for plan in engine.plans)
        tokens = int(rollout.completion_lengths.sum()) - COMPLETIONS  # the first ones come from prefill
        back = sum(after.admitted < before.admitted for before, after in itertools.pairwise(engine.plans))
        found[-1] |= {"rows_at_once": tokens / steps, "sent_back": back}
        engine.sleep()
    return found, first.completion_lengths.tolist()


def _vllm(folder: str, policy: Policy, prompt_tokens: int, lengths: list[int], repeats: int) -> dict[str, Any]:
    """vLLM on the same requests, with a cache of the same size."""
    prompts = random_prompts(COMPLETIONS, prompt_tokens, policy.model.config.vocab_size)
    sizes = {"max_num_seqs": COMPLETIONS, "max_model_len": prompt_tokens + LONGEST}
    sizes["kv_cache_memory_bytes"] = int(_budget(policy, prompt_tokens) * 1e9)
    row = vllm_decode("vllm-v2", folder, prompts, lengths, sizes, repeats)
    return {"variant": "vllm", "lengths": "skewed", "rows": COMPLETIONS, "tokens": sum(lengths)} | row


def _time(
    engine: GPUEngine, policy: Policy, prompts: list[list[int]], new_tokens: int, repeats: int
) -> tuple[dict[str, float], Rollout]:
    """Speed of rollouts that are all the same, and the last of them. To the engine the weights are new each time, as in
    training: it takes them over, and finds no prompt of an earlier rollout in its cache."""
    done = []

    def generate() -> None:
        torch.manual_seed(0)
        done[:] = [engine.generate(prompts, GROUP, new_tokens, Sampling())]

    def run() -> float:
        engine.weights.sync(policy.model)
        return seconds(generate, policy.device)

    took, spread = median_and_spread(measure(run, repeats, warmup=2))
    tokens = int(done[0].completion_lengths.sum())
    return {"seconds": took, "tokens_per_s": tokens / took, "tokens": tokens, "spread": spread}, done[0]


def _differ(found: Rollout, expected: Rollout) -> dict[str, int]:
    if found.logprobs.shape != expected.logprobs.shape:
        return {"differ": len(expected.finished)}
    same = (found.completion_ids == expected.completion_ids) & (found.logprobs == expected.logprobs)
    lengths = found.completion_lengths == expected.completion_lengths
    return {"differ": int((~(lengths & (same | ~expected.completion_mask).all(1))).sum())}
