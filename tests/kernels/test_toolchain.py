"""What is compiled, what is kept, and what a person is told when it cannot be."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import DEVICE, launch

from rlcourse.course.kernels.rms_norm import RMSNorm, rms_norm
from rlcourse.course.kernels.swiglu import Swiglu, swiglu
from rlcourse.kernels import KernelError, toolchain
from rlcourse.kernels.arguments import Argument, Scalar
from rlcourse.kernels.dsl import Float32, cute, cutlass
from rlcourse.kernels.toolchain import compiled, interpreted, simulate, workspace

SMALL = Swiglu(8, "bfloat16")
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="about machines without a GPU")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of our own, and a memory that has forgotten all."""
    monkeypatch.setenv("RLCOURSE_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget():
    toolchain._compiled.cache_clear()


def test_what_was_compiled_is_read_from_disk_by_the_next_process(cache, monkeypatch):
    first = compiled(SMALL, "sm_86")
    assert first is compiled(SMALL, "sm_86")
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "_build", lambda *_: pytest.fail("compiled again"))
        again = compiled(SMALL, "sm_86")
    assert (again.ptx, again.registers) == (first.ptx, first.registers)
    assert again.function is not None  # the host function loads where there is no GPU
    toolchain._build(SMALL, "sm_86", first.folder)  # another process may have been first
    assert sorted(p.name for p in cache.iterdir()) == [first.folder.name], "nothing half-made is left"


def test_other_fields_architectures_and_sources_are_compiled_anew(cache, monkeypatch):
    kernels = [Swiglu(width, "bfloat16") for width in (16, 24)]
    folders = {compiled(kernel, arch).folder for kernel in kernels for arch in ("sm_80", "sm_86")}
    forget()
    monkeypatch.setattr(toolchain, "_source", lambda _: b"another source")
    folders.add(compiled(kernels[0], "sm_80").folder)
    assert len(folders) == 5 and {path.parent for path in folders} == {cache}


@dataclass(frozen=True)
class Twice:
    """Not of this package: y = factor * x for 32 numbers, through shared memory."""

    launches: int = 1
    threads: int = 32

    def arguments(self):
        x, y = (Argument(name, "float32", (32,)) for name in "xy")
        return x, Scalar("factor", "float32"), None, y

    def grid(self, *_):
        return 1, 1, 1

    @cute.jit
    def __call__(self, x: cute.Tensor, factor: Float32, nothing, y: cute.Tensor, stream):
        for _ in cutlass.range_constexpr(self.launches):
            self.kernel(x, factor, nothing, y).launch(grid=self.grid(), block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, factor: Float32, nothing, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        held = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(32), 16)
        held[31 - thread] = x[thread] * factor
        cute.arch.sync_threads()
        y[thread] = held[31 - thread]


def test_a_kernel_of_a_reader_takes_scalars_and_nothing_and_stays_off_the_disk(cache):
    x, y = torch.randn(32), torch.full((32,), torch.nan)
    kernel = Twice()
    launch(kernel, x, 2.5, None, y)
    assert torch.equal(y, 2.5 * x)
    assert compiled(kernel, "sm_86").shared_bytes == 128 and compiled(SMALL, "sm_86").shared_bytes == 0
    assert [path.name for path in cache.iterdir()] == [compiled(SMALL, "sm_86").folder.name]
    assert compiled(Twice(), "sm_86") is not compiled(kernel, "sm_86"), "a cell run again must be compiled again"


@on_cpu
def test_without_a_gpu_one_is_told_so():
    with pytest.raises(KernelError, match="no NVIDIA GPU here"):
        compiled(SMALL)
    with pytest.raises(KernelError, match="runs on an NVIDIA GPU and its tensors are on the CPU"):
        swiglu(torch.ones(1, 16).bfloat16())
    with pytest.raises(KernelError, match="needs all its tensors on one cuda device and got them on cpu"):
        compiled(SMALL, "sm_86")(torch.ones(1, 16).bfloat16(), torch.ones(1, 8).bfloat16())


def test_too_old_a_gpu_is_named(monkeypatch):
    toolchain._gpu_arch.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(KernelError, match="Tesla T4 is too old"):
        compiled(SMALL)
    for capability, arch in (((8, 6), "sm_86"), ((9, 0), "sm_90a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert toolchain._gpu_arch() == arch
        toolchain._gpu_arch.cache_clear()


def test_without_cutlass_references_work_and_kernels_say_what_to_install():
    script = """
import sys
sys.modules["cutlass"] = None
import torch
from rlcourse.kernels import KernelError
from rlcourse.course.kernels.rms_norm import RMSNorm, rms_norm_reference
from rlcourse.kernels.toolchain import compiled
assert rms_norm_reference(torch.ones(2, 8), torch.ones(8), 0.0).eq(1).all()
try:
    compiled(RMSNorm(896, "bfloat16"), "sm_86")
except KernelError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert "pip install 'rlcourse[kernels]'" in done.stdout, done.stderr[-1000:]


def test_what_cannot_be_launched_is_described_in_a_sentence():
    x, weight = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    kernel = RMSNorm(64, "bfloat16")
    wide = torch.ones(2, 72, dtype=torch.bfloat16)
    for tensors, message in (
        ((x, None, weight), "takes 4 arguments and got 3"),
        ((x, x, weight, x), "takes no tensor where it got"),
        ((x, None, weight, None), "y of RMSNorm must be a tensor and is NoneType"),
        ((x, None, weight.float(), x), "weight of RMSNorm must be bfloat16 and is float32"),
        ((x[0], None, weight, x), r"x of RMSNorm must have shape \[rows, 64\] and has \[64\]"),
        ((x, None, weight, x[:1]), r"y of RMSNorm must have shape \[2, 64\] and has \[1, 64\]"),
        ((x, None, weight, wide[:, :64]), "y of RMSNorm must have stride 64 and has stride 72 in dimension 0"),
        ((wide[:, 1:65], None, weight, x), "x of RMSNorm begins at an address that 16 does not divide"),
        ((torch.ones(2, 65).bfloat16()[:, :64], None, weight, x), "stride 65 in dimension 0, which 16-byte loads"),
    ):
        with pytest.raises(KernelError, match=message):
            simulate(kernel, *tensors)
    with pytest.raises(KernelError, match="bfloat16 or float16"), interpreted():
        rms_norm(x.float(), weight.float(), 1e-6)
    with pytest.raises(KernelError, match="must launch once, this one launches 2 times"):
        compiled(Twice(launches=2), "sm_86")


def test_a_workspace_stays_and_is_not_made_during_capture(monkeypatch):
    device = torch.device("cpu")
    first = workspace((3, 2), torch.float32, device, "test")
    assert workspace((3, 2), torch.float32, device, "test") is first and not first.any()
    assert workspace((3, 2), torch.float32, device, "another") is not first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="call it once before capturing"):
        workspace((3, 2), torch.float32, torch.device("cuda"), "new")
