"""Peers on the same model folder, prompts and shapes: TRL's GRPO step, vLLM's decoding."""

import contextlib
import functools
import importlib.util
import itertools
import os
import random
import tempfile
import time
from pathlib import Path

import torch

from rlcourse.config import make_config
from rlcourse.device import find_device, without_cudnn_attention
from rlcourse.measure.timing import measure, seconds
from rlcourse.policy import load_policy
from rlcourse.rollout.vllm import free_memory, new_llm, runs_on, sampling_params
from rlcourse.sampling import Sampling
from rlcourse.tasks import Task, load_task
from tools.bench.decode import GROUP, MEDIAN, ROUNDS, random_prompts, skewed_share
from tools.bench.models import SHAPES, write_random_model
from tools.bench.options import Options
from tools.bench.results import Results, median_and_spread


def beside(what: str, options: Options, results: Results) -> None:
    """Measure TRL's step, or vLLM's decoding, on the model and prompts of ours, into the same results."""
    shape, repeats, new_tokens = options.shape, options.repeats, options.new_tokens
    if shape == "embedded":
        return
    task = load_task("gsm8k" if what == "step" and shape != "tiny" else "minigsm")
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(shape, task, Path(folder))
        for variant, count in itertools.product(trl_variants() if what == "step" else (), options.rows):
            run = folder, task, count, new_tokens, repeats, variant
            results.measure({"variant": variant, "rows": count}, trl_step, *run)
        variants = VLLM if what == "decode" and runs_on(find_device(make_config())) else ()
        for variant, count in itertools.product(variants, options.rows):
            row = {"variant": variant, "rows": count, "prompt_tokens": options.prompt_tokens, "new_tokens": new_tokens}
            rounds = 1 if options.lengths == "equal" else ROUNDS
            prompts = random_prompts(count * rounds, options.prompt_tokens, SHAPES[shape].vocabulary)
            answers = answer_lengths(GROUP * len(prompts), new_tokens, options.lengths)
            sizes = {"max_num_seqs": count, "max_model_len": options.prompt_tokens + new_tokens}
            results.measure(row, vllm_decode, variant, folder, prompts, answers, sizes, repeats)


def answer_lengths(answers: int, new_tokens: int, lengths: str) -> list[int]:
    """Tokens of each answer for an engine that is told them: all `new_tokens`, or drawn as `skewed` makes them."""
    if lengths == "equal":
        return [new_tokens] * answers
    generator = torch.Generator().manual_seed(2)
    drawn = torch.empty(answers).geometric_(skewed_share(MEDIAN), generator=generator)
    return drawn.clamp(max=new_tokens).int().tolist()


def trl_variants() -> list[str]:
    """TRL's default (dynamic cache), the same with the layers of the update compiled, its static cache with the decode
    step compiled, and TRL with vLLM in its process, where that is; none where TRL is missing."""
    if importlib.util.find_spec("trl") is None:
        return []
    with_vllm = ["trl-vllm"] if runs_on(find_device(make_config())) else []
    return ["trl-default", "trl-update-compiled", "trl-static-compiled", *with_vllm]


