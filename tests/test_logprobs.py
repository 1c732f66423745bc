"""Log-probs against a float64 model that sees each row alone, without padding, and a softmax in Python floats."""

import copy
import math
import random

import pytest
import torch
from policies import rollout_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from rlcourse.logprobs import chunked_logprobs, token_logprobs
from rlcourse.sampling import Sampling, sampling_logits

SAMPLINGS = [Sampling(), Sampling(0.7), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(1.3, top_k=7, top_p=0.9)]
EOS, PAD, VOCABULARY = 1, 0, 41
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16], [17, 18]]
LENGTHS = [6, 3, 1, 5, 0, 6]  # 6 is the limit: no EOS; 1 is EOS at once; 0 is a row without a token
T = 6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # uneven distributions that depend on positions
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def exact(model):
    return copy.deepcopy(model).double()


def distribution(logits, sampling):
    """{token: probability} of the sampling distribution, in Python floats."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: sampling.top_k or None]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / sampling.temperature) for token in order}
    kept, mass = [], 0.0
    for token in order:
        if mass >= sampling.top_p * sum(weights.values()):
            break
        kept.append(token)
        mass += weights[token]
    return {token: weights[token] / mass for token in kept}


def sample(exact, sampling):
    """A rollout drawn by the exact model, row by row; lengths are as LENGTHS says, EOS being put in by hand."""
    chance, completions = random.Random(0), []
    for prompt, n in zip(PROMPTS, LENGTHS, strict=True):
        tokens = []
        while len(tokens) < n:
            with torch.no_grad():
                logits = exact(torch.tensor([prompt + tokens])).logits[0, -1].tolist()
            p = distribution(logits, sampling)
            p = {token: x for token, x in p.items() if token != EOS} or p
            tokens += chance.choices(list(p), list(p.values()))
        completions.append(tokens)
    return padded(completions)


def padded(completions, pad=PAD):
    return rollout_of(list(zip(PROMPTS, completions, strict=True)), pad=pad)


def counted(pad=PAD):
    """Token 20 + t at place t of each completion."""
    return padded([[20 + t for t in range(n)] for n in LENGTHS], pad)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probs_are_those_of_each_row_alone(model, exact, sampling):
    rollout = sample(exact, sampling)
    expected = torch.zeros(len(PROMPTS), T, dtype=torch.float64)
    states = torch.zeros(len(PROMPTS), T, 32, dtype=torch.float64)
    for i, (prompt, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        ids = prompt + rollout.completion_ids[i, :n].tolist()
        with torch.no_grad():
            output = exact(torch.tensor([ids]), output_hidden_states=True)
        for t in range(n):
            before = len(prompt) + t - 1
            p = distribution(output.logits[0, before].tolist(), sampling)
            expected[i, t] = math.log(p[ids[before + 1]])
            states[i, t] = output.hidden_states[-1][0, before]
    for chunk in (4, 1000):
        with torch.no_grad():
            logprobs, hidden = token_logprobs(model, rollout, sampling, chunk)
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
        mask = rollout.completion_mask
        torch.testing.assert_close(hidden[mask].double(), states[mask], rtol=1e-4, atol=1e-5)
        assert hidden.shape == states.shape
        assert logprobs[~mask].eq(0).all()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_parameter_gradients_are_those_of_each_row_alone(model, exact, sampling, checkpointing):
    rollout = sample(exact, sampling)
    weights = torch.randn(len(PROMPTS), T, generator=torch.Generator().manual_seed(0))
    reference = copy.deepcopy(exact)
    loss = 0.0
    for i, (prompt, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        ids = prompt + rollout.completion_ids[i, :n].tolist()
        logits = reference(torch.tensor([ids])).logits[0]
        for t in range(n):
            before = len(prompt) + t - 1
            kept = torch.tensor(sorted(distribution(logits[before].tolist(), sampling)))
            scaled = logits[before] / sampling.temperature
            loss = loss + weights[i, t] * (scaled[ids[before + 1]] - scaled[kept].logsumexp(0))
    loss.backward()

    policy = copy.deepcopy(model).train()
    if checkpointing:
        policy.gradient_checkpointing_enable()
        assert policy.model.layers[0].gradient_checkpointing
    logprobs, _ = token_logprobs(policy, rollout, sampling, chunk=4)
    (logprobs * weights).sum().backward()
    for (name, ours), theirs in zip(policy.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=1e-5 * scale, msg=name)


def test_positions_count_from_the_first_token():
    """GPT-2 adds positions to its input, so it shows a shift that relative positions hide; its head is tied."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=16, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    rollout = counted()
    with torch.no_grad():
        logprobs, _ = token_logprobs(model, rollout, Sampling(), 4)
        for i, (prompt, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            ids = torch.tensor(prompt + rollout.completion_ids[i, :n].tolist())
            alone = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            torch.testing.assert_close(logprobs[i, :n], alone[len(prompt) - 1 :], rtol=0, atol=1e-5)


def test_padding_changes_nothing_and_gets_no_gradient(model):
    """Its id appears nowhere else, and its embedding is not moved."""
    results = []
    for pad in (PAD, 30):
        policy = copy.deepcopy(model)
        logprobs, hidden = token_logprobs(policy, counted(pad), Sampling(), 4)
        logprobs.sum().backward()
        gradient = policy.get_input_embeddings().weight.grad
        results.append((logprobs, hidden[counted().completion_mask], gradient))
        assert gradient.isfinite().all() and gradient[pad].eq(0).all()
        assert gradient[[20, 24]].ne(0).any(1).all() and gradient[25].eq(0).all()  # 25 comes last: it predicts nothing
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_batch_without_a_single_token_can_be_trained_on(model):
    policy = copy.deepcopy(model)
    rollout = counted()[torch.tensor([0, 4])]
    rollout = type(rollout)(**vars(rollout) | {"completion_lengths": torch.tensor([0, 0])})
    logprobs, hidden = token_logprobs(policy, rollout, Sampling(), 4)
    assert logprobs.eq(0).all() and hidden.shape == (2, T, 32)
    logprobs.sum().backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in policy.parameters())


def plain_logprobs(hidden, head, targets, sampling):
    """The same with all logits at once."""
    logprobs = sampling_logits(hidden @ head.T, sampling, keep=targets).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 4, 11])
def test_chunks_change_neither_values_nor_gradients(n, sampling):
    generator = torch.Generator().manual_seed(n)
    hidden, weights = torch.randn(n, 16, generator=generator), torch.randn(n, generator=generator)
    head, targets = torch.randn(50, 16, generator=generator), torch.randint(50, (n,), generator=generator)
    results = []
    for function, chunk in [(plain_logprobs, ()), (chunked_logprobs, (4,)), (chunked_logprobs, (1000,))]:
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logprobs = function(h, w, targets, sampling, *chunk)
        (logprobs * weights).sum().backward()
        results.append((logprobs, h.grad, w.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-5)
        assert result[0].shape == (n,)


def test_a_token_outside_the_set_by_rounding_still_has_a_finite_log_prob():
    """The sampler may have drawn it: it counts as one more token of the set."""
    hidden, head = torch.eye(2), torch.tensor([[3.0, 0], [2, 0], [1, 0], [0, 0]])
    targets = torch.tensor([2, 0])
    logprobs = chunked_logprobs(hidden, head, targets, Sampling(top_k=2), 1)
    expected = 1 - math.log(math.exp(3) + math.exp(2) + math.exp(1))
    assert logprobs[0].item() == pytest.approx(expected, abs=1e-6)


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
