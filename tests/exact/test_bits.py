"""Engine and training pass give the same log-probs, to the last bit: on a GPU where they are said to."""

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

from policies import DEVICE, make_policy

from rlcourse.batch import Rollout
from rlcourse.exact.model import ExactPass
from rlcourse.exact.weights import fused_weights, is_exact
from rlcourse.logprobs import token_logprobs
from rlcourse.rollout import make_engine
from rlcourse.rollout.gpu_engine import GPUEngine
from rlcourse.rollout.torch_engine import TorchEngine
from rlcourse.sampling import GREEDY, Sampling

HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="The bits were checked on Hopper alone")

SHAPES = {
    "qwen2": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 32},
    "qwen2.5-0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "head_dim": 64,
        "num_hidden_layers": 3,
    },
    "qwen3": {
        "architecture": "qwen3", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 128, "tied": False,
    },
    "llama-3.2-1b": {
        "architecture": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64,
    },
    "llama, untied": {
        "architecture": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 128, "tied": False,
    },
}  # fmt: skip
VOCABULARY = 5000


def policy_of(shape: str, end: float = 0.02):
    """A policy of a shape that ends an answer with a share of its tokens, so that slots are refilled and move."""
    policy = make_policy(0, max_position_embeddings=1024, vocab_size=VOCABULARY, **SHAPES[shape])
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() == 2:  # initialised for width 32
                parameter.mul_((32 / parameter.shape[1]) ** 0.5)
    ends = list(range(7, VOCABULARY, round(1 / end))) if end else [VOCABULARY]
    return dataclasses.replace(policy, eos_ids=ends)


def prompts_of(count: int, longest: int) -> list[list[int]]:
    """Prompts of one token to `longest`, the edges of the tiles among them."""
    edges = [n for n in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257) if n <= longest]
    lengths = list(itertools.islice(itertools.cycle(edges), count))
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def trained(policy, rollout: Rollout, sampling: Sampling, chunk: int = 4096) -> torch.Tensor:
    with torch.no_grad():
        return ExactPass(policy.model, torch.bfloat16).token_logprobs(rollout, sampling, chunk)[0]


def assert_equal(policy, rollout, sampling) -> None:
    mask = rollout.completion_mask
    assert torch.equal(trained(policy, rollout, sampling)[mask], rollout.logprobs[mask])
    rows = torch.arange(len(mask), device=mask.device).split(max(1, len(mask) // 3))  # micro-batches
    for part in (rollout[some] for some in rows):
        found = trained(policy, part, sampling, chunk=100)
        assert torch.equal(found[part.completion_mask], part.logprobs[part.completion_mask])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 16, 17, 96, 97, 256, 257])
def test_rows(shape, rows):
    policy = policy_of(shape)
    engine = GPUEngine(policy, torch.bfloat16)
    assert engine.exact
    torch.manual_seed(rows)
    prompts = prompts_of(rows, 257)
    for _ in range(3):  # eagerly, captured, replayed
        assert_equal(policy, engine.generate(prompts, 1, 40, Sampling()), Sampling())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [5, 40, 200])
def test_products_in_cute_dsl_are_used_and_agree_with_triton(shape, rows):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from rlcourse.rollout import cute_products

    engine, others = (GPUEngine(policy_of(shape), torch.bfloat16, cute=cute) for cute in (True, False))
    assert engine.exact and others.exact
    prompts, rollouts = prompts_of(rows, 129), []
    for one in (engine, engine, others):
        torch.manual_seed(rows)
        rollouts.append(one.generate(prompts, 1, 30, Sampling()))
    assert others.step.products is None
    for found in rollouts[1:]:
        assert torch.equal(found.ids, rollouts[0].ids) and torch.equal(found.logprobs, rollouts[0].logprobs)
    tiles = cute_products.cute_tiles(rows, engine.step.hidden, engine.weights.layers[0].q_norm is not None)
    kernels = [engine.step.products.kernel(name, rows) for name in tiles]
    kernels = [kernel for kernel in kernels if kernel is not None]
    assert bool(kernels) == bool(tiles) and all(cute_products._agree[kernel] for kernel in kernels)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.6), Sampling(top_k=20), Sampling(0.8, top_p=0.9)])
