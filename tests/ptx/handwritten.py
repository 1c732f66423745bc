"""Small PTX programs around a few instructions, for the tests of the interpreter."""

import struct

import numpy as np
import pytest

from ptx_interpreter import Memory, parse, run

HEAD = ".version 8.8\n.target sm_90\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p, %q, %p<9>;
    .reg .b16 %h, %h<9>;
    .reg .b32 %t, %u, %r<40>;
    .reg .b64 %l, %rd<20>;
    mov.u32 %t, %tid.x;
"""
ROOM = ".shared .align 16 .b8 room[512];\n"
OWN = "mov.u32 %r9, room; mad.lo.u32 %u, %t, 4, %r9;"  # %u: this thread's word of shared memory
X = np.zeros(64, np.float32)


def program(body: str, buffers=(), declared: str = "") -> str:
    """An entry that takes the addresses of `buffers`, which the body finds in registers of their names."""
    params = ", ".join(f".param .u64 param_{name}" for name in buffers)
    loads = "".join(f"    .reg .b64 %{n};\n    ld.param.u64 %{n}, [param_{n}];\n" for n in buffers)
    return f"{HEAD}\n.visible .entry test({params})\n{{\n{declared}{REGISTERS}{loads}{body}\n    ret;\n}}\n"


def execute(
    body: str, threads=32, grid=1, declared="", shared_bytes=0, order="lockstep", seed=0, limit=10_000, **arrays
):
    """Run a body over arrays. One given as a pair (shape, dtype), and what is masked of a masked array, has no values
    yet. Returns memory and report."""
    memory, addresses = Memory(), []
    for name, array in arrays.items():
        array = np.ma.masked_all(*array) if isinstance(array, tuple) else array
        addresses.append(memory.place(name, np.ma.getdata(array), initialised=~np.ma.getmaskarray(array)))
    (entry,) = parse(program(body, tuple(arrays), declared))
    params = struct.pack(f"<{len(addresses)}Q", *addresses)
    return memory, run(entry, grid, threads, params, memory, shared_bytes, order, seed, limit)


def calculate(instructions: str, dtype, **inputs) -> np.ndarray:
    """%d of each thread, after instructions that find an element of each input in the register of its name.

    dtype: of %d. There are scratch registers %p (predicate), %h (16 bits), %u (32) and %l (64).
    """
    arrays = {name: np.asarray(array) for name, array in inputs.items()}
    count = max(len(array) for array in arrays.values())
    threads = -(-count // 32) * 32
    body = f"    .reg .b{8 * np.dtype(dtype).itemsize} %d;\n"
    for name, array in arrays.items():
        size = array.dtype.itemsize
        body += f"    .reg .b{8 * size} %{name};\n    mad.wide.u32 %l, %t, {size}, %in_{name};\n"
        body += f"    ld.global.b{8 * size} %{name}, [%l];\n"
    size = np.dtype(dtype).itemsize
    body += f"    {instructions}\n    mad.wide.u32 %l, %t, {size}, %out;\n    st.global.b{8 * size} [%l], %d;"
    padded = {f"in_{name}": np.resize(array, threads) for name, array in arrays.items()}
    memory, _ = execute(body, threads=threads, **padded, out=(threads, dtype))
    return memory.read("out")[:count]


def mistake(kind, body, match, threads=64, declared=ROOM, **options):
    """The error of a body that must fail so; `options` are those of `execute`."""
    options = options or {"x": X}
    with pytest.raises(kind, match=match) as caught:
        execute(body, threads=threads, declared=declared, **options)
    return caught.value
