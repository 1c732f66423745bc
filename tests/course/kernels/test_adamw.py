"""AdamW over a flat buffer against torch.optim.AdamW, over many steps."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from launching import launch, run

from rlcourse.course.kernels.adamw import AdamW, adamw, adamw_reference
from rlcourse.kernels import KernelError

LR, DECAY = 3e-3, 0.1


def state(n, seed=0):
    torch.manual_seed(seed)
    master = torch.randn(n)
    return [master, torch.zeros(n), torch.zeros(n), torch.full((n,), torch.nan, dtype=torch.bfloat16)]


def call(*arguments):
    """The operation, which gives nothing back; it changes its tensors."""
    return run(lambda *t: (adamw(*t), t[1])[1], *arguments)


@pytest.mark.parametrize(
    ("n", "steps", "dtype"), [(1, 3, torch.float32), (7, 3, torch.float16), (1031, 20, torch.bfloat16)]
)
def test_many_steps_are_those_of_torch(n, steps, dtype):
    master, mean, square, weight = state(n)
    theirs = master.double().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for step in range(1, steps + 1):
        theirs.grad = (torch.randn(n) * 10.0 ** torch.randint(-4, 2, (n,))).to(dtype).double()
        optimizer.param_groups[0]["lr"] = lr = LR / step  # as a schedule does
        optimizer.step()
        call(theirs.grad.to(dtype), master, mean, square, weight, step, lr, 0.9, 0.95, 1e-8, DECAY)
        assert torch.equal(weight, master.bfloat16())
    torch.testing.assert_close(master.double(), theirs.detach(), rtol=1e-5, atol=1e-6)
    kept = optimizer.state[theirs]
    torch.testing.assert_close(mean.double(), kept["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(square.double(), kept["exp_avg_sq"], rtol=1e-5, atol=0)


def test_one_step_is_that_of_the_reference():
    ours, grad = state(300), torch.randn(300).bfloat16()
    expected = [t.clone() for t in ours]
    arguments = (4, LR, 0.8, 0.99, 1e-3, DECAY)
    for tensors in (ours, expected):
        tensors[1].normal_(generator=torch.manual_seed(5))
        tensors[2].uniform_(generator=torch.manual_seed(6))
    call(grad, *ours, *arguments)
    adamw_reference(grad, *expected, *arguments)
    for found, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2**-8 if right.dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_steps_too_small_for_16_bits_add_up():
    master, mean, square, weight = state(8)
    master.fill_(1.0)
    for step in range(1, 9):
        call(torch.ones(8).bfloat16(), master, mean, square, weight, step, 1e-3, 0.9, 0.999, 1e-8, 0.0)
    assert torch.allclose(master, torch.tensor(1 - 8e-3), atol=1e-6) and (weight == 0.9921875).all()
    assert torch.tensor(1.0).bfloat16() - 1e-3 == 1, "each step alone is lost in 16 bits"


def test_a_gradient_of_zero_leaves_the_decay_alone():
    master, mean, square, weight = state(16)
    before = master.clone()
    call(torch.zeros(16).bfloat16(), master, mean, square, weight, 1, LR, 0.9, 0.999, 1e-8, DECAY)
    torch.testing.assert_close(master, before * (1 - LR * DECAY))
    assert not mean.any() and not square.any()


def test_nothing_beside_the_buffer_is_touched():
    ours, grad = state(4096 + 3), torch.randn(4096 + 3).bfloat16()
    tensors = [t[:1003] for t in (grad, *ours)]
    before = [t[1003:].clone() for t in ours]
    launch(AdamW("bfloat16", "bfloat16"), *tensors, 1e-3, 1.0, 1.0)
    for whole, rest in zip(ours, before, strict=True):
        assert torch.equal(whole[1003:].nan_to_num(), rest.nan_to_num()) and whole[:1003].isfinite().all()
    call(grad[:0], *(t[:0] for t in ours), 1, LR)
    with pytest.raises(KernelError, match="counts steps from 1 and got 0"):
        call(grad, *ours, 0, LR)
