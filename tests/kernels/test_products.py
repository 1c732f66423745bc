"""The products of a decode step in CuTe DSL: they compile for Hopper as they must, and are chosen and compared."""

import re

import pytest
import torch
from policies import make_policy
from thorough import thinned

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from rlcourse.exact.products import share_of
from rlcourse.exact.weights import fused_weights
from rlcourse.kernels import KernelError
from rlcourse.kernels.add_product import AddProduct
from rlcourse.kernels.gate_up import GateUp
from rlcourse.kernels.products import Product
from rlcourse.kernels.qkv import QKV
from rlcourse.kernels.toolchain import compiled
from rlcourse.rollout import cute_products
from rlcourse.rollout.cute_products import CuteProducts, cute_tiles

SHAPES = {  # hidden, inner, heads, key-value heads, size of a head, vocabulary, bias, norm of queries and keys
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64, 151936, True, False),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, 151936, False, True),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64, 128256, False, False),
}


def kernels_of(shape: str, rows: int) -> set:
    """The kernels that a step of this shape uses."""
    hidden, inner, heads, kv_heads, size, vocabulary, bias, norm = SHAPES[shape]
    make = {
        "qkv": lambda tile: QKV(heads, kv_heads, size, hidden, 1e-6, bias, norm, 128, *tile[:3]),
        "gate_up": lambda tile: GateUp(inner, hidden, 1e-6, *tile[:3], rows_first=tile.rows_first),
        "head": lambda tile: Product(vocabulary, hidden, *tile[:3]),
        "out": lambda tile: AddProduct(hidden, heads * size, heads * size, *tile[:3]),
        "down": lambda tile: AddProduct(hidden, inner, share_of(inner), *tile[:3]),
    }
    return {make[name](tile) for name, tile in cute_tiles(rows, hidden, norm).items()}


ALL = sorted(set().union(*(kernels_of(shape, rows) for shape in SHAPES for rows in (16, 256))), key=str)


@pytest.mark.parametrize("kernel", thinned(ALL, every=4), ids=str)
def test_products_compile_for_hopper(kernel):
    code = compiled(kernel, "sm_90a")
    assert code.stack_bytes == 0 and ".local" not in code.ptx, "a thread's numbers stay in registers"
    assert code.registers * kernel.threads <= 65536 and code.shared_bytes <= 227 * 1024
    assert "wgmma.mma_async" in code.ptx and "cp.async.bulk.tensor" in code.ptx
    assert "fma.rn.f32" not in code.ptx, "a product and a sum are two roundings, as in the training pass"
    waits, stores = (code.ptx.index(word) for word in ("griddepcontrol.wait", "st.global"))
    assert waits < stores, "nothing is written before the kernel before has ended"
    assert code.ptx.count("griddepcontrol.wait") == 2, "warps that load and warps that multiply wait for it"
    shared = isinstance(kernel, AddProduct) and kernel.shares > 1
    assert code.ptx.count("barrier.cluster.wait") == (2 if shared else 0), "until sums are there, and have been read"
    assert re.search(r"\.reqntid (\d+)", code.ptx)[1] == str(kernel.threads)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AddProduct(96, 256, 256),
        lambda: AddProduct(128, 256, 256, stages=15),
        lambda: GateUp(324, 128),
        lambda: GateUp(320, 128, tile_columns=128, tile_rows=256, stages=1),
        lambda: Product(100, 128),
        lambda: QKV(1, 1, 32, 128),
        lambda: QKV(2, 1, 64, 128, norm=True, tile_columns=128, tile_rows=128, stages=7),
    ],
)
def test_what_does_not_come_in_tiles_or_fit_is_refused(make):
    with pytest.raises(KernelError, match="does not come in whole tiles"):
        make()
    QKV(2, 1, 64, 128, tile_columns=128, tile_rows=128, stages=7)  # what just fits
    AddProduct(128, 256, 256, stages=14)
    Product(128, 128, tile_rows=256, stages=5)


def test_the_kernels_of_a_model_are_chosen_by_its_shape():
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2, "head_dim": 64}
    policy = make_policy(0, **sizes)
    chosen = CuteProducts(fused_weights(policy.model, torch.bfloat16))
    tiles = cute_tiles(64, 128, normed=False)
    found = {name: chosen.kernel(name, 64) for name in tiles}
    assert found["down"] == AddProduct(128, 384, 128, *tiles["down"][:3]) and found["down"].shares == 3
    assert found["qkv"] is not None and found["qkv"].block == 128
    assert found["gate_up"] == GateUp(384, 128, policy.model.config.rms_norm_eps, *tiles["gate_up"][:3])
    assert found["out"] == AddProduct(128, 128, 128, *tiles["out"][:3])
    head = tiles["head"]
    assert chosen.kernel("head", head.rows) == Product(policy.model.config.vocab_size // 8 * 8, 128, *head[:3])
    assert chosen.kernel("head", head.rows + 1) is None, "its weights would be read twice"
    assert chosen.kernel("out", 16) is chosen.kernel("down", 16) is None and chosen.kernel("out", 17) is not None
    in_float32 = CuteProducts(fused_weights(policy.model, torch.float32))
    assert all(in_float32.kernel(name, 64) is None for name in tiles), "Triton's kernels are for all dtypes"


class Launches:
    """Stands for the launch of a kernel: adds `amount` to x and writes y."""

    def __init__(self, monkeypatch, amount: float):
        self.x, self.y, self.amount, self.kernel, self.calls = torch.zeros(2), torch.zeros(2), amount, object(), []
        monkeypatch.setattr(cute_products, "_agree", {})
        monkeypatch.setattr(cute_products, "launch", lambda *a: self.computed("cute", self.amount))

    def computed(self, who: str, amount: float) -> None:
        self.calls.append(who)
        self.x += amount
        self.y[:] = 3 * self.x

    def run(self) -> None:
        cute_products.run(self.kernel, (), lambda: self.computed("triton", 1.0), lambda: [self.x, self.y], self.x)


def test_a_kernel_that_agrees_is_used_from_its_second_launch_on(monkeypatch):
    launches = Launches(monkeypatch, 1.0)
    for step in range(1, 4):
        launches.run()
        assert launches.x.tolist() == [step, step] and launches.y.tolist() == [3 * step, 3 * step]
    assert launches.calls == ["cute", "triton", "cute", "cute"]


@pytest.mark.parametrize("compiles", [True, False])
def test_a_kernel_that_differs_in_one_bit_or_does_not_compile_here_is_never_used(compiles, monkeypatch):
    launches = Launches(monkeypatch, 1.0 + 2**-20)

    def fail(*_):
        launches.computed("cute", 5.0)
        raise AttributeError("module 'cutlass' has no attribute 'memory'")

    if not compiles:
        monkeypatch.setattr(cute_products, "launch", fail)
    said = "rounds otherwise" if compiles else "does not run here, and a slower kernel is used: module 'cutlass'"
    with pytest.warns(UserWarning, match=said):
        launches.run()
    launches.run()
    assert launches.x.tolist() == [2.0, 2.0] and launches.calls == ["cute", "triton", "triton"]


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch):
    launches = Launches(monkeypatch, 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launches.run()
    assert launches.calls == ["triton"]


def test_bits_are_compared_and_not_numbers():
    nan = torch.tensor([float("nan")])
    assert cute_products.same_bits(nan, nan.clone())
    assert not cute_products.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not cute_products.same_bits(torch.ones(2).bfloat16(), torch.tensor([1, 1 + 2**-7]).bfloat16())
