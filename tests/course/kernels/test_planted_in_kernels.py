"""Do such tests find mistakes? Kernels are broken on purpose, in their source or their PTX, and must be found out."""

import functools
import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import assert_close, spread
from test_rope import assert_same_cache
from test_rope import case as rope_case
from test_sampler import assert_same

from rlcourse.course.kernels import rms_norm, rms_norm_backward, rope, sampler, swiglu
from rlcourse.kernels import KernelError, toolchain
from rlcourse.kernels.toolchain import simulate
from rlcourse.ptx import PTXError

NAN = torch.nan


def check_vector_add(module, **order):
    for n in (1024, 1030):
        a, b, c = torch.randn(n), torch.randn(n), torch.full((n,), NAN)
        simulate(module.VectorAdd(), a, b, c, **order)
        assert torch.equal(c, a + b)


def check_rms_norm(module, **order):
    x, residual, weight = (t.to(torch.bfloat16) for t in (torch.randn(5, 192), torch.randn(5, 192), torch.randn(192)))
    x[2] *= 1e-3  # eps counts
    for add in (False, True):
        stream, expected = (residual.clone() if add else None), residual.clone()
        y = torch.full_like(x, NAN)
        simulate(module.RMSNorm(192, "bfloat16", add=add), x * 1e-2, stream, weight, y, **order)
        reference = rms_norm.add_rms_norm_reference(x * 1e-2, expected, weight, 1e-6)
        assert_close(y, reference if add else rms_norm.rms_norm_reference(x * 1e-2, weight, 1e-6))
        assert not add or torch.equal(stream, expected)


def check_rms_norm_backward(module, **order):
    x, dy, weight = torch.randn(5, 256), torch.randn(5, 256), 1 + torch.rand(256)
    x[2] *= 1e-3  # eps counts
    dx, partial = torch.full_like(x, NAN), torch.full((2, 256), NAN)
    simulate(module.RMSNormBackward(256), x, weight, dy, dx, partial, **order)
    expected = rms_norm_backward.rms_norm_backward_reference(x, weight, dy, 1e-6)
    for found, right in zip((dx, partial.sum(0)), expected, strict=True):
        assert ((found - right).abs() <= 1e-5 * right.abs().amax(-1, keepdim=True)).all()


def check_swiglu(module, **order):
    gate_up = spread(torch.randn(3, 80).half(), 88)
    out = torch.full((3, 40), NAN, dtype=torch.float16)
    simulate(module.Swiglu(40, "float16"), gate_up, out, **order)
    assert_close(out, swiglu.swiglu_reference(gate_up))


def check_rope(module, **order):
    *inputs, slot, k_cache, v_cache = rope_case(3, 4, 2, 64, torch.bfloat16)
    slot[1] = -1
    expected = k_cache.clone(), v_cache.clone()
    q = torch.full((3, 4, 64), NAN, dtype=torch.bfloat16)
    simulate(module.Rope(4, 2, 64, "bfloat16"), *inputs, slot, k_cache, v_cache, q, **order)
    assert_close(q, rope.rope_reference(*inputs, slot, *expected))
    assert_same_cache(k_cache, expected[0])
    assert_same_cache(v_cache, expected[1])


def check_sampler(module, **order):
    torch.manual_seed(4)
    counter, seed = torch.arange(3) + (torch.arange(3) << 33), torch.tensor([2**40 + 7])
    for dtype, temperature in ((torch.float16, 0.7), (torch.float32, 0.0)):
        logits = spread((3 * torch.randn(3, 2997) - 20).to(dtype), 3008)
        logits[:, [70, 2000, 2990]] = -4.0  # ties
        logits[0, 5:90] = -torch.inf
        found = torch.full((3,), -1), torch.full((3,), NAN), torch.full((3,), NAN)
        shares, arrived = torch.full((3, 32, 8), NAN), torch.zeros(3, dtype=torch.int32)
        kernel = module.Sampler(str(dtype).removeprefix("torch."), greedy=temperature == 0)
        simulate(kernel, logits, 1 / (temperature or 1), 3, seed, counter, *found, shares, arrived, **order)
        assert not arrived.any()
        assert_same(found, logits, temperature, counter, seed)
    assert found[0].tolist() == [2000] + [70] * 2


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}

