"""A real kernel, and small ones with branches and scopes: right, with the same result in any order of threads."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from handwritten import execute

from ptx_interpreter import Memory, parse, run
from ptx_interpreter.execute import ORDERS
from ptx_interpreter.formats import bf16_to_float32, float32_to_bf16


@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_matrix_product_is_right_in_every_order(order):
    """c [64, 64] = a [64, 32] @ b [64, 32]^T, by CuTe DSL: cp.async, ldmatrix and mma.sync."""
    text = Path(__file__).with_name("product.ptx").read_text()
    rng, memory = np.random.default_rng(1), Memory()
    a, b = (float32_to_bf16(rng.standard_normal((64, 32)).astype(np.float32)) for _ in range(2))
    addresses = memory.place("a", a), memory.place("b", b)
    c = memory.place("c", np.zeros((64, 64), np.float32), initialised=False)
    shared_bytes = int(re.search(r"; (\d+) bytes of shared memory", text)[1])
    run(parse(text)[0], 1, 64, struct.pack("<3Q", *addresses, c), memory, shared_bytes, order)
    assert memory.initialised("c").all()
    expected = bf16_to_float32(a).astype(np.float64) @ bf16_to_float32(b).astype(np.float64).T
    np.testing.assert_allclose(memory.read("c"), expected, atol=1e-4)


def test_orders_are_what_they_say():
    """Each warp draws a ticket: in which order do they come?"""
    body = """
    mov.u32 %r1, %ctaid.x; shr.u32 %r2, %t, 5; mad.lo.u32 %r2, %r1, 3, %r2;
    and.b32 %r3, %t, 31; setp.eq.u32 %p, %r3, 0;
    bar.sync 0;
    @%p atom.global.add.u32 %r4, [%counter], 1;
    mad.wide.u32 %l, %r2, 4, %ticket;
    @%p st.global.b32 [%l], %r4;
    """

    def tickets(order, seed=0):
        memory, _ = execute(
            body, 96, 4, order=order, seed=seed, counter=np.zeros(1, np.uint32), ticket=((4, 3), np.uint32)
        )
        return memory.read("ticket").astype(int)

    by_block = tickets("warp")
    assert all((row == np.sort(row)[::-1]).all() and np.ptp(row) == 2 for row in by_block)
    assert all(np.ptp(row) == 2 for row in tickets("serial"))
    assert any(np.ptp(row) > 2 for row in tickets("random"))
    assert (tickets("random", 1) != tickets("random", 2)).any() and (tickets("serial", 1) != tickets("serial", 2)).any()
    assert (tickets("random", 1) == tickets("random", 1)).all()


def test_scopes_of_inline_assembly_have_registers_of_their_own():
    body = """
    mov.b32 %r1, 1;
    {
        .reg .b32 %r1, %mine;
        mov.b32 %mine, 5;
        add.u32 %r1, %mine, %t;
        setp.lt.u32 %p, %t, 3; @%p bra $INNER;
        mov.b32 %r2, %r1;
    $INNER: }
    { .reg .b32 %mine; mov.b32 %mine, 7; @%p mov.b32 %r2, %mine; } // a comment; with a semicolon { and a brace
    add.u32 %r2, %r2, %r1; /* another
    comment */ mad.wide.u32 %l, %t, 4, %x; st.global.b32 [%l], %r2;
    """
    memory, _ = execute(body, x=(32, np.uint32))
    assert memory.read("x").tolist() == [8] * 3 + [t + 6 for t in range(3, 32)]


def test_a_launch_that_a_gpu_refuses_is_refused():
    for grid, threads in ((0, 32), ((2, 0), 32), (1, 31), (1, 1056)):
        with pytest.raises(ValueError, match="needs"):
            execute("ret;", grid=grid, threads=threads)
