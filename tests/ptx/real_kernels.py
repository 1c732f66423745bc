"""Real kernels, once compiled from CuTe DSL and kept as they were, run over small inputs and compared with NumPy."""

import re
import struct
from pathlib import Path

import numpy as np

from ptx_interpreter import Memory, parse, run
from ptx_interpreter.formats import bf16_to_float32, float32_to_bf16


def text_of(name: str) -> str:
    return (Path(__file__).parent / "kernels" / f"{name}.ptx").read_text()


def shared_bytes(text: str) -> int:
    return int(re.search(r"; (\d+) bytes of shared memory", text)[1])


def bf16(rng, *shape):
    """Random bf16 numbers: their raw bits, and their values as float64."""
    raw = float32_to_bf16(rng.standard_normal(shape).astype(np.float32))
    return raw, bf16_to_float32(raw).astype(np.float64)


def tensor(address: int, *sizes: int, strides: tuple[int, ...] = ()) -> bytes:
    """A tensor among a kernel's parameters: its address, its unknown sizes, its unknown strides."""
    packed = struct.pack(f"<Q{len(sizes)}i", address, *sizes)
    packed += bytes(-len(packed) % 8)
    return packed + struct.pack(f"<{len(strides)}q", *strides)


def check_product(text: str, **order):
    """c [64, 64] = a [64, 32] @ b [64, 32]^T."""
    rng, memory = np.random.default_rng(1), Memory()
    (a, a_values), (b, b_values) = bf16(rng, 64, 32), bf16(rng, 64, 32)
    addresses = memory.place("a", a), memory.place("b", b)
    c = memory.place("c", np.zeros((64, 64), np.float32), initialised=False)
    report = run(parse(text)[0], 1, 64, struct.pack("<3Q", *addresses, c), memory, shared_bytes(text), **order)
    assert memory.initialised("c").all()
    np.testing.assert_allclose(memory.read("c"), a_values @ b_values.T, atol=1e-4)
    return memory.read("c"), report


def check_decode_attention(text: str, **order):
    """Attention of one query for 8 heads, 2 key-value heads of size 64, over the tokens up to `position`; 2 splits."""
    rng, memory = np.random.default_rng(2), Memory()
    rows, slots, position = 3, 160, np.array([150, 0, 99])
    (q, q_values), (k, keys), (v, values) = (bf16(rng, rows, n, 64) for n in (8, 2 * slots, 2 * slots))
    keys, values = (x.reshape(rows, 2, slots, 64) for x in (keys, values))
    written = np.broadcast_to(np.arange(slots)[:, None] <= position[:, None, None, None], keys.shape)
    pieces = rows * 2 * 2
    q_at = memory.place("q", q)
    k_at, v_at = (memory.place(n, x.reshape(keys.shape), initialised=written) for n, x in (("k", k), ("v", v)))
    position_at, out = memory.place("position", position), memory.place("out", np.zeros_like(q), initialised=False)
    mixed = memory.place("mixed", np.zeros((pieces, 8, 64), np.float32), initialised=False)
    masses = memory.place("masses", np.zeros((pieces, 2, 8), np.float32), initialised=False)
    arrived = memory.place("arrived", np.zeros(pieces, np.int32))
    cache = {"strides": (2 * slots * 64, slots * 64)}
    params = tensor(q_at, rows, strides=(512,)) + tensor(k_at, rows, slots, **cache)
    params += tensor(v_at, rows, slots, **cache) + tensor(position_at, rows, strides=(1,)) + tensor(out, rows)
    params += tensor(mixed, pieces) + tensor(masses, pieces) + tensor(arrived, pieces)
    report = run(parse(text)[0], (2, 2, rows), 128, params, memory, shared_bytes(text), **order)
    assert memory.initialised("out").all() and not memory.read("arrived").any()
    expected = np.empty((rows, 8, 64))
    for row in range(rows):
        for head in range(8):
            seen = slice(0, position[row] + 1)
            scores = keys[row, head // 4, seen] @ q_values[row, head] / 8
            weights = np.exp(scores - scores.max())
            expected[row, head] = weights / weights.sum() @ values[row, head // 4, seen]
    np.testing.assert_allclose(bf16_to_float32(memory.read("out")), expected, atol=0.02)
    return memory.read("out"), report


CHECKS = {"product": check_product, "decode_attention": check_decode_attention}
