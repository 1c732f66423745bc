"""A stand-in for a vLLM server: of its interface what our engine uses, over `vllm_in_memory`. What goes by HTTP there
is a call here, and what goes from GPU to GPU by NCCL goes through a queue."""

import io
import json
import queue
import sys
import threading
import types
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, urlsplit

import torch
import vllm_in_memory

from rlcourse.rollout import vllm_server

GROUPS: dict[int, queue.Queue] = {}  # by port
SERVERS: dict[str, "Server"] = {}  # by address


class NCCLWeightTransferEngine:
    @staticmethod
    def trainer_init(init_info):
        assert init_info["world_size"] == 2 and init_info["rank_offset"] == 1
        return GROUPS.setdefault(init_info["master_port"], queue.Queue())

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        assert trainer_args.packed
        for _, weight in iterator:
            trainer_args.group.put(weight.clone())


def put_in(monkeypatch) -> None:
    """Within the test, this is vLLM here and what sends weights."""
    vllm_in_memory.put_in(monkeypatch)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(vllm_server, "check_vllm", lambda device: None)
    monkeypatch.setattr(vllm_server.urllib.request, "urlopen", urlopen)
    name = "vllm.distributed.weight_transfer.nccl_engine"
    module = types.ModuleType(name)
    module.NCCLWeightTransferEngine = NCCLWeightTransferEngine
    module.NCCLTrainerSendWeightsArgs = types.SimpleNamespace
    for part in ("vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, name, module)
    GROUPS.clear()
    SERVERS.clear()


def urlopen(request, timeout):
    server = SERVERS.get(f"{request.type}://{request.host}")
    if server is None:
        raise URLError("nobody is there")
    return server.open(request)


class Server:
    """A server of the policy's model, whose address is opened within this process. heard: the paths it was asked;
    fails: those that it answers with an error of this number; most: answers that it gives to one prompt."""

    def __init__(self, policy, folder: str, dtype: str = "float32", logprobs_mode: str = "processed_logprobs"):
        policy.model.config.architectures = [type(policy.model).__name__]
        policy.model.config.save_pretrained(folder)
        self.llm = vllm_in_memory.LLM(
            folder, skip_tokenizer_init=True, dtype=dtype, load_format="dummy", logprobs_mode=logprobs_mode,
            kv_cache_memory_bytes=10**6,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{8000 + len(SERVERS)}"
        self.dtype, self.paused, self.group, self.lock = dtype, False, None, threading.Lock()
        self.heard: list[str] = []
        self.fails: dict[str, int] = {}
        self.most: int | None = None
        SERVERS[self.url] = self

    def open(self, request) -> io.BytesIO:
        parts = urlsplit(request.full_url)
        with self.lock:
            self.heard.append(parts.path)
            if code := self.fails.get(parts.path):
                raise HTTPError(request.full_url, code, "no", {}, io.BytesIO(b"no"))
            body = json.loads(request.data) if request.data else None
            return io.BytesIO(json.dumps(self.ask(parts.path, parse_qs(parts.query), body)).encode())

    def ask(self, path: str, query: dict, body: dict | None) -> dict:
        match path:
            case "/server_info":
                assert query == {"config_format": ["json"]}
                model = {"logprobs_mode": self.llm.options["logprobs_mode"], "dtype": f"torch.{self.dtype}"}
                return {"vllm_config": {"model_config": model | {"max_model_len": self.llm.longest}}}
            case "/get_world_size":
                return {"world_size": 1}
            case "/init_weight_transfer_engine":
                self.group = GROUPS.setdefault(body["init_info"]["master_port"], queue.Queue())
            case "/pause":
                assert query == {"mode": ["wait"]}
                self.paused = True
                self.llm.reset_prefix_cache()
            case "/update_weights":
                assert self.paused and "/start_weight_update" in self.heard
                self.update(body["update_info"])
            case "/resume":
                self.paused = False
            case "/inference/v1/generate":
                return self.generate(body)
        return {"message": "ok"}

    def update(self, info: dict) -> None:
        assert info["packed"]
        taken = []
        for name, shape, dtype in zip(info["names"], info["shapes"], info["dtype_names"], strict=True):
            weight = self.group.get(timeout=10)
            assert list(weight.shape) == shape and weight.dtype == getattr(torch, dtype)
            taken.append((name, weight))
        assert self.group.empty()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(taken)})

    def generate(self, body: dict) -> dict:
        assert not self.paused
        wanted = dict(body["sampling_params"])
        kind = wanted.pop("output_kind", 0)
        params = vllm_in_memory.SamplingParams(**wanted)  # with its checks of n
        params.n, params.detokenize, params.flat_logprobs = 1, False, True
        outputs = self.llm.generate([{"prompt_token_ids": body["token_ids"]}] * wanted["n"], params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        if kind != 2:  # the reply has those alone that grew in the last step
            longest = max(len(answer.token_ids) for answer in answers)
            answers = [answer for answer in answers if len(answer.token_ids) == longest]
        content = [[{"logprob": found} for found in answer.logprobs.logprobs] for answer in answers]
        pairs = zip(answers[: self.most], content, strict=False)
        return {"choices": [{"token_ids": a.token_ids, "logprobs": {"content": c}} for a, c in pairs]}
