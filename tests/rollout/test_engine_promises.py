"""What every engine that runs on a CPU promises beside its tokens: no trace on the model, and an honest last token."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux alone")

import vllm_in_memory
import vllm_over_http
from policies import make_policy, rollout_of
from test_gpu_engine import Watched, small  # noqa: F401
from torch._dynamo.utils import counters

from rlcourse import rollout as engines
from rlcourse.logprobs import PlainPass
from rlcourse.rollout import make_engine
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import GREEDY, Sampling, sample_tokens, sampling_logits
from rlcourse.trial import checkpoint_activations

PROMPTS = [[5, 9, 40], [11, 30, 31, 32, 33]]
KERNELS = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 64}
ENGINES = ["hf-dynamic", "hf-static", "hf-none", "fast", "gpu", "gpu, little memory", "vllm", "vllm server"]


@pytest.fixture
def make(request, monkeypatch, tmp_path):
    """The engine of that name over a policy, on a GPU too."""

    def over(name: str, policy):
        if name.startswith("gpu"):
            request.getfixturevalue("small")
        else:
            monkeypatch.setattr(engines, "has_kernels", lambda weights: False)
        if name == "vllm" and not vllm_in_memory.is_there():
            vllm_in_memory.put_in(monkeypatch)
        if name == "vllm server":
            vllm_over_http.put_in(monkeypatch)
            return make_engine(policy, f"vllm@{vllm_over_http.Server(policy, str(tmp_path)).url}/", torch.float32)
        if name == "hf-none":
            return HFEngine(policy, cache="none")
        if name.startswith("gpu"):
            return Watched(policy, 8 if "little" in name else None)
        return make_engine(policy, name, torch.float32)

    return over


def policy_for(name: str):
    """As small as the engine allows."""
    return make_policy(3, **KERNELS if name.startswith(("gpu", "vllm")) else {})


def kept_for_backward(policy, rollout) -> int:
    """Numbers that a training pass over the rollout keeps for its backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        PlainPass(policy.model, "float32").token_logprobs(rollout, Sampling(), 4096)
    return sum(kept)


@pytest.mark.parametrize("name", ENGINES)
def test_generate_leaves_every_module_in_its_mode(name, make):
    """In eval mode transformers ignores gradient checkpointing: same results, three times the memory."""
    policy = policy_for(name)
    engine, rollout = make(name, policy), rollout_of([([5, 9, 40], [7, 8])] * 4)
    checkpoint_activations(policy.model)
    modes, kept = [module.training for module in policy.model.modules()], kept_for_backward(policy, rollout)
    engine.generate(PROMPTS[:1], 1, 2, GREEDY)
    assert [module.training for module in policy.model.modules()] == modes
    assert kept_for_backward(policy, rollout) == kept


@pytest.mark.parametrize("name", ENGINES)
def test_a_row_whose_last_allowed_token_is_eos_has_finished(name, make):
    policy = policy_for(name)
    most = 2
    free = make("hf-dynamic", policy).generate(PROMPTS, 1, most, GREEDY).completion_ids.tolist()
    row = next(i for i, tokens in enumerate(free) if tokens[-1] not in tokens[:-1])
    policy.eos_ids = [free[row][-1]]
    policy.model.generation_config.eos_token_id = policy.eos_ids
    rollout = make(name, policy).generate([PROMPTS[row]], 2, most, GREEDY)
    assert rollout.completion_ids.tolist() == 2 * [free[row]]
    assert rollout.completion_lengths.tolist() == [most, most] and rollout.finished.tolist() == [True, True]
    assert rollout.logprobs[:, -1].lt(0).all()


@torch.no_grad()
def test_top_k_and_top_p_are_one_graph_for_all_temperatures_and_rows():
    """A graph break, or a program for each temperature, would cost a GPU its CUDA graphs. Traced, not compiled."""
    torch._dynamo.reset()
    counters.clear()
    traced = torch.compile(sample_tokens, backend="eager", fullgraph=True, dynamic=True)
    for rows, temperature in ((3, 1.0), (7, 0.7), (12, 1.4)):
        logits, sampling = 3 * torch.randn(rows, 60), Sampling(temperature, top_k=9, top_p=0.8)
        tokens, logprobs = traced(logits, replace(sampling, temperature=1.0), torch.tensor([temperature]))
        distribution = sampling_logits(logits, sampling).log_softmax(-1)
        torch.testing.assert_close(logprobs, distribution.gather(1, tokens[:, None])[:, 0])
        assert logprobs.isfinite().all()
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