SOURCE = [  # (module, what stands there, what is put there instead)
    ("vector_add", "if first + VECTOR <= a.shape[0]", "if first <= a.shape[0]"),
    ("vector_add", "if first + i < a.shape[0]", "if first + i <= a.shape[0]"),
    ("rms_norm", "threads_in_group=self.lanes", "threads_in_group=self.lanes // 2"),
    ("rms_norm", "(1 / self.hidden) + self.eps", "(1 / self.hidden)"),
    ("rms_norm", "if row < x.shape[0]:\n            load(x", "if row <= x.shape[0]:\n            load(x"),
    ("rms_norm", "piece = scale[None, i]", "piece = scale[None, 0]"),
    ("rms_norm", "                store(held, residual[row, None], lane, self.lanes)\n", ""),
    ("rms_norm_backward", "- value * pull)", ")"),
    ("rms_norm_backward", "along * inverse * inverse * inverse", "along * inverse * inverse"),
    ("rms_norm_backward", "(1 / self.hidden) + self.eps", "(1 / self.hidden)"),
    ("rms_norm_backward", "        sums.fill(0.0)\n", ""),
    ("rms_norm_backward", "range(program, x.shape[0],", "range(program, x.shape[0] + 1,"),
    ("rms_norm_backward", "store(sums, partial[program, None]", "store(sums, partial[0, None]"),
    ("swiglu", "both[None, self.pieces + piece]", "both[None, piece]"),
    ("swiglu", "if row < gate_up.shape[0]", "if row <= gate_up.shape[0]"),
    ("swiglu", "g * -LOG2_E", "g * LOG2_E"),
    ("rope", "x * c.load() - y * s.load()", "x * c.load() + y * s.load()"),
    ("rope", "elif slot[row] >= 0:", "else:"),
    ("rope", "cos[position[row], None], sin[position[row], None]", "cos[slot[row], None], sin[slot[row], None]"),
    (
        "rope",
        "if head < self.heads + self.kv_heads:\n                turn",
        "if head < self.heads:\n                turn",
    ),
    ("sampler", "held.fill(-math.inf)", "held.fill(0.0)"),
    ("sampler", "if first + vector <= row.shape[0]", "if first < row.shape[0]"),
    ("sampler", "    rescale(other, largest)\n", ""),
    ("sampler", "+ share[MASS] * below) * shrink", ") * shrink"),
    ("sampler", "Float32(FLOOR) if below < FLOOR else below", "below"),
    ("sampler", "| ((key == share[KEY]) & (index < share[INDEX]))", "| ((key == share[KEY]) & (index > share[INDEX]))"),
    ("sampler", "if order[0] == splits - 1 and", "if order[0] == 0 and"),
    ("sampler", "            arrived[row] = Int32(0)  # ready", "            # ready"),
    ("sampler", 'sem="acq_rel"', 'sem="relaxed"'),
    ("sampler", "for step in range_constexpr(5)", "for step in range_constexpr(4)"),
    ("sampler", "piece * (vector // 4) + four", "piece + four"),
    ("sampler", "philox(Uint32(piece * (vector // 4) + four), counter, seed)", "philox(Uint32(piece), seed, counter)"),
]
PTX = [  # (module, a regular expression in the PTX, what its first match becomes)
    ("rms_norm", r"shfl\.sync\.bfly\.b32\s+(%r\d+\|%p\d+|%r\d+), (%r\d+), \d+,", r"shfl.sync.bfly.b32 \1, \2, 0,"),
    ("rms_norm", r"ld\.global\.v4\.b32(.*)\[(%rd\d+)\+256\]", r"ld.global.v4.b32\1[\2+264]"),
    ("rope", r"neg\.f32\s+(%r\d+), (%r\d+);", r"mov.b32 \1, \2;"),
    ("swiglu", r"cvt\.rn\.f16x2\.f32\s+(%r\d+), (%r\d+), (%r\d+);", r"cvt.rn.f16x2.f32 \1, \3, \2;"),
    ("sampler", r"bar\.sync\s+0;", ""),
    ("sampler", r"(bar\.sync\s+0;[\s\S]*?)bar\.sync\s+0;", r"\1"),
    ("sampler", r"-845247145", "-845247144"),
]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@functools.cache
def orders(name):
    """The orders in which a kernel is run: those in which barriers matter for the one that has some."""
    return ("lockstep", "warp", "random") if name == "sampler" else ("lockstep",)


def found_out(check, module, name="") -> bool:
    for order in orders(name):
        try:
            check(module, order=order)
        except (AssertionError, PTXError, KernelError):
            return True
    return False


def planted(name, old, new, folder, monkeypatch):
    """The module of a kernel with one change in its source, up to its operations, which can be made once."""
    source = Path(rms_norm.__file__).with_name(f"{name}.py").read_text()
    assert old in source, "this mistake can no longer be made: write another one"
    kernel, _, _ = source.replace(old, new, 1).partition("@torch.library.custom_op")
    path = folder / f"{folder.name}.py"
    path.write_text(kernel)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(path.stem)


@pytest.mark.thorough  # as the tests of these kernels are
@pytest.mark.parametrize("name", CHECKS)
def test_sound_kernels_pass(name):
    assert not found_out(CHECKS[name], importlib.import_module(f"rlcourse.course.kernels.{name}"), name)


@pytest.mark.parametrize(
    ("name", "old", "new"), thinned(SOURCE, every=6), ids=[f"{name}: {old}" for name, old, _ in SOURCE]
)
def test_mistakes_in_the_source_are_found(name, old, new, tmp_path, monkeypatch):
    assert found_out(CHECKS[name], planted(name, old, new, tmp_path, monkeypatch), name)


@pytest.mark.parametrize(
    ("name", "pattern", "new"), thinned(PTX, every=3), ids=[f"{name}: {pattern}" for name, pattern, _ in PTX]
)
def test_mistakes_in_the_code_are_found(name, pattern, new, monkeypatch):
    plain = toolchain.compiled

    def broken(kernel, arch=None):
        code = plain(kernel, arch)
        ptx, changes = re.subn(pattern, new, code.ptx, count=1)
        assert changes or getattr(kernel, "greedy", False), "this mistake can no longer be made: write another one"
        return SimpleNamespace(ptx=ptx, shared_bytes=code.shared_bytes)

    monkeypatch.setattr(toolchain, "compiled", broken)
    assert found_out(CHECKS[name], importlib.import_module(f"rlcourse.course.kernels.{name}"), name)


def test_too_little_shared_memory_is_found(monkeypatch):
    plain = toolchain.compiled
    monkeypatch.setattr(toolchain, "compiled", lambda *a: replace(plain(*a), shared_bytes=plain(*a).shared_bytes - 4))
    assert found_out(check_sampler, sampler, "sampler")
