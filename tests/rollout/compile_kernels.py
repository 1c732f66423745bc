"""Compiles the kernels of a decode step for a GPU that need not be there, and prints what each needs, as JSON.

`python compile_kernels.py CAPABILITY ROWS [SHAPE]`, for example 86 64 qwen3-0.6b; with `attention` or `rest` instead
of ROWS, those of the training pass and of a paged cache's prefill. test_kernels_compile.py runs it in a process
of its own, since in the tests kernels are those of Triton's interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlcourse.exact import EXACT, KEYS, VOCABULARY_TILE, backward_kernels, pass_kernels
from rlcourse.exact.layers import COLUMNS, OF_KEYS, OF_QUERIES, QUERIES
from rlcourse.exact.products import share_of
from rlcourse.rollout import tiles, triton_attention, triton_kernels, triton_sample

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 896, 4864, 14, 2, 64, 151936  # Qwen2.5-0.5B
SHAPES = {  # hidden, inner, heads, key-value heads, size of a head, vocabulary, bias, norm of queries and keys
    "qwen2.5-0.5b": (HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY, True, False),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, VOCABULARY, False, True),
}
SHARED, PROCESSORS = {86: 99, 90: 227}, {86: 80, 90: 132}  # kB that a block can have; of the GPU
POINTERS = {
    "token": "i64", "position": "i64", "x": "fp32", "squares": "fp32", "cos": "fp32", "sin": "fp32",
    "norm": "fp32", "inv_freq": "fp32", "q_norm": "fp32", "k_norm": "fp32", "partial": "fp32", "partial_acc": "fp32",
    "partial_ml": "fp32", "arrived": "i32", "seed": "i64", "eos": "i64", "max_new_tokens": "i64", "completion": "i64",
    "num_tokens": "i64", "done": "i1", "tokens": "i64", "logprobs": "fp32", "tile_max": "fp32", "tile_sum": "fp32",
    "lengths": "i64", "next_completion": "i64", "num_completions": "i64", "num_generations": "i64",
    "prompt_lengths": "i64", "ended": "i1", "table": "i32", "pieces": "i64",
}  # fmt: skip
SCALARS = dict.fromkeys(("R", "V", "W", "L", "width", "eos_ids", "T", "length"), "i32")
SCALARS |= {f"stride_{name}": "i32" for name in ("kv", "block", "head")}
SCALARS |= dict.fromkeys(("eps", "scale", "inverse_temperature"), "fp32")
PASS_POINTERS = POINTERS | {"targets": "i64", "places": "i64", "copies": "i32"} | {
    name: "fp32"
    for name in (
        "weight", "first", "second", "lse", "delta", "log_mass", "beside", "dx", "partial_bias", "partial_q",
        "partial_k", "gradient", "scale",
    )
}  # fmt: skip
PASS_SCALARS = {"count": "i32", "longest": "i32", "N": "i32", "V": "i32", "eps": "fp32", "inverse_temperature": "fp32"}


def compiled(kernel, capability: int, options: dict, pointers=POINTERS, scalars=SCALARS, **constants):
    """A kernel for a GPU of `capability`; whatever is no constant has the type of the tables, or is bfloat16. Pointers
    and strides are multiples of 16, as in every launch: what is not known to be aligned is not loaded ahead."""
    signature, values = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = scalars.get(name) or "*" + pointers.get(name, "bf16")
    names = [n for n in kernel.arg_names if signature[n].startswith("*") or n.startswith("stride_")]
    aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=EXACT | options)


def needs(program) -> dict[str, int]:
    """Bytes of shared memory, registers of a thread, and bytes that it spills; whether it waits for the kernel before
    it, and so before it first writes (a race that no interpreter shows); whether it lets the next begin before that;
    whether a product begins with numbers from memory, to which the kernel adds it (that is a sum in another order)."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    ptx = program.asm["ptx"]
    wait, write = re.search(r"griddepcontrol\.wait", ptx), re.search(r"\b(st\.global|atom|red)\b", ptx)
    waits = bool(wait and write and wait.start() < write.start())
    next_begins = re.search(r"griddepcontrol\.launch_dependents", ptx)
    early = bool(wait and next_begins and next_begins.start() < wait.start())
    resources = {"shared": program.metadata.shared, "registers": int(registers), "spilled": int(spilled)}
    return resources | {"waits": waits, "early": early, "added into": added_into(program.asm["ttir"])}


