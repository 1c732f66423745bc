"""Loads, stores, atomics and asynchronous copies."""

import numpy as np
import pytest
from handwritten import calculate, execute

RNG = np.random.default_rng(2)
DYNAMIC = ".extern .shared .align 16 .b8 room[];\n"


@pytest.mark.parametrize(("kind", "count"), [("b16", 4), ("b32", 2), ("b32", 4), ("b64", 2), ("b16", 2), ("b64", 4)])
def test_vector_accesses_move_neighbours(kind, count):
    size = int(kind[1:]) // 8
    x = RNG.integers(0, 256, (32, size * count)).astype(np.uint8)
    prefix = {2: "%h", 4: "%r", 8: "%rd"}[size]
    registers = ", ".join(f"{prefix}{i}" for i in range(count))
    backwards = ", ".join(f"{prefix}{i}" for i in reversed(range(count)))
    body = f"""
    mad.wide.u32 %l, %t, {size * count}, %x;
    ld.global.nc.L1::no_allocate.v{count}.{kind} {{{registers}}}, [%l];
    mad.wide.u32 %l, %t, {size * count}, %y;
    st.global.v{count}.{kind} [%l], {{{backwards}}};
    """
    memory, report = execute(body, x=x, y=(x.shape, x.dtype))
    assert (memory.read("y").reshape(32, count, size)[:, ::-1].reshape(32, -1) == x).all()
    assert report.read == {"x": x.nbytes} and report.written == {"y": x.nbytes}


def test_small_loads_fill_a_register_with_zeros_or_the_sign():
    x = np.arange(256).astype(np.uint8)
    body = "add.u64 %l, %in_a, %l; ld.global.{} %r1, [%l]; mov.b32 %d, %r1;"
    address = "cvt.u64.u32 %l, %t; "
    assert (calculate(address + body.format("u8"), np.int32, a=x) == x).all()
    assert (calculate(address + body.format("s8"), np.int32, a=x) == x.view(np.int8)).all()


def test_generic_addresses_and_local_memory_work():
    body = """
    mov.u64 %rd1, place; cvta.local.u64 %rd2, %rd1;
    st.local.b32 [%rd1+4], %t;
    ld.b32 %r1, [%rd2+4];
    mov.u32 %u, room; cvt.u64.u32 %rd3, %u; cvta.shared.u64 %rd3, %rd3;
    mad.wide.u32 %rd4, %t, 4, %rd3; st.b32 [%rd4], %r1; ld.shared.b32 %r2, [%rd4];
    mad.wide.u32 %l, %t, 4, %x; st.b32 [%l], %r2;
    """
    declared = ".local .align 8 .b8 place[16];\n.shared .align 4 .b8 room[128];\n"
    memory, _ = execute(body, declared=declared, x=(32, np.uint32))
    assert memory.read("x").tolist() == list(range(32))


ATOMICS = {
    "add.u32": lambda old, v: int(old + v.sum()) % 2**32,
    "min.s32": lambda old, v: min(old, v.view(np.int32).min()),
    "max.u32": lambda old, v: max(old, v.max()),
    "or.b32": lambda old, v: np.bitwise_or.reduce(v) | old,
    "xor.b32": lambda old, v: np.bitwise_xor.reduce(v) ^ old,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("instruction", ["atom", "red"])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_of_all_threads_add_up(name, instruction, space):
    values = RNG.integers(0, 2**32, 64, np.uint32)
    target = "%r9, " if instruction == "atom" else ""
    place = "%x" if space == "global" else "room"
    body = f"""
    mad.wide.u32 %l, %t, 4, %v; ld.global.b32 %r1, [%l];
    setp.ne.u32 %p, %t, 0;
    @%p bra $OVER;
    st.{space}.b32 [{place}], 12345;
$OVER:
    bar.sync 0;
    {instruction}.{space}.{name} {target}[{place}], %r1;
    bar.sync 0;
    @%p ret;
    ld.{space}.b32 %r2, [{place}]; st.global.b32 [%y], %r2;
    """
    arrays = {"v": values, "x": np.zeros(1, np.uint32), "y": (1, np.uint32)}
    memory, _ = execute(body, threads=64, declared=".shared .align 4 .b8 room[4];\n", **arrays)
    assert memory.read("y")[0] == np.uint32(int(ATOMICS[name](12345, values)) % 2**32)


def test_cas_swaps_and_bf16x2_adds_pairs():
    body = """
    atom.global.cas.b32 %r2, [%x+4], 0, 77;
    red.global.add.noftz.bf16x2 [%x+8], 0x3F804000;
    atom.global.exch.b32 %r3, [%x+12], 5;
    """
    memory, _ = execute(body, x=np.zeros(4, np.uint32))
    assert memory.read("x").tolist() == [0, 77, 0x42004280, 5]  # 32 times 1.0 and 2.0


def test_cp_async_brings_bytes_once_its_group_is_waited_for_and_fills_up_with_zeros():
    body = """
    mov.u32 %u, room; mad.lo.u32 %r1, %t, 16, %u;
    mad.wide.u32 %l, %t, 16, %x;
    setp.lt.u32 %p, %t, 16; selp.u32 %r2, 16, 12, %p;
    cp.async.cg.shared.global [%r1], [%l], 16, %r2;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+512], [%l], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r1];
    mad.wide.u32 %l, %t, 16, %y; st.global.v4.b32 [%l], {%r3, %r4, %r5, %r6};
    cp.async.wait_all;
    ld.shared.b32 %r7, [%r1+512]; mad.wide.u32 %l, %t, 4, %z; st.global.b32 [%l], %r7;
    """
    x = RNG.integers(0, 2**32, (32, 4), np.uint32)
    memory, _ = execute(body, declared=DYNAMIC, shared_bytes=1024, x=x, y=(x.shape, x.dtype), z=(32, x.dtype))
    expected = x.copy()
    expected[16:, 3:] = 0
    assert (memory.read("y") == expected).all() and (memory.read("z") == x[:, 0]).all()


def test_the_report_counts_warps_bytes_and_sectors():
    body = """
    mad.wide.u32 %l, %t, 4, %x; ld.global.b32 %r1, [%l];
    mad.wide.u32 %l, %t, 64, %x; ld.global.b32 %r2, [%l];
    ld.global.b32 %r3, [%x];
    """
    _, report = execute(body, threads=64, x=np.zeros((64, 16), np.float32))
    whole, strided, same = report.accesses.values()
    assert (whole.warps, whole.bytes, whole.sectors, whole.efficiency) == (2, 256, 8, 1.0)
    assert (strided.sectors, strided.efficiency) == (64, 0.125)
    assert same.sectors == 2
    assert report.instructions["ld.global.b32"] == 6 and report.read == {"x": 3 * 256}
