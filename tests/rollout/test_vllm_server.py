"""The engine `vllm` over a server: weights that go there, answers that come back, and what is said when it fails."""

from functools import partial

import pytest
import torch
import vllm_over_http
from policies import make_policy
from reference import assert_logprobs_are_the_models, change

from rlcourse.lora import add_adapter
from rlcourse.rollout import make_engine, vllm_server
from rlcourse.sampling import GREEDY, Sampling

PROMPTS = [[5, 9, 40, 7], [11], [30, 31, 32, 33, 34, 35, 36]]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    vllm_over_http.put_in(monkeypatch)


@pytest.fixture
def served(tmp_path):
    """Starts a server of a policy's model."""
    return partial(vllm_over_http.Server, folder=str(tmp_path))


def engine(policy, server, dtype=torch.float32):
    return make_engine(policy, f"vllm@{server.url}/", dtype)


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=4), Sampling(1.5, top_p=0.7), GREEDY])
def test_weights_go_there_before_every_rollout(policy, served, sampling):
    server = served(policy)
    sampler = engine(policy, server)
    for _ in range(3):
        rollout = sampler.generate(PROMPTS, 4, 6, sampling)
        assert_logprobs_are_the_models(policy, rollout, sampling)
        assert rollout.prompt_lengths.tolist() == [4] * 4 + [1] * 4 + [7] * 4
        change(policy)
    assert server.llm.heard == ["weights"] * 3 and not server.paused and not sampler.exact
    assert server.heard.count("/init_weight_transfer_engine") == 1 and server.heard.count("/finish_weight_update") == 3
    assert server.heard.count("/inference/v1/generate") == 9  # one a prompt
    host, port = vllm_server.own_address(server.url)
    assert host == "127.0.0.1" and 0 < port < 2**16


def test_a_server_that_fails_is_one_sentence(policy, served, monkeypatch):
    server = served(policy)
    server.fails["/server_info"] = 404
    with pytest.raises(RuntimeError, match=r"/server_info with 404, .*\. Start it with `VLLM_SERVER_DEV_MODE=1 vllm"):
        engine(policy, server)
    server.fails = {}
    sampler = engine(policy, server)
    sampler.room = 12
    with pytest.raises(ValueError, match="of 13 tokens do not fit the vLLM server, which takes 12"):
        sampler.generate(PROMPTS, 1, 6, GREEDY)
    sampler.room = 13
    server.most = 3
    with pytest.raises(RuntimeError, match=r"gave 3 answers where 4 were asked for\.$"):
        sampler.generate(PROMPTS, 4, 6, Sampling())
    server.most = None
    server.fails["/update_weights"] = 500
    with pytest.raises(RuntimeError, match="answers /update_weights with 500"):
        sampler.generate(PROMPTS, 1, 2, GREEDY)

    def fail(iterator, trainer_args):
        for _, weight in iterator:
            trainer_args.group.put(weight.clone())
        raise RuntimeError("NCCL is unhappy")

    server.fails = {}
    monkeypatch.setattr(vllm_over_http.NCCLWeightTransferEngine, "trainer_send_weights", staticmethod(fail))
    with pytest.raises(RuntimeError, match=r"Weights could not be sent .*: NCCL is unhappy"):
        engine(policy, served(policy)).generate(PROMPTS, 1, 2, GREEDY)


def test_what_cannot_work_is_refused(policy, served, monkeypatch):
    for options in ({"logprobs_mode": "raw_logprobs"}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match=r"was not started as its log-probs need: `VLLM.*--dtype float32 .*`\.$"):
            engine(policy, served(policy, **options))
    address = "http://127.0.0.1:9"
    with pytest.raises(RuntimeError, match=rf"^The vLLM server at {address} does not answer /server_info: .*\.$"):
        make_engine(policy, f"vllm@{address}", torch.float32)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="takes weights from one process"):
        make_engine(policy, f"vllm@{address}", torch.float32)


def test_an_adapter_is_merged_and_weights_have_the_servers_dtype(served):
    policy = make_policy()
    server = served(policy, dtype="bfloat16")
    add_adapter(policy.model, "base", 2, 8.0, "all-linear")
    change(policy)
    rollout = engine(policy, server, torch.bfloat16).generate(PROMPTS, 2, 6, Sampling())
    assert_logprobs_are_the_models(policy, rollout, Sampling(), atol=0.3)
    assert {weight.dtype for weight in server.llm.model.parameters()} == {torch.bfloat16}