def added_into(ttir: str) -> bool:
    """Whether a product's sums do not begin with zeros, or with what a loop hands on, but with numbers loaded."""
    for product in re.finditer(r"tt\.dot %\S+, %\S+, (%\w+)", ttir):
        *_, made_by = re.findall(rf"{product[1]} = (\S+)", ttir[: product.start()])
        if made_by == "tt.load":
            return True
    return False


def attention_of_pass(capability: int) -> dict:
    """Programs of the training pass's attention, its gradients, and attention over a paged cache, by a head's size."""
    found = {}
    for name, size, warps in (("of 32", 32, 4), ("of 64", 64, 4), ("of 128", 128, 8)):
        options, scalars = {"num_warps": warps, "num_stages": 2}, PASS_SCALARS | {"scale": "fp32"}
        sizes = {"H": HEADS, "K": KV_HEADS, "D": size, "BM": QUERIES, "KEYS": KEYS}
        found[name] = compiled(pass_kernels.attention_kernel, capability, options, PASS_POINTERS, scalars, **sizes)
        found[f"{name}, paged"] = compiled(triton_attention.prefill_attention_kernel, capability, options, **sizes)
        gradients = {"queries": backward_kernels.query_gradient_kernel, "keys": backward_kernels.key_gradient_kernel}
        sizes = {"H": HEADS, "K": KV_HEADS, "D": size}
        for what, kernel in gradients.items():
            tile = dict(OF_QUERIES if what == "queries" else OF_KEYS)
            sizes |= {"BM": tile.pop("BM"), "BN": tile.pop("BN")}
            options = tile | {"enable_fp_fusion": True}
            found[f"{name}, {what}"] = compiled(kernel, capability, options, PASS_POINTERS, scalars, **sizes)
    return found


