"""Every kind of mistake is found, and the error says where it happened."""

import numpy as np
import pytest
from handwritten import ROOM, X, execute, mistake, program

from ptx_interpreter import Divergent, Endless, Misaligned, OutOfBounds, Uninitialised, Unsupported
from ptx_interpreter.execute import ORDERS


def test_a_read_behind_the_end_names_the_buffer_the_place_and_the_threads():
    body = "mov.u32 %r1, %ctaid.y; mad.wide.u32 %l, %t, 4, %x;\n ld.global.b32 %r1, [%l+16];"
    error = mistake(OutOfBounds, body, "0 bytes past the end of x", grid=(1, 2), x=X)
    assert (error.buffer, error.offset) == ("x", X.nbytes)
    assert error.block == (0, 0, 0) and error.threads == [60, 61, 62, 63]
    assert error.instruction == "ld.global.b32 %r1, [%l+16]"
    assert program(body, ["x"], ROOM).split("\n")[error.line - 1].strip().startswith("ld.global.b32")
    assert "threads 60-63" in str(error) and "ld.global.b32 %r1, [%l+16]" in str(error)


def test_writes_before_the_start_and_wild_pointers_are_out_of_bounds():
    mistake(OutOfBounds, "st.global.b32 [%x+-4], %t;", "4 bytes before x")
    mistake(OutOfBounds, "mov.u64 %l, 0; ld.global.b32 %r1, [%l];", "far outside")
    mistake(OutOfBounds, "mov.u64 %l, -8; ld.global.b32 %r1, [%l];", "far outside")
    mistake(OutOfBounds, "atom.global.add.u32 %r1, [%x+256], 1;", "past the end")


def test_guards_stand_between_buffers_of_any_size():
    body = "ld.global.b8 %h, [%x+3]; ld.global.b8 %h, [%x+{}];"
    for beyond in (-1, 3 + 1, 255):
        mistake(OutOfBounds, body.format(beyond), "x", x=np.zeros(4, np.uint8), y=np.zeros(4, np.uint8))
    large = np.zeros(100_000, np.uint8)  # nothing else lies within its own size of it
    for beyond in (-100_000, -1, 100_000, 199_999):
        mistake(OutOfBounds, body.format(beyond), "x", w=large, x=large, y=large)


def test_shared_memory_ends_where_the_launch_says():
    declared = ".extern .shared .align 16 .b8 room[];\n"
    execute("mov.u32 %u, room; st.shared.b32 [%u+60], 1;", declared=declared, shared_bytes=64)
    body = "mov.u32 %u, room; st.shared.b32 [%u+64], 1;"
    error = mistake(OutOfBounds, body, "ends at 64", declared=declared, shared_bytes=64)
    assert error.buffer == "shared"
    mistake(OutOfBounds, "mov.u32 %u, 0; ld.shared.b32 %r1, [%u];", "far outside")
    mistake(OutOfBounds, "ld.shared.b32 %r1, [room+-4];", "outside")


def test_addresses_must_be_multiples_of_the_size():
    mistake(Misaligned, "ld.global.b32 %r1, [%x+2];", "2 bytes off")
    mistake(Misaligned, "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x+8];", "8 bytes off")
    mistake(Misaligned, "st.shared.b64 [room+4], 1;", "shared")
    mistake(Misaligned, "cp.async.cg.shared.global [room], [%x+8], 16;", "global")


def test_bytes_that_nobody_wrote_must_not_be_read():
    x = np.ma.array(X, mask=np.arange(64) == 17)
    error = mistake(Uninitialised, "mad.wide.u32 %l, %t, 4, %x; ld.global.b32 %r1, [%l];", "x, byte 68", x=x)
    assert error.threads == [17]
    half = "st.shared.b16 [room], %h1; ld.shared.b32 %r1, [room];"
    mistake(Uninitialised, f"cvt.u16.u32 %h1, %t; {half}", "byte 2 of the shared memory", threads=32)
    mistake(Uninitialised, "atom.shared.add.u32 %r1, [room], 1;", "nobody wrote")


def test_an_asynchronous_copy_reads_as_many_bytes_as_it_is_told():
    body = "mov.u32 %r1, {}; cp.async.ca.shared.global [room], [%x], 16, %r1; cp.async.wait_all;"
    x = np.ma.array(X, mask=np.arange(64) >= 2)
    execute(body.format(8), declared=ROOM, x=x)
    for size in (9, 12):
        mistake(Uninitialised, body.format(size), "x, byte 8", threads=32, x=x)


