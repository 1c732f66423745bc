"""Real kernels in the interpreter: right, and the same whoever runs first."""

import numpy as np
import pytest
from handwritten import execute
from real_kernels import CHECKS, text_of
from thorough import thinned

from ptx_interpreter.execute import ORDERS


@pytest.mark.parametrize("seed", thinned(range(3), every=3))
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_give_the_same_bits_in_every_order(name, seed):
    first, _ = CHECKS[name](text_of(name))
    for order in ORDERS:
        again, _ = CHECKS[name](text_of(name), order=order, seed=seed)
        assert (again == first).all()


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
