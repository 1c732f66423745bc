"""Races are found in every run, even if it happened to take the right order: in shared memory and between blocks."""

import numpy as np
import pytest
from handwritten import OWN, ROOM, X, execute, mistake

from ptx_interpreter import Race, Uninitialised
from ptx_interpreter.execute import ORDERS


@pytest.mark.parametrize("order", ORDERS)
def test_shared_memory_needs_a_barrier_between_warps(order):
    write, read = f"{OWN} st.shared.b32 [%u], %t;", "ld.shared.b32 %r1, [%r8];"
    other = "xor.b32 %r7, %t, 32; mad.lo.u32 %r8, %r7, 4, %r9;"
    execute(f"{write} {other} bar.sync 0; {read}", threads=64, declared=ROOM, order=order)
    kinds = (Race, Uninitialised)  # the second if the reader comes first
    mistake(kinds, f"{write} {other} {read}", "shared memory", order=order, x=X)
    again = f"{write} {other} bar.sync 0; {read} {{}} st.shared.b32 [%u], 1;"
    execute(again.format("bar.sync 0;"), threads=64, declared=ROOM, order=order)
    mistake(Race, again.format(""), "it, and no barrier", order=order, x=X)
    both = f"{OWN} st.shared.b32 [room], %t;"
    mistake(Race, both, "wrote it, and no barrier", order=order, x=X)


@pytest.mark.parametrize(
    ("read", "write"),
    [
        ("ld.shared.u8 %r1, [room+7]", "st.shared.v2.b32 [room], {%t, %t}"),
        ("ld.shared.v2.b32 {%r1, %r2}, [room]", "st.shared.b8 [room+7], %t"),
    ],
)
def test_a_write_races_with_a_read_of_any_of_its_bytes(read, write):
    start = "setp.lt.u32 %p, %t, 32; @%p st.shared.v2.b32 [room], {%t, %t}; bar.sync 0;"
    execute(f"{start} @%p {read}; bar.sync 0; @!%p {write};", threads=64, declared=ROOM)
    mistake(Race, f"{start} @%p {read}; @!%p {write};", "warp 0 read it")


def test_a_barrier_of_some_warps_orders_these_alone():
    body = f"""
    {OWN} setp.lt.u32 %p, %t, 32; setp.ge.u32 %q, %t, 64;
    @%p st.shared.b32 [room], 1;
    @%q bra $END;
    bar.sync 1, 64;
    ld.shared.b32 %r1, [room];
$END:
    {{}}
    """
    execute(body.format(""), threads=96, declared=ROOM)
    mistake(Race, body.format("@%q ld.shared.b32 %r1, [room];"), "by warp 2; warp 0 wrote it", threads=96)


def test_shared_atomics_race_with_plain_accesses_but_not_with_each_other():
    start = f"{OWN} setp.eq.u32 %p, %t, 0; @%p st.shared.b32 [room], 0; bar.sync 0; red.shared.add.u32 [room], 1;"
    execute(f"{start} red.shared.add.u32 [room], 1; bar.sync 0; ld.shared.b32 %r1, [room];", threads=64, declared=ROOM)
    mistake(Race, f"{start} ld.shared.b32 %r1, [room];", "no barrier")


def test_an_asynchronous_copy_must_be_waited_for():
    copy = f"{OWN} mad.wide.u32 %l, %t, 4, %x; cp.async.ca.shared.global [%u], [%l], 4; cp.async.commit_group;"
    read = "ld.shared.b32 %r1, [%u];"
    execute(f"{copy} cp.async.wait_group 0; {read}", threads=64, declared=ROOM, x=X)
    mistake(Uninitialised, f"{copy} {read}", "wait for its group")
    mistake(Uninitialised, f"{copy} cp.async.wait_group 1; {read}", "wait for its group")
    other = "xor.b32 %r7, %t, 32; mad.lo.u32 %u, %r7, 4, %r9;"
    execute(f"{copy} cp.async.wait_group 0; {other} bar.sync 0; {read}", threads=64, declared=ROOM, x=X)
    mistake(Race, f"{copy} cp.async.wait_group 0; {other} {read}", "no barrier")
    mistake(Uninitialised, f"{copy} {other} bar.sync 0; {read} cp.async.wait_group 0;", "wait for its group")


LAST_BLOCK = """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; mov.u32 %r9, room;
    mad.lo.u32 %r3, %r1, 64, %t; mad.wide.u32 %l, %r3, 4, %part; st.global.b32 [%l], %r3;
    {before}
    setp.ne.u32 %p, %t, 0; @%p bra $JOIN;
    {atomic} st.shared.b32 [%r9], %r4;
$JOIN:
    bar.sync 0;
    ld.shared.b32 %r4, [%r9]; add.u32 %r4, %r4, 1; setp.ne.u32 %q, %r4, %r2; @%q ret;
    mov.b32 %r5, 0; mov.b32 %r6, 0;
$SUM:
    mad.lo.u32 %r7, %r5, 64, %t; mad.wide.u32 %l, %r7, 4, %part; ld.global.b32 %r8, [%l];
    add.u32 %r6, %r6, %r8; add.u32 %r5, %r5, 1; setp.lt.u32 %p, %r5, %r2; @%p bra $SUM;
    mad.wide.u32 %l, %t, 4, %out; st.global.b32 [%l], %r6;
"""
ACQ_REL = "atom.global.acq_rel.gpu.add.u32 %r4, [%counter], 1;"