def rest_of_pass(capability: int) -> dict:
    """Programs of the training pass and its gradients, those of heads with a bias, with norms and with neither."""
    found, d = {}, {"d": HIDDEN}
    row, columns = d | {"B": triton.next_power_of_2(HIDDEN)}, d | {"inner": INNER, "B": COLUMNS}
    count = -(-VOCABULARY // VOCABULARY_TILE)
    tiles = d | {"TILES": count, "B": triton.next_power_of_2(count)}

    def add(name: str, kernel, backward: bool = False, **constants) -> None:
        options = {"enable_fp_fusion": True} if backward else {}
        found[name] = compiled(kernel, capability, options, PASS_POINTERS, PASS_SCALARS, **constants)

    add("norm", pass_kernels.norm_kernel, **row)
    add("swiglu", pass_kernels.swiglu_kernel, **columns)
    add("scale", pass_kernels.scale_kernel, **d)
    add("add up", pass_kernels.add_up_kernel, B=1024)
    add("logprob", pass_kernels.logprob_kernel, **tiles)
    add("norm, backward", backward_kernels.norm_backward_kernel, True, **row)
    add("swiglu, backward", backward_kernels.swiglu_backward_kernel, True, **columns)
    add("logits, backward", backward_kernels.logit_gradient_kernel, True, **d, B=VOCABULARY_TILE)
    qwen2 = d | {"H": HEADS, "K": KV_HEADS, "D": HEAD, "B": 32, "HAS_BIAS": True, "HAS_NORM": False}
    qwen3 = {"d": 1024, "H": 16, "K": 8, "D": 128, "B": 32, "HAS_BIAS": False, "HAS_NORM": True}  # Qwen3-0.6B
    llama = {"d": 2048, "H": 32, "K": 8, "D": 64, "B": 64, "HAS_BIAS": False, "HAS_NORM": False}  # Llama-3.2-1B
    for name, sizes in (("bias", qwen2), ("norms", qwen3), ("neither", llama)):
        levels = (sizes["D"] // 2).bit_length() - 1
        add(f"heads, {name}", pass_kernels.rope_kernel, **sizes, LEVELS=levels)
        add(f"heads, {name}, backward", backward_kernels.rope_backward_kernel, True, **sizes)
    return found


def step(capability: int, rows: int, shape: str) -> dict:
    """Programs of a decode step."""
    hidden, inner, heads, kv_heads, head, vocabulary, bias, normed = SHAPES[shape]
    config = tiles.tiles_for(rows, SHARED[capability] * 1024, PROCESSORS[capability], hidden, inner, head, normed)
    pdl = {"PDL": capability >= 90}

    def product(p: tiles.MatmulTile, depth: int, pair: bool = False) -> tuple[dict, dict]:
        options = tiles.launch_options(p, depth, pair)
        return options, {"BM": p.rows, "BK": p.depth, "PRELOADED": options.pop("PRELOADED")} | pdl

    model = {"H": heads, "K": kv_heads, "D": head}
    sizes = {"d": hidden, "B": triton.next_power_of_2(hidden)} | pdl
    found = {"embed": compiled(triton_kernels.embed_kernel, capability, {}, **sizes)}
    options, constants = product(config.qkv, hidden, pair=True)
    constants |= {"BN": config.qkv.columns, "HAS_BIAS": bias, "HAS_NORM": normed, "d": hidden} | model
    constants |= {"LEVELS": (head // 2).bit_length() - 1, "BLOCK": KEYS}
    found["qkv"] = compiled(triton_kernels.qkv_kernel, capability, options, **constants)
    tile = tiles.attention_tile(rows, kv_heads, head, SHARED[capability] * 1024)
    sizes = {"SPLITS": tile.splits, "KEYS": KEYS} | pdl | model
    options = {"num_warps": 4, "num_stages": tile.stages}
    found["attention"] = compiled(triton_attention.attention_kernel, capability, options, **sizes)
    for name, p, depth in (("out", config.out, heads * head), ("down", config.down, inner)):
        share = share_of(depth) if name == "down" else depth
        options, constants = product(p, share)
        shares = min(p.shares, -(-depth // share))
        sizes = {"N": hidden, "KD": depth, "SHARE": share, "SHARES": shares, "BN": p.columns}
        sizes |= {"SPLITS": -(-depth // share // shares)}
        found[name] = compiled(triton_kernels.add_kernel, capability, options, **constants, **sizes)
    p = config.gate_up
    options, constants = product(p, hidden, pair=True)
    sizes = {"inner": inner, "d": hidden, "BN": p.columns, "BX": p.more}
    found["gate_up"] = compiled(triton_kernels.gate_up_kernel, capability, options, **constants, **sizes)
    count = -(-vocabulary // VOCABULARY_TILE)
    sample = {"BN": VOCABULARY_TILE, "TILES": count, "d": hidden} | pdl
    found["tile"] = compiled(pass_kernels.mass_kernel, capability, {"num_warps": 1}, **sample)
    ends = {"B": triton.next_power_of_2(count), "E": 2, "GREEDY": False}
    found["pick"] = compiled(triton_sample.pick_kernel, capability, {}, **sample, **ends)
    found["refill"] = compiled(triton_sample.refill_kernel, capability, {}, B=rows, **pdl)
    return found


def main(capability: int, which: str, shape: str = "qwen2.5-0.5b") -> None:
    kinds = {"attention": attention_of_pass, "rest": rest_of_pass}
    found = kinds[which](capability) if which in kinds else step(capability, int(which), shape)
    print(json.dumps({name: needs(program) for name, program in found.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
