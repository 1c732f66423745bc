"""Named sets of defaults for `--preset`; what a set does not name is as on a laptop, in `rlcourse/config.py`."""

from typing import Any

_GPU = {"dtype": "bfloat16", "lr": 1e-6, "steps": 200, "eval_every": 20, "eval_validation": 256}
# Without examples the model never writes `#### NUMBER`, so it earns nothing and learns nothing.
_GSM8K = _GPU | {"model": "Qwen/Qwen2.5-0.5B-Instruct", "task": "gsm8k", "examples": 2}
_GSM8K |= {"lr": 3e-6, "schedule": "linear", "steps": 350, "max_prompt_tokens": 512, "max_new_tokens": 256}
_GSM8K |= {"eval_every": 50, "eval_problems": 1319, "save_every": 200}
_LONG = {"max_new_tokens": 2048, "gradient_checkpointing": True, "sleep": True, "logprob_chunk": 16384, "pass_k": 4}

_A10G = {"compile": True, "micro_batch_tokens": 4096, "logprob_chunk": 1024, "gradient_checkpointing": True}
# More prompts per step, or none that taught nothing in the last epoch, get no further: the record gsm8k-settings.
_H200 = {"num_prompts": 32, "micro_batch_tokens": 32768, "logprob_chunk": 16384}
_H200["save_every"] = 500  # a run takes four minutes, and saves where it is stopped
_DEEPMATH = {"model": "Qwen/Qwen3-0.6B", "task": "math", "compile": True, "num_prompts": 32, "eval_problems": 500}
_DEEPMATH |= {"max_prompt_tokens": 512, "micro_batch_tokens": 40960}
_KERNELS = {"model": "embedded-kernels", "task": "kernels", "algorithm": "grpo", "lr": 1e-4, "steps": 240}
_KERNELS |= {"max_new_tokens": 64, "micro_batch_tokens": 8192, "save_every": 60}
_KERNELS |= {"eval_every": 60, "eval_validation": 100, "eval_problems": 300, "pass_k": 4}
# Level 1: 80 problems to train on.
_KERNELBENCH = {"model": "Qwen/Qwen3-0.6B", "task": "kernelbench", "algorithm": "grpo", "lora_rank": 32, "lr": 1e-5}
_KERNELBENCH |= {"num_prompts": 8, "max_prompt_tokens": 2048, "micro_batch_tokens": 32768}
_KERNELBENCH |= {"eval_every": 50, "eval_validation": 8, "eval_problems": 20}

PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {},
    "a10g": _GSM8K | _A10G,
    "h200": _GSM8K | _H200,
    "deepmath": _GPU | _LONG | _DEEPMATH,  # for a GPU as large as the H200, as is the last
    "kernels": _KERNELS,
    "kernelbench": _GPU | _LONG | _KERNELBENCH,
}
