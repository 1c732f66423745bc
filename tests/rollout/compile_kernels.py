"""Compiles the Triton kernels of the engine and of the training pass for a GPU that need not be there, as each is
launched, over tensors without memory; prints what each needs, as JSON. `python compile_kernels.py CAPABILITY ROWS
SHAPE`, for example 86 64 qwen3. test_kernels_compile.py runs it in a process of its own, since in the tests kernels are
those of Triton's interpreter."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[1]))

from steps import new_step
from transformers import AutoConfig, AutoModelForCausalLM

from rlcourse.exact import EXACT, head
from rlcourse.exact.layers import trunk
from rlcourse.exact.sequences import Sequences
from rlcourse.exact.weights import FusedWeights
from rlcourse.rollout.prefill import prefill_pieces
from rlcourse.sampling import Sampling

SHAPES = {  # hidden, inner, heads, key-value heads, size of a head, vocabulary
    "qwen2": (896, 4864, 14, 2, 64, 151936),  # Qwen2.5-0.5B
    "qwen3": (1024, 3072, 16, 8, 128, 151936),  # Qwen3-0.6B
    "llama": (2048, 8192, 32, 8, 64, 128256),  # Llama-3.2-1B
    "small": (128, 320, 4, 2, 32, 2048),  # a Llama with heads of 32
}
SIZES = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"
SHARED, PROCESSORS = {86: 99, 90: 227}, {86: 80, 90: 132}  # kB that a block can have; of the GPU
META = torch.device("meta")
found: dict[str, object] = {}  # programs


def compile_only(target: GPUTarget) -> None:
    """A kernel that is launched is compiled for `target` and kept, and doesn't run."""
    run = JITFunction.run
    here = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    triton.runtime.driver.set_active(SimpleNamespace(**here, get_current_target=lambda: target))

    def compiled(kernel, *arguments, grid, warmup, **options):
        program = run(kernel, *arguments, grid=grid, warmup=True, **options)
        if program not in found.values():
            found[f"{kernel.fn.__name__} {sum(name.startswith(kernel.fn.__name__) for name in found)}"] = program

    JITFunction.run = compiled


def launch(capability: int, rows: int, shape: str) -> None:
    """Every kernel of a decode step, of prefill, and of the training pass and its gradients, once."""
    kind = "llama" if shape == "small" else shape
    sizes = dict(zip(SIZES, SHAPES[shape], strict=True))
    with META:
        config = AutoConfig.for_model(kind, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
        model = AutoModelForCausalLM.from_config(config)
    weights = FusedWeights(model, torch.bfloat16)
    step = new_step(weights, rows, 512)
    step.shared, step.processors = SHARED[capability] * 1024, PROCESSORS[capability]
    step.launch = ({"PDL": True, "launch_pdl": True} if capability >= 90 else {"PDL": False}) | EXACT
    step(rows, Sampling())
    prefill_pieces(weights, step.slots, step.cache, torch.zeros(2, 4, dtype=torch.long, device=META), 64)
    ids = torch.zeros(64, dtype=torch.long, device=META)
    sequences = Sequences.of(torch.full((4,), 16), torch.zeros(4, dtype=torch.long), 64, META)
    x = trunk(model, weights, ids, sequences, False, None)
    logprobs = head.logprobs(model, weights, x, ids, Sampling(), 64)
    scaled = head.ScaledLogits.apply(x, weights, model.model.norm.weight, model.lm_head.weight)
    (logprobs.sum() + scaled.sum()).backward()


def needs(program) -> dict[str, int]:
    """Bytes of shared memory and those that a thread spills; whether it waits for the kernel before it, and so before
    it first writes (a race that no interpreter shows); whether it lets the next begin before that; whether a product
    begins with numbers from memory, to which the kernel adds it (that is a sum in another order)."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    ptx = program.asm["ptx"]
    wait, write = re.search(r"griddepcontrol\.wait", ptx), re.search(r"\b(st\.global|atom|red)\b", ptx)
    next_begins = re.search(r"griddepcontrol\.launch_dependents", ptx)
    return {
        "shared": program.metadata.shared,
        "spilled": int(re.search(r"STACK:(\d+)", text)[1]),
        "waits": bool(wait and write and wait.start() < write.start()),
        "early": bool(wait and next_begins and next_begins.start() < wait.start()),
        "added into": added_into(program.asm["ttir"]),
    }


def added_into(ttir: str) -> bool:
    """Whether a product's sums do not begin with zeros, or with what a loop hands on, but with numbers loaded."""
    for product in re.finditer(r"tt\.dot %\S+, %\S+, (%\w+)", ttir):
        *_, made_by = re.findall(rf"{product[1]} = (\S+)", ttir[: product.start()])
        if made_by == "tt.load":
            return True
    return False


if __name__ == "__main__":
    capability, rows, shape = sys.argv[1:]
    compile_only(GPUTarget("cuda", int(capability), 32))
    launch(int(capability), int(rows), shape)
    print(json.dumps({name: needs(program) for name, program in found.items()}))