def test_sampling_with_refilled_slots_that_share_prompts(shape, sampling):
    policy = policy_of(shape, 0.05)
    engine = GPUEngine(policy, torch.bfloat16, max_slots=24)
    prompts = prompts_of(12, 129)
    torch.manual_seed(0)
    for _ in range(2):
        rollout = engine.generate(prompts, 8, 150, sampling)
        assert_equal(policy, rollout, sampling)


def test_after_an_update_and_after_sleep():
    policy = policy_of("qwen2")
    engine = GPUEngine(policy, torch.bfloat16)
    prompts = prompts_of(8, 65)
    for _ in range(3):
        assert_equal(policy, engine.generate(prompts, 2, 30, Sampling()), Sampling())
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        engine.sleep()


@pytest.mark.parametrize("shape", ["qwen2", "llama-3.2-1b", "llama, untied"])
def test_a_cache_of_a_budget(shape):
    policy = policy_of(shape, 0.05)
    engine = make_engine(policy, "fast", torch.bfloat16, cache_gb=0.2)
    prompts = prompts_of(12, 257)
    for _ in range(3):  # eagerly, captured, replayed; from the second time on blocks of prompts are found again
        assert_equal(policy, engine.generate(prompts, 4, 150, Sampling()), Sampling())


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_the_same_bits_each_time_and_near_those_in_float32(shape):
    policy = policy_of(shape)
    rollout = GPUEngine(policy, torch.bfloat16).generate(prompts_of(16, 129), 2, 50, Sampling())
    torch.manual_seed(0)
    weights = torch.randn_like(rollout.logprobs) * rollout.completion_mask

    def gradients(logprobs) -> torch.Tensor:
        policy.model.zero_grad()
        (logprobs(rollout, Sampling(), 300)[0] * weights).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters()])

    once, again, recomputed = (
        gradients(ExactPass(policy.model, torch.bfloat16, recompute).token_logprobs)
        for recompute in (False, False, True)
    )
    assert torch.equal(once, again) and (once - recomputed).norm() < 0.02 * once.norm()
    plain = gradients(lambda *a: token_logprobs(policy.model, *a))
    assert (once - plain).norm() < 0.1 * plain.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_captured_passes_have_the_same_bits(shape):
    """Batches of several sizes, each of them eagerly, captured and replayed, with weights that change between."""
    policy = policy_of(shape, end=0)  # answers of full length, so that sizes come again
    exact = ExactPass(policy.model, torch.bfloat16)
    graphs = exact.captured
    for number in range(6):
        count = (12, 30)[number % 2]
        rollout = GPUEngine(policy, torch.bfloat16).generate(prompts_of(count, 129), 2, 50, Sampling())
        weights = torch.randn_like(rollout.logprobs) * rollout.completion_mask
        found = []
        for ready in (graphs.ready, lambda *_: False):
            graphs.ready = ready
            policy.model.zero_grad()
            logprobs, _ = exact.token_logprobs(rollout, Sampling(), 300)
            (logprobs * weights).sum().backward()
            found.append([logprobs.detach(), *(p.grad.clone() for p in policy.model.parameters())])
        del graphs.ready
        assert all(map(torch.equal, *found))
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.01 * parameter.std() * torch.randn_like(parameter))
    assert len(graphs.pairs) == 2


def test_what_is_not_said_to_be_exact():
    policy = policy_of("qwen2")
    assert not TorchEngine(policy, torch.bfloat16).exact
    assert not is_exact(fused_weights(policy.model, torch.float32))


def test_weights_taken_over_by_a_graph_are_those_of_the_model_now():
    from rlcourse.lora import add_adapter

    model = policy_of("qwen2.5-0.5b").model
    weights = fused_weights(model, torch.bfloat16)

    def taken_over() -> bool:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        before = weights.same_as(model)
        weights.sync(model)
        return not before and weights.same_as(model)

    assert all(taken_over() for _ in range(3)) and weights.graphs.graphs
    with torch.no_grad():
        for parameter in model.parameters():  # now elsewhere in memory
            parameter.data = parameter.clone()
    assert all(taken_over() for _ in range(3))
    add_adapter(model, "base", 4, 8.0, "q_proj")
    for name, parameter in model.named_parameters():
        parameter.data += 0.5 if ".lora_" in name else 0.0
    assert all(taken_over() for _ in range(3))
