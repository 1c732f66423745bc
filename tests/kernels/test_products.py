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
from rlcourse.kernels.add_product import AddProduct, add_product_reference
from rlcourse.kernels.gate_up import GateUp, gate_up_reference
from rlcourse.kernels.product import Product, product_reference
from rlcourse.kernels.qkv import QKV, qkv_reference
from rlcourse.kernels.toolchain import compiled
from rlcourse.rollout import cute_products
from rlcourse.rollout.cute_products import NARROW, CuteProducts, cute_tiles

SHAPES = {  # hidden, inner, heads, key-value heads, size of a head, vocabulary, bias, norm of queries and keys
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64, 151936, True, False),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, 151936, False, True),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64, 128256, False, False),
}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def kernels_of(shape: str, rows: int) -> set:
    """The kernels that a step of this shape uses."""
    hidden, inner, heads, kv_heads, size, vocabulary, bias, norm = SHAPES[shape]
    make = {
        "qkv": lambda tile: QKV(heads, kv_heads, size, hidden, 1e-6, bias, norm, 0, *tile[:3]),
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


needs_hopper = pytest.mark.skipif(not HOPPER, reason="They run on Hopper alone")
rows = pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 256, 257])


def drawn(*shape: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


def close(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == right.dtype and not found.isnan().any()
    error = (found.double() - right.double()).norm() / right.double().norm()
    assert error < (1e-3 if dtype == torch.float16 or found.dtype == torch.float32 else 6e-3)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@rows
def test_products_compute_what_their_references_do(rows, dtype):
    """x is added to. Depths whose last tile, and last share, are not full."""
    torch.manual_seed(rows)
    name, d = str(dtype).removeprefix("torch."), 256
    for depth, share, tile in (
        (1352, 384, (64, 64, 5)), (200, 256, (128, 16, 4)), (520, 256, (64, 128, 6)), (712, 384, (64, 32, 9)),
    ):  # fmt: skip
        a, w = drawn(rows, depth, dtype=dtype), drawn(d, depth, dtype=dtype, scale=0.05)
        x, norm, y, squares = drawn(rows, d), drawn(d), poisoned(rows, d, dtype=dtype), drawn(rows, d // 32)
        right = add_product_reference(a, w, x, norm, share)
        compiled(AddProduct(d, depth, share, *tile, name))(a, w, x, norm, y, squares)
        for found, wanted in zip((x, y, squares), right, strict=True):
            close(found, wanted, dtype)
    y, w = drawn(rows, d, dtype=dtype), drawn(2 * 328, d, dtype=dtype, scale=0.05)
    squares = torch.rand(rows, d // 32, device="cuda") * 60
    for tile, rows_first in (
        ((48, 64, 5), True), ((80, 64, 5), True), ((160, 128, 4), True),
        ((64, 16, 5), False), ((128, 64, 4), False), ((192, 128, 3), False),
    ):  # fmt: skip
        h = poisoned(rows, 328, dtype=dtype)
        compiled(GateUp(328, d, 1e-6, *tile, name, rows_first))(y, squares, w, h)
        close(h, gate_up_reference(y, squares, w, 1e-6), dtype)
        if not rows_first:
            out = poisoned(rows, 656, dtype=dtype)
            compiled(Product(656, d, *tile, name))(y, w, out)
            close(out, product_reference(y, w), dtype)


@needs_hopper
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "norm"), [(6, 1, 64, False), (6, 1, 64, True), (2, 1, 128, True), (3, 1, 128, False)]
)
@rows
def test_queries_keys_and_values_come_where_they_belong(rows, heads, kv_heads, size, norm, paged):
    torch.manual_seed(rows)
    dtype, d, tokens, each = torch.bfloat16, 128, 384, torch.arange(rows, device="cuda")
    columns = (heads + 2 * kv_heads) * size
    y, w, bias = drawn(rows, d, dtype=dtype), drawn(columns, d, dtype=dtype, scale=0.1), drawn(columns, dtype=dtype)
    squares = torch.rand(rows, 4, device="cuda") * 60
    norms = [drawn(size) for _ in range(2)] if norm else [None, None]
    cos, sin = drawn(tokens, size // 2), drawn(tokens, size // 2)
    position = torch.randint(tokens, (rows,), device="cuda")
    q, owner, place = poisoned(rows, heads * size, dtype=dtype), (None, None), (each, position)
    if paged:
        table = torch.randperm(3 * rows, device="cuda").add(1).int().view(rows, 3)
        owner = torch.randperm(rows, device="cuda"), table
        place = table[owner[0], position // 128].long(), position % 128
    shape = (2, 3 * rows + 1 if paged else rows, kv_heads, 128 if paged else tokens, size)
    cache = torch.zeros(shape, device="cuda", dtype=dtype)
    expected = cache.clone()
    right = qkv_reference(y, squares, w, bias, *norms, cos[position], sin[position], heads, kv_heads, 1e-6)
    for which in range(2):
        expected[which, place[0], :, place[1]] = right[1 + which]
    tile = 128 if norm else 64, 16 if rows < 17 else 64, 4
    kernel = QKV(heads, kv_heads, size, d, 1e-6, True, norm, 128 if paged else 0, *tile)
    compiled(kernel)(y, squares, w, bias, *norms, cos, sin, position, *owner, q, cache)
    close(q, right[0].flatten(1), dtype)
    assert torch.equal(cache == 0, expected == 0), "one token of each row, and nothing else"
    close(cache, expected, dtype)


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


def test_what_just_fits_into_shared_memory_is_taken():
    QKV(2, 1, 64, 128, tile_columns=128, tile_rows=128, stages=7)
    AddProduct(128, 256, 256, stages=14)
    Product(128, 128, tile_rows=256, stages=5)


def test_the_kernels_of_a_model_are_chosen_by_its_shape():
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2, "head_dim": 64}
    policy = make_policy(0, **sizes)
    chosen = CuteProducts(fused_weights(policy.model, torch.bfloat16))
    found = {name: chosen.kernel(name, 64) for name in NARROW[1]}
    assert found["down"] == AddProduct(128, 384, 128, *NARROW[1]["down"][:3]) and found["down"].shares == 3
    assert found["qkv"] is not None and found["qkv"].block == 128
    assert found["gate_up"] == GateUp(384, 128, policy.model.config.rms_norm_eps, *NARROW[1]["gate_up"][:3])
    assert chosen.kernel("out", 64) == AddProduct(128, 128, 128, *NARROW[1]["out"][:3])
    head = NARROW[1]["head"]
    assert chosen.kernel("head", head.rows) == Product(policy.model.config.vocab_size // 8 * 8, 128, *head[:3])
    assert chosen.kernel("head", head.rows + 1) is None, "its weights would be read twice"
    assert chosen.kernel("out", 16) is chosen.kernel("down", 16) is None and chosen.kernel("out", 17) is not None
    in_float32 = CuteProducts(fused_weights(policy.model, torch.float32))
    assert all(in_float32.kernel(name, 64) is None for name in NARROW[1]), "Triton's kernels are for all dtypes"


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
