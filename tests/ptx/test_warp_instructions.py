"""Shuffles, votes, reductions over lanes and matrix products."""

import numpy as np
import pytest
from handwritten import calculate, execute

RNG = np.random.default_rng(3)
LANE = np.arange(32)


def test_shuffles_read_the_lane_that_their_mode_names():
    a = RNG.integers(0, 2**32, 64, np.uint32)
    by_warp = a.reshape(2, 32)

    def shuffled(text):
        return calculate(f"shfl.sync.{text}, -1;", np.uint32, a=a).reshape(2, 32)

    assert (shuffled("bfly.b32 %d, %a, 5, 31") == by_warp[:, LANE ^ 5]).all()
    assert (shuffled("idx.b32 %d, %a, 7, 31") == by_warp[:, [7] * 32]).all()
    assert (shuffled("down.b32 %d, %a, 3, 31") == by_warp[:, np.where(LANE < 29, LANE + 3, LANE)]).all()
    assert (shuffled("up.b32 %d, %a, 3, 0") == by_warp[:, np.where(LANE >= 3, LANE - 3, LANE)]).all()
    inside = np.where(LANE % 8 < 5, LANE + 3, LANE)
    for eights in ("0x1807", "0x181f"):  # segments of 8 lanes: the upper two bits of the lane are kept
        assert (shuffled(f"idx.b32 %d, %a, 2, {eights}") == by_warp[:, LANE // 8 * 8 + 2]).all()
        assert (shuffled(f"down.b32 %d, %a, 3, {eights}") == by_warp[:, inside]).all()


def test_a_shuffle_says_who_had_a_source():
    body = "shfl.sync.up.b32 %u|%p, %a, 4, 0, -1; selp.u32 %d, 1, 0, %p;"
    assert calculate(body, np.uint32, a=LANE.astype(np.uint32)).tolist() == [0] * 4 + [1] * 28


def test_votes_see_all_lanes():
    a = (RNG.random(64) < 0.5).astype(np.uint32)
    a[32:] = 1
    bits = [int((a[i : i + 32] << LANE.astype(np.uint32)).sum()) for i in (0, 32)]
    ballot = calculate("setp.ne.u32 %p, %a, 0; vote.sync.ballot.b32 %d, %p, -1;", np.uint32, a=a)
    assert ballot.tolist() == [bits[0]] * 32 + [bits[1]] * 32
    for mode, expected in (("any", [1, 1]), ("all", [0, 1]), ("uni", [0, 1])):
        body = f"setp.ne.u32 %p, %a, 0; vote.sync.{mode}.pred %q, %p, -1; selp.u32 %d, 1, 0, %q;"
        assert calculate(body, np.uint32, a=a).tolist() == [expected[0]] * 32 + [expected[1]] * 32
    body = "setp.ne.u32 %p, %a, 0; vote.sync.any.pred %q, !%p, -1; selp.u32 %d, 1, 0, %q;"
    assert calculate(body, np.uint32, a=a).tolist() == [1] * 32 + [0] * 32


def test_groups_of_lanes_with_masks_of_their_own_vote_among_themselves():
    body = """
    setp.lt.u32 %p, %t, 16; selp.b32 %u, 0xffff, 0xffff0000, %p;
    setp.ne.u32 %q, %a, 0;
    vote.sync.ballot.b32 %r1, %q, %u;
    vote.sync.all.pred %q, %q, %u; mov.b32 %d, %r1; @%q add.u32 %d, %d, 7;
    """
    a = np.where(LANE < 16, 1, LANE % 2).astype(np.uint32)
    assert calculate(body, np.uint32, a=a).tolist() == [0xFFFF + 7] * 16 + [0xAAAA0000] * 16


def test_reductions_and_elections():
    a = RNG.integers(-50, 50, 32).astype(np.int32)
    assert (calculate("redux.sync.add.s32 %d, %a, -1;", np.int32, a=a) == a.sum()).all()
    assert (calculate("redux.sync.min.s32 %d, %a, -1;", np.int32, a=a) == a.min()).all()
    small = (a & 3).astype(np.uint32)
    body = "elect.sync %u|%p, -1; selp.u32 %u, 1, %u, %p; mov.b32 %d, %u;"
    assert calculate(body, np.uint32, a=small).tolist() == [1] + [0] * 31


def halves(shape, kind):
    """Random small integers (products and sums are exact) as raw 16 bits, and as float64."""
    values = RNG.integers(-8, 9, shape).astype(np.float32)
    raw = (
        values.astype(np.float16).view(np.uint16) if kind == "f16" else (values.view(np.uint32) >> 16).astype(np.uint16)
    )
    return raw, values.astype(np.float64)


@pytest.mark.parametrize("depth", [16, 8])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_multiplies_fragments_laid_out_as_ptx_says(kind, depth):
    a, a_values = halves((16, depth), kind)
    b, b_values = halves((depth, 8), kind)
    c = RNG.integers(-100, 100, (16, 8)).astype(np.float32)
    group, place = LANE // 4, LANE % 4

    def pair(matrix, rows, columns, step):  # two neighbours in one register, the first below
        first, second = matrix[rows, columns], matrix[rows + step[0], columns + step[1]]
        return first.astype(np.uint32) | second.astype(np.uint32) << 16

    rows_and_columns = [(group, 2 * place), (group + 8, 2 * place), (group, 2 * place + 8), (group + 8, 2 * place + 8)]
    fragments = {f"a{i}": pair(a, r, k, (0, 1)) for i, (r, k) in enumerate(rows_and_columns[: depth // 4])}
    fragments |= {f"b{i}": pair(b, 2 * place + 8 * i, group, (1, 0)) for i in range(depth // 8)}
    fragments |= {f"c{i}": c[group + 8 * (i // 2), 2 * place + i % 2] for i in range(4)}
    operands = ", ".join("{" + ", ".join(f"%{n}" for n in fragments if n[0] == x) + "}" for x in "abc")
    product = a_values @ b_values + c
    for i in range(4):
        body = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{%r1, %r2, %r3, %r4}}, {operands};"
        found = calculate(f"{body} mov.b32 %d, %r{i + 1};", np.float32, **fragments)
        assert (found == product[group + 8 * (i // 2), 2 * place + i % 2]).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_hands_rows_or_columns_of_eight_to_the_lanes(count, transposed):
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    registers = ", ".join(f"%r{i}" for i in range(count))
    stores = "".join(f"st.global.b32 [%l+{128 * i}], %r{i};" for i in range(count))
    body = f"""
    mov.u32 %r22, room; mov.u32 %r20, 0;
$FILL:
    mad.lo.u32 %r21, %r20, 32, %t;
    mad.wide.u32 %l, %r21, 2, %x; ld.global.b16 %h, [%l];
    mad.lo.u32 %u, %r21, 2, %r22; st.shared.b16 [%u], %h;
    add.u32 %r20, %r20, 1; setp.lt.u32 %p, %r20, {2 * count};
    @%p bra $FILL;
    bar.sync 0;
    mad.lo.u32 %u, %t, 16, %r22;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" * transposed}.shared.b16 {{{registers}}}, [%u];
    mad.wide.u32 %l, %t, 4, %y; {stores}
    """
    memory, _ = execute(body, declared=".shared .align 16 .b8 room[512];\n", x=matrices, y=((count, 32), np.uint32))
    expected = matrices.swapaxes(1, 2) if transposed else matrices
    assert (memory.read("y").view(np.uint16).reshape(count, 8, 8) == expected).all()


def test_special_registers_say_who_a_thread_is():
    body = "mov.u32 %r1, %{0}; mad.wide.u32 %l, %r9, 4, %x; st.global.b32 [%l], %r1;"
    own = "mov.u32 %r2, %tid.y; mov.u32 %r3, %ctaid.z; mad.lo.u32 %r9, %r2, 32, %t; mad.lo.u32 %r9, %r3, 64, %r9; "
    y, z = np.repeat([0, 1, 0, 1], 32), np.repeat([0, 1], 64)
    lane = np.tile(LANE, 4)
    expected = {"tid.y": y, "warpid": y, "ctaid.z": z, "ntid.y": 2, "nctaid.z": 2, "ntid.x": 32, "laneid": lane}
    masks = {"lanemask_lt": (1 << lane) - 1, "lanemask_ge": (1 << 32) - (1 << lane), "lanemask_eq": 1 << lane}
    for name, values in (expected | masks).items():
        memory, _ = execute(own + body.format(name), threads=(32, 2), grid=(1, 1, 2), x=(128, np.uint32))
        assert (memory.read("x") == values).all(), name