def test_registers_that_were_not_written_must_not_be_read():
    error = mistake(Uninitialised, "setp.lt.u32 %p, %t, 5; @%p mov.b32 %r1, 1; add.u32 %r2, %r1, 1;", "%r1")
    assert error.threads == list(range(5, 64))
    body = """
    setp.lt.u32 %p, %t, 5;
    @%p bra $END;
    mov.b32 %r1, 1;
$END:
    setp.ge.u32 %q, %t, 5;
    @{} add.u32 %r2, %r1, 1;
    """
    execute(body.format("%q"), x=X)
    mistake(Uninitialised, body.format("%p"), "%r1")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.bfly.b32 %r1, %t, 1, 31, -1",
        "vote.sync.any.pred %q, %p, -1",
        "bar.warp.sync -1",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, {%t, %t}, {%t}, {%t, %t, %t, %t}",
    ],
)
def test_lanes_that_never_come_to_an_instruction_of_the_warp_are_missed(instruction, order):
    for body in (
        f"setp.lt.u32 %p, %t, 40; @%p {instruction};",
        f"setp.ge.u32 %p, %t, 40; @%p ret; {instruction};",
    ):
        error = mistake(Divergent, body, "8 of 32 threads wait here; ", order=order, x=X)
        assert error.threads == list(range(32, 40)) and error.instruction.endswith(instruction)


def test_a_shuffle_must_not_read_a_lane_that_takes_no_part():
    body = "setp.lt.u32 %p, %t, 16; @!%p ret; shfl.sync.idx.b32 %r1, %t, 20, 31, 0xffff;"
    mistake(Divergent, body, "lane 20", threads=32)


@pytest.mark.parametrize("order", ORDERS)
def test_a_barrier_waits_for_the_whole_block(order):
    body = "setp.lt.u32 %p, %t, 32;\n @%p bra $END;\n bar.sync 0;\n$END:"
    error = mistake(Divergent, body, "32 of 64 threads wait here; 32 have left", order=order, x=X)
    assert error.threads == list(range(32, 64))
    body = "setp.lt.u32 %p, %t, 40;\n @%p bra $OTHER;\n bar.sync 0;\n bra $END;\n$OTHER:\n bar.sync 0;\n$END:"
    mistake(Divergent, body, "only a part of a warp", order=order, x=X)
    body = "setp.lt.u32 %p, %t, 32;\n @%p bra $OTHER;\n bar.sync 1;\n bra $END;\n$OTHER:\n bar.sync 2;\n$END:"
    mistake(Divergent, body, "wait at line", order=order, x=X)


def test_branches_that_meet_again_need_no_mask():
    body = """
    setp.lt.u32 %p, %t, 5;
    mov.b32 %r1, 1;
    @%p bra $FAR;
$NEAR:
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
    bar.sync 0;
    bra $END;
$FAR:
    mov.b32 %r1, 2;
    bra $NEAR;
$END:
    mad.wide.u32 %l, %t, 4, %x; st.global.b32 [%l], %r2;
    """
    memory, _ = execute(body, threads=64, x=(64, np.uint32))
    assert memory.read("x")[:8].tolist() == [2, 2, 2, 2, 1, 2, 1, 1]


def test_a_loop_without_an_end_is_given_up():
    error = mistake(Endless, "$LOOP:\n bra $LOOP;", "a loop that does not end", limit=1000, x=X)
    assert error.instruction == "bra $LOOP"


def test_unknown_instructions_are_refused_when_somebody_comes_to_them():
    for text in ("wgmma.fence.sync.aligned;", "add.cc.u32 %r1, %t, %t;", "tex.1d.v4.s32.s32 {%r1}, [%x, {%r2}];"):
        name = text.split(".")[0].split(" ")[0]
        error = mistake(Unsupported, text, f"{name} is not known")
        assert error.line and error.instruction == text[:-1]
        execute(f"setp.gt.u32 %p, %t, 99; @!%p bra $END; {text}\n$END:", x=X)


def test_a_text_cannot_ask_for_memory_or_time_without_end():
    for text, message in (
        (".reg .b32 %n<2000000000>;", "registers"),
        ("\n".join(f".reg .b32 %n{i}_<900>;" for i in range(200)), "registers"),
        (f"add.u32 %r1, %t{', 1' * 9000};", "characters"),
        ("cp.async.ca.shared.global [room], [%x], 1000000000;", "of 1000000000 bytes"),
    ):
        mistake(Unsupported, text, message)