def trl_step(
    model: str, task: Task, completions: int, new_tokens: int, repeats: int, variant: str
) -> dict[str, float | None]:
    """Seconds of TRL's step and its phases, and its peak memory.

    Weights and optimizer are bfloat16, as TRL loads this checkpoint: less work than our float32 weights. vLLM's cache
    counts as peak memory, and is as large as it is allowed.
    """
    growing = variant in ("trl-default", "trl-update-compiled")
    # Of a growing cache, cuDNN would plan anew for each length.
    with without_cudnn_attention() if growing else contextlib.nullcontext():
        timed = run_trl(model, task, completions, new_tokens, 2 + repeats, variant)[2:]  # two that compile
    step_s, spread = median_and_spread([t["step_s"] for t in timed])
    rollout_s = median_and_spread([t["rollout_s"] for t in timed])[0]
    return {
        "step_s": step_s,
        "rollout_s": rollout_s,
        "update_s": step_s - rollout_s,
        "spread": spread,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def run_trl(model: str, task: Task, completions: int, new_tokens: int, steps: int, variant: str) -> list[dict]:
    """Seconds of each step and of its generation, from TRL's own trainer."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    static, with_vllm = variant == "trl-static-compiled", variant == "trl-vllm"
    policy = load_policy(model)
    prompts = [policy.tokenizer.decode(task.prompt(p, policy)) for p in task.problems("train")]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=completions,
            num_generations=8,
            max_completion_length=new_tokens,
            max_steps=steps,
            loss_type="dr_grpo",
            scale_rewards="none",
            beta=0.0,
            temperature=1.0,
            top_k=0,
            learning_rate=1e-6,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            cache_implementation="static" if static else None,
            use_vllm=with_vllm,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=1,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if on_gpu else torch.float32),
            reward_funcs=lambda completions, **_: [random.random() for _ in completions],
            args=arguments,
            # A fingerprint of our own, as datasets cannot hash a table with every pyarrow.
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts[:512]}), fingerprint="prompts"),
            processing_class=policy.tokenizer,
        )
        if static and on_gpu:
            trainer.generation_config.disable_compile = False  # TRL sets it, so its static cache is not compiled
            trainer.generation_config.max_cache_len = 320 + new_tokens
        if variant == "trl-update-compiled":
            _compile_update(trainer)
        timed = _timed_training(trainer, on_gpu)
        del trainer
        if with_vllm:
            free_memory()
        return timed


def _compile_update(trainer) -> None:
    """Compute the loss with `torch.compile` of each layer, as they have one code: the whole model takes minutes."""
    layers, loss = trainer.model.model.layers, trainer._compute_loss
    compiled = [torch.compile(layer.forward, dynamic=True) for layer in layers]

    def with_compiled(model, inputs):
        for layer, forward in zip(layers, compiled, strict=True):
            layer.forward = forward
        try:
            return loss(model, inputs)
        finally:  # sampling has shapes of its own
            for layer in layers:
                del layer.forward

    trainer._compute_loss = with_compiled


def _timed_training(trainer, on_gpu: bool) -> list[dict[str, float]]:
    from transformers import TrainerCallback

    steps: list[dict[str, float]] = []

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            steps.append({"start": now(), "rollout_s": 0.0})

        def on_step_end(self, *_, **__):
            steps[-1]["step_s"] = now() - steps[-1]["start"]

    generate = trainer._generate_single_turn

    def timed_generate(*args, **kwargs):
        start = now()
        result = generate(*args, **kwargs)
        steps[-1]["rollout_s"] += now() - start
        return result

    trainer._generate_single_turn = timed_generate
    trainer.add_callback(Clock())
    trainer.train()
    return steps


# vLLM's settings by variant: its model runner, and whether it runs in a process of its own.
VLLM = {"vllm": ("1", False), "vllm-v2": ("2", False), "vllm-v2-process": ("2", True)}


def vllm_decode(
    variant: str, model: str, prompts: list[list[int]], lengths: list[int], sizes: dict[str, int], repeats: int
) -> dict[str, float]:
    """Speed of vLLM.

    variant: of `VLLM`. lengths: tokens of each answer, those of the first prompt first. sizes: how many sequences at
    once, and the longest; vLLM's settings. vLLM stops at the lengths and looks for no token that ends an answer: a
    thousand such tokens, which ours has for skewed lengths, it would look through one by one on the host. Prompts are
    as if never seen: each repetition begins with an empty prefix cache, as after an update of the weights.
    """
    runner, own_process = VLLM[variant]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "2"))
    llm = new_llm(model, torch.bfloat16, own_process, gpu_memory_utilization=0.3, **sizes)
    group = len(lengths) // len(prompts)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(group)]
    params = [sampling_params(Sampling(), length) for length in lengths]
    tokens = []

    def generate(llm) -> None:
        outputs = llm.generate(inputs, params, use_tqdm=False)
        tokens.append(sum(len(output.outputs[0].token_ids) for output in outputs))

    def timed(llm) -> float:
        llm.reset_prefix_cache()
        return seconds(lambda: generate(llm), torch.device("cuda"))

    took, spread = median_and_spread(measure(functools.partial(timed, llm), repeats))
    del llm  # its memory, for the next
    free_memory()
    return {"tokens_per_s": tokens[-1] / took, "tokens_a_row": tokens[-1] / len(lengths), "spread": spread}
