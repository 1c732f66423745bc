"""Log-probs against a float64 model that sees each row alone, without padding, and a softmax in Python floats."""

import copy
from dataclasses import replace

import pytest
import torch
from policies import DEVICE, logprobs_alone, make_policy, rollout_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcourse import logprobs as module
from rlcourse.logprobs import chunked_logprobs, token_logprobs
from rlcourse.sampling import Sampling

SAMPLINGS = [Sampling(), Sampling(0.7), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(1.3, top_k=7, top_p=0.9)]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16], [17, 18]]
LENGTHS = [6, 3, 1, 5, 0, 6]
T = 6


@pytest.fixture(scope="module")
def model():
    return make_policy(tied=False).model


def counted():
    """Token 20 + t at place t of each completion."""
    return rollout_of([(prompt, [*range(20, 20 + n)]) for prompt, n in zip(PROMPTS, LENGTHS, strict=True)])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probs_states_and_gradients_are_those_of_each_row_alone(model, sampling, checkpointing):
    exact, policy = copy.deepcopy(model).double(), copy.deepcopy(model).train()
    if checkpointing:
        policy.gradient_checkpointing_enable()
    weights = torch.randn(len(PROMPTS), T, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rollout, loss = counted(), 0.0
    logprobs, hidden = token_logprobs(policy, rollout, sampling, chunk=4)
    for i, (prompt, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        if n:
            completion = [*range(20, 20 + n)]
            alone = logprobs_alone(exact, prompt, completion, sampling)
            ids = torch.tensor([prompt + completion], device=DEVICE)
            states = exact.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(logprobs[i, :n].double(), alone, rtol=0, atol=2e-5)
            torch.testing.assert_close(hidden[i, :n].double(), states, rtol=1e-4, atol=2e-5)
            loss = loss + (weights[i, :n] * alone).sum()
    assert logprobs.dtype == torch.float32 and logprobs[~rollout.completion_mask].eq(0).all()
    loss.backward()
    (logprobs * weights).sum().backward()
    for (name, ours), theirs in zip(policy.named_parameters(), exact.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=1e-4 * scale + 1e-6, msg=name)


def test_a_batch_without_a_single_token_can_be_trained_on(model):
    policy = copy.deepcopy(model)
    rollout = counted()[torch.tensor([0, 4], device=DEVICE)]
    rollout = type(rollout)(**vars(rollout) | {"completion_lengths": torch.tensor([0, 0], device=DEVICE)})
    logprobs, hidden = token_logprobs(policy, rollout, Sampling(), 4)
    assert logprobs.eq(0).all() and hidden.shape == (2, T, 32)
    logprobs.sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in policy.parameters())


def test_the_head_runs_in_bfloat16_under_autocast_and_the_softmax_in_float32():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 16, generator=generator), torch.randn(50, 16, generator=generator)
    targets = torch.arange(9)
    head.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs = chunked_logprobs(hidden, head, targets, Sampling(), 4)
        logprobs.sum().backward()
    logits = (hidden.bfloat16() @ head.bfloat16().T).double()
    assert logprobs.dtype == head.grad.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), logits.log_softmax(-1)[range(9), range(9)], rtol=0, atol=1e-5)


class Memory(TorchDispatchMode):
    """Follows every tensor that an operation returns: shapes, the largest, and the most bytes alive at once."""

    def __init__(self):
        super().__init__()
        self.largest, self.peak, self.alive, self.shapes = 0, 0, {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, tensor.numel())
                self.shapes.append(tuple(tensor.shape))
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def test_full_vocabulary_logits_never_stand_in_memory():
    n, vocabulary, chunk = 512, 5_000, 32
    hidden, head = torch.randn(n, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(vocabulary, (n,))
    memory = {}
    for size in (chunk, n):
        with Memory() as memory[size]:
            chunked_logprobs(hidden, head, targets, Sampling(), size).sum().backward()
    logits = 4 * n * vocabulary  # bytes
    assert memory[n].largest == n * vocabulary and memory[n].peak >= 2 * logits  # the measurement sees them
    assert memory[chunk].largest == chunk * vocabulary
    assert memory[chunk].peak < logits / 2


class SaysItIsOnAGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("extra", [0, 1])
def test_sequences_that_are_wider_on_a_gpu_have_the_same_hidden_states(extra, policy, monkeypatch):
    """The padding of `WIDTH_ON_GPU`."""
    rollout = rollout_of([([5, 9, 40], [7, 8, 3]), ([4], [6])])
    width = rollout.ids.shape[1] + extra
    monkeypatch.setattr(module, "WIDTH_ON_GPU", width)
    widths, decoder = [], policy.model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda module, args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    expected = module.hidden_states(policy.model, rollout)
    found = module.hidden_states(policy.model, replace(rollout, ids=rollout.ids.as_subclass(SaysItIsOnAGPU)))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
    assert widths == [rollout.ids.shape[1], width]
