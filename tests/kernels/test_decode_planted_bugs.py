"""Do the tests of decode attention find mistakes? Kernels are broken on purpose, in source or PTX, and found out."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from decode_cases import check, make
from thorough import thinned

from rlcourse.course.kernels import decode_simple
from rlcourse.kernels import toolchain
from rlcourse.kernels.toolchain import simulate
from rlcourse.ptx import PTXError


def check_simple(module):
    kernel = module.SimpleDecode(6, 2, 64, padded=True)
    check(make(kernel, 40, [33, 20, 50], start=[5, 0, 0]), run=simulate)


def check_split(module):
    kernel = module.SplitDecode(6, 2, 64, splits=3)
    for order in ("lockstep", "warp"):
        check(make(kernel, 70, [66, 20]), run=simulate, order=order)


def check_ahead(module):
    kernel = module.AheadDecode(6, 2, 64, padded=True, splits=2)
    check(make(kernel, 200, [-1, 171, 20], start=[0, 5, 21]), run=simulate)


def check_attention(module):
    fused = module.DecodeAttention(6, 2, 64, padded=True, splits=2, angles="bfloat16", norm="float32", eps=1e-2)
    for order in ("lockstep", "warp", "random"):
        check(make(fused, 200, [171, 20, -1], start=[5, 19, 0]), run=simulate, order=order)
    check(make(module.DecodeAttention(6, 2, 128), 40, [36, 20]), run=simulate)
    ahead = module.DecodeAttention(6, 2, 64, padded=True, splits=2, warps=2, ahead=True, tiles=2)
    check(make(ahead, 200, [171, 20], start=[5, 21]), run=simulate)


FOLDER = {
    "simple": "course.kernels",
    "split": "course.kernels",
    "ahead": "course.kernels",
}  # the others are in rlcourse/kernels
CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}

SOURCE = [  # (what finds it, the file, what stands there, what is put there instead)
    ("simple", "simple", "score if token < last else", "score if token <= last else"),
    ("simple", "simple", "cutlass.min(token, last - 1)", "token"),
    ("simple", "simple", "threads_in_group=lanes", "threads_in_group=lanes // 2"),
    ("simple", "common", "if at < 0 or at >= slots:", "if at < 0:"),
    ("simple", "common", "first = cutlass.max(start[row].to(Int32), 0)", "first = Int32(0)"),
    (
        "simple",
        "common",
        "    cute.arch.sync_threads()\n    if const_expr(splits == 1)",
        "    if const_expr(splits == 1)",
    ),
    ("ahead", "ahead", "token + tiles * tokens, last", "token + tokens, last"),
    ("ahead", "ahead", "tile, first + tile * tokens + partial, last", "tile, first + partial, last"),
    ("ahead", "ahead", "    if first < last:\n", "    if first <= last:\n"),
    ("split", "common", "return begin, cutlass.min(begin + part, last)", "return begin, begin + part"),
    ("split", "common", "LOWEST = -1e30", "LOWEST = -math.inf"),
    ("split", "common", "            arrived[pair] = Int32(0)\n", "            pass\n"),
    ("split", "common", 'sem="acq_rel"', 'sem="relaxed"'),
    ("split", "common", "    cute.arch.sync_threads()\n    if thread == 0:", "    if thread == 0:"),
    ("split", "common", "return seen[0] == splits - 1", "return seen[0] == 0"),
    ("attention", "attention", "+ 8 * i + p < end else", "+ 8 * i + p <= end else"),
    ("attention", "attention", "cutlass.min(base + 8 * i + g, end - 1)", "base + 8 * i + g"),
    ("attention", "attention", "i % 2 + i // 2 * 8, end - 1", "i % 2 * 8 + i // 2, end - 1"),
    ("attention", "attention", "shuffle_sync(alpha, 8 * c + 4 * p)", "shuffle_sync(alpha, 8 * c)"),
    ("attention", "attention", "shuffle_sync_bfly(m_new, offset=2)", "shuffle_sync_bfly(m_new, offset=1)"),
    ("attention", "attention", "kv_head * group + cutlass.min", "cutlass.min"),
    ("attention", "attention", "split == self.splits - 1 and warp ==", "warp =="),
    ("attention", "attention", "newest + const_expr(0 if apart else 1)", "newest + 1"),
    ("attention", "attention", "begin += TILE * self.tiles * warp", "begin += TILE * warp"),
    ("attention", "attention", "0, 2 * tile + i // 2]", "0, i // 2]"),
    ("attention", "attention", "opens = opens and newest >= first", "opens = opens and newest >= 0"),
    ("attention", "attention", "load(new_value, values, newest, g, 8)", "load(new_value, values, newest - 1, g, 8)"),
    ("attention", "new_token", "Float32(1.0) if c == 0 else Float32(0.0)", "Float32(1.0)"),
    ("attention", "attention", "load_keys(key, keys, base + step,", "load_keys(key, keys, base,"),
    ("attention", "new_token", "second * cosine + first * sine).to", "second * cosine - first * sine).to"),
    ("attention", "new_token", "(32 * n) + eps", "(32 * n)"),
    ("attention", "new_token", "keys[None, slot, c + 4 * j]", "keys[None, slot + 1, c + 4 * j]"),
    ("attention", "new_token", "    x += cute.arch.shuffle_sync_bfly(x, offset=2)\n", ""),
]
PTX = [  # (what finds it, a regular expression in the PTX, what its first match becomes)
    ("simple", r"ld\.global\.v4\.b32(.*)\[(%rd\d+)\]", r"ld.global.v4.b32\1[\2+8]"),
    ("split", r"(bar\.sync\s+0;[\s\S]*?bar\.sync\s+0;[\s\S]*?)bar\.sync\s+0;", r"\1"),
    ("attention", r"mma\.sync[^;]*;", ""),
    ("attention", r"(mma\.sync[^;]*\{%r\d+, %r\d+, %r\d+, %r\d+\},\s*)\{(%r\d+), (%r\d+)\}", r"\1{\3, \2}"),
    ("attention", r"cvt\.rn\.bf16x2\.f32\s+(%r\d+), (%r\d+), (%r\d+);", r"cvt.rn.bf16x2.f32 \1, \3, \2;"),
]


@pytest.mark.thorough  # as the tests of these kernels are
@pytest.mark.parametrize("name", CHECKS)
def test_sound_kernels_pass(name):
    CHECKS[name](importlib.import_module(f"rlcourse.{FOLDER.get(name, 'kernels')}.decode_{name}"))


@pytest.mark.parametrize(
    ("name", "file", "old", "new"), thinned(SOURCE, every=11), ids=[f"{file}: {old}" for _, file, old, _ in SOURCE]
)
def test_mistakes_in_the_source_are_found(name, file, old, new, tmp_path, monkeypatch):
    folder = tmp_path / tmp_path.name
    folder.mkdir()
    for path in [
        *Path(toolchain.__file__).parent.glob("decode_*.py"),
        *Path(decode_simple.__file__).parent.glob("decode_*.py"),
    ]:
        source = path.read_text()
        if path.stem == f"decode_{file}":
            assert old in source, "this mistake can no longer be made: write another one"
            source = source.replace(old, new, 1)
        (folder / path.name).write_text(
            re.sub(r"rlcourse\.(course\.)?kernels\.decode_", f"{folder.name}.decode_", source)
        )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((AssertionError, PTXError)):
        CHECKS[name](importlib.import_module(f"{folder.name}.decode_{name}"))


@pytest.mark.parametrize(
    ("name", "pattern", "new"), thinned(PTX, every=3), ids=[f"{name}: {pattern}" for name, pattern, _ in PTX]
)
def test_mistakes_in_the_code_are_found(name, pattern, new, monkeypatch):
    plain = toolchain.compiled

    def broken(kernel, arch=None):
        code = plain(kernel, arch)
        ptx, changes = re.subn(pattern, new, code.ptx, count=1)
        assert changes, "this mistake can no longer be made: write another one"
        return SimpleNamespace(ptx=ptx, shared_bytes=code.shared_bytes)

    monkeypatch.setattr(toolchain, "compiled", broken)
    with pytest.raises((AssertionError, PTXError)) as found:
        CHECKS[name](importlib.import_module(f"rlcourse.{FOLDER.get(name, 'kernels')}.decode_{name}"))
    assert "can no longer be made" not in str(found.value)