def last_block(before="bar.sync 0;", atomic=ACQ_REL, order="lockstep"):
    arrays = {"part": ((4, 64), np.uint32), "counter": np.zeros(1, np.uint32), "out": (64, np.uint32)}
    return execute(LAST_BLOCK.format(before=before, atomic=atomic), 64, 4, ROOM, order=order, **arrays)


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_block_may_read_what_the_others_released(order):
    fenced = "membar.gl; atom.global.add.u32 %r4, [%counter], 1; fence.acq_rel.gpu;"
    for atomic in (ACQ_REL, fenced):
        memory, report = last_block(atomic=atomic, order=order)
        assert memory.read("out").tolist() == [4 * t + 64 * 6 for t in range(64)]
        assert report.cross_block_reads == {"part": 3 * 256}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "mistaken",
    [
        {"before": ""},
        {"atomic": "atom.global.relaxed.gpu.add.u32 %r4, [%counter], 1;"},
        {"atomic": "atom.global.release.gpu.add.u32 %r4, [%counter], 1;"},
        {"atomic": "atom.global.acquire.gpu.add.u32 %r4, [%counter], 1;"},
        {"atomic": "atom.global.acq_rel.cta.add.u32 %r4, [%counter], 1;"},
        {"atomic": "membar.gl; atom.global.add.u32 %r4, [%counter], 1;"},
    ],
    ids=["no barrier before", "relaxed", "release alone", "acquire alone", "scope of a block", "no fence after"],
)
def test_half_a_synchronisation_between_blocks_is_a_race(mistaken, order):
    with pytest.raises(Race, match="no atomic with release and acquire") as caught:
        last_block(**mistaken, order=order)
    assert caught.value.buffer == "part"


def test_blocks_must_not_touch_each_others_bytes():
    write = "mov.u32 %r1, %ctaid.x; mad.wide.u32 %l, %r1, 0, %x; mad.wide.u32 %l, %t, 4, %l; st.global.b32 [%l], %r1;"
    mistake(Race, write, "wrote it", grid=2, x=X)
    read = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p, %r1, 0; @%p st.global.b32 [%x], 1; @!%p ld.global.b32 %r2, [%x];"
    for order in ORDERS:
        mistake(Race, read, "no atomic", threads=32, grid=2, x=X, order=order)


def test_a_flag_with_release_and_acquire_hands_bytes_over():
    body = """
    mov.u32 %r1, %ctaid.x; setp.ne.u32 %p, %r1, 0; @%p bra $CONSUMER;
    st.global.b32 [%x], 7; st{release}.global.b32 [%flag], 1; ret;
$CONSUMER:
    ld{acquire}.global.b32 %r2, [%flag]; setp.eq.u32 %q, %r2, 0; @%q bra $CONSUMER;
    ld.global.b32 %r3, [%x]; st.global.b32 [%y], %r3;
    """
    arrays = {"x": X, "flag": np.zeros(1, np.uint32), "y": (1, np.uint32)}
    memory, _ = execute(body.format(release=".release.gpu", acquire=".acquire.gpu"), grid=2, **arrays)
    assert memory.read("y").tolist() == [7]
    for release, acquire in (("", ".acquire.gpu"), (".relaxed.gpu", ".acquire.gpu"), (".release.gpu", ".relaxed.gpu")):
        with pytest.raises(Race):
            execute(body.format(release=release, acquire=acquire), grid=2, **arrays)


WAIT = "{label}:\n ld.acquire.gpu.global.b32 %r2, [{flag}]; setp.eq.u32 %q, %r2, 0; @%q bra {label};"


def test_what_one_block_has_learnt_from_another_it_hands_on():
    body = f"""
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p, %r1, 1; @%p bra $SECOND; setp.eq.u32 %p, %r1, 2; @%p bra $THIRD;
    st.global.b32 [%x], 7; st.release.gpu.global.b32 [%flags], 1; ret;
$SECOND:
    {WAIT.format(label="$W1", flag="%flags")} st.release.gpu.global.b32 [%flags+4], 1; ret;
$THIRD:
    {WAIT.format(label="$W2", flag="%flags+4")} ld.global.b32 %r3, [%x];
    """
    _, report = execute(body, grid=3, x=X, flags=np.zeros(2, np.uint32))
    assert report.cross_block_reads["x"] == 32 * 4


def test_a_release_covers_what_was_written_before_it_alone():
    body = f"""
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p, %r1, 1; @%p bra $SECOND;
    st.release.gpu.global.b32 [%flag], 1; st.global.b32 [%x], 7; ret;
$SECOND:
    {WAIT.format(label="$W", flag="%flag")} ld.global.b32 %r3, [%x];
    """
    mistake(Race, body, "x, byte 0", threads=32, grid=2, x=X, flag=np.zeros(1, np.uint32))


def test_red_brings_nothing_back_and_so_acquires_nothing():
    body = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p, %r1, 1; @%p bra $SECOND;
    st.global.b32 [%x], 7; fence.acq_rel.gpu; atom.global.add.u32 %r2, [%flag], 1; ret;
$SECOND:
    {} fence.acq_rel.gpu; ld.global.b32 %r3, [%x];
    """
    arrays = {"x": X, "flag": np.zeros(1, np.uint32)}
    red, atom = "red.global.add.u32 [%flag], 1;", "atom.global.add.u32 %r2, [%flag], 1;"
    execute(body.format(atom), grid=2, **arrays)
    mistake(Race, body.format(red), "x, byte 0", threads=32, grid=2, **arrays)


def test_what_a_kernel_writes_must_not_come_through_the_cache_for_constants():
    mistake(Race, "st.global.b32 [%x], 1; ld.global.nc.b32 %r1, [%x];", "cache for constants", threads=32)
