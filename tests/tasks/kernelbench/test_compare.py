"""What passes for right: other orders of summation do, a lower precision and everything else do not."""

import pytest
import torch

from rlcourse.tasks.kernelbench.compare import Expected, expect, fault, some_chunks


class Product(torch.nn.Module):
    def forward(self, x, y):
        return x @ y


def reason(output: torch.Tensor, expected: Expected) -> str:
    found = fault([output], expected)
    return found[0] if found else ""


@pytest.fixture(params=[torch.rand, torch.randn], ids=["positive", "centred"])
def case(request):
    torch.manual_seed(0)
    inputs = [request.param(64, 512), request.param(512, 64)]
    return inputs, expect(Product(), inputs)


def in_order(x, y):
    """A product that adds up one after the other, as the simplest kernel does."""
    total = torch.zeros(x.shape[0], y.shape[1])
    for k in range(x.shape[1]):
        total += x[:, k : k + 1] * y[k]
    return total


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """x with the ten bits of mantissa that a tensor core keeps of it."""
    return ((x.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def test_right_products_pass_in_any_order(case):
    (x, y), expected = case
    assert reason(x @ y, expected) == reason(in_order(x, y), expected) == reason((y.T @ x.T).T, expected) == ""


def test_lower_precision_is_seen(case):
    (x, y), expected = case
    for output in (as_tf32(x) @ as_tf32(y), (x.half() @ y.half()).float(), (x.bfloat16() @ y.bfloat16()).float()):
        assert reason(output, expected) in ("wrong", "precision")


def test_what_is_wrong_is_named(case):
    (x, y), expected = case
    right = x @ y
    some = right.clone()
    some[3, 4] += 0.1 + right.abs().max() / 100
    hole = right.clone()
    hole[0, 0] = float("nan")
    assert reason(some, expected) == "wrong"
    assert reason(hole, expected) == "not finite"
    assert reason(right[:-1], expected) == "wrong shape"
    assert reason(right.double(), expected) == "wrong dtype"
    assert fault([right, right], expected)[0] == "wrong shape"
    assert reason(torch.zeros_like(right), expected) == "wrong"


def test_half_precision_is_judged_as_half_precision():
    x, y = torch.randn(32, 128).half(), torch.randn(128, 32).half()
    expected = expect(Product(), [x, y])
    assert reason((x.float() @ y.float()).half(), expected) == ""
    assert reason((x.float() @ y.float()).half() * 1.03, expected) != ""


def test_whole_numbers_must_be_equal():
    expected = expect(torch.nn.Identity(), [torch.arange(10)])
    assert reason(torch.arange(10), expected) == ""
    assert reason(torch.arange(10) + torch.eye(10, dtype=torch.int64)[3], expected) == "wrong"


def test_inputs_are_not_touched_and_guesses_are_known():
    class Edits(torch.nn.Module):
        def forward(self, x):
            return x.zero_() + 1

    x = torch.rand(4, 4)
    before = x.clone()
    assert not expect(Edits(), [x]).telling and torch.equal(x, before)
    assert not expect(torch.nn.Identity(), [x]).telling
    assert not expect(torch.nn.Flatten(), [x]).telling
    assert expect(torch.nn.Tanh(), [3 * x]).telling
    assert not expect(Product(), [x, torch.full((4, 4), float("inf"))]).finite


def test_chunks_are_drawn_anew_and_cover_a_small_tensor():
    assert some_chunks(torch.empty(1000)) == list(range(250))
    assert some_chunks(torch.empty(0)) == []
    large = torch.empty(1, device="meta").expand(1 << 30)
    drawn = [tuple(some_chunks(large)) for _ in range(8)]
    assert len(set(drawn)) > 1 and all(len(numbers) == 2 for numbers in drawn)
