"""A vLLM server, on another GPU or another machine, as a rollout engine. It is vLLM's own, started there as `START`
says. The policy's weights go there before each rollout, from GPU to GPU by NCCL, through vLLM's interface for weight
transfer; prompts and answers go by HTTP, as token ids. It is for a network that one trusts: the server does what
anybody asks."""

import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rlcourse.batch import Prompts, Rollout
from rlcourse.dist import launched
from rlcourse.lora import merged_parameters, plain_parameters
from rlcourse.policy import Policy
from rlcourse.rollout.vllm import as_saved, check_request, check_vllm, has_other_names, rollout_of
from rlcourse.sampling import Sampling

SECONDS = 1800.0  # that an answer may take: a rollout's longest, or the transfer of all weights
AT_ONCE = 256  # requests on their way, one a prompt
FINAL_ONLY = 2  # all answers to a prompt in one reply; by default it has those alone that grew in the last step
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --dtype {} --generation-config vllm --logprobs-mode processed_logprobs "
    '--weight-transfer-config \'{{"backend": "nccl"}}\''
)


class VLLMServerEngine:
    """Rollouts of a policy by the vLLM server at `url`, in the dtype in which it was started. The server draws, so
    torch's seed does not decide which tokens. Raises ValueError without a GPU or vLLM here (which sends the weights),
    in one of several processes, and for a server that was not started so; RuntimeError when it does not answer,
    or cannot be sent weights."""

    exact = False

    def __init__(self, policy: Policy, dtype: torch.dtype, url: str):
        check_vllm(policy.device)
        if launched()[1] > 1:
            raise ValueError("A vLLM server takes weights from one process: leave torchrun or the server out.")
        self.policy, self.dtype, self.url = policy, dtype, url.rstrip("/")
        self.converted = has_other_names(policy.model)
        self._check_server()
        self.group = self._connect()

    @torch.no_grad()
    def generate(self, prompts: Prompts, num_generations: int, max_new_tokens: int, sampling: Sampling) -> Rollout:
        """See `RolloutEngine`. Raises ValueError for what does not fit model or server, and some temperatures."""
        refusal = f"fit the vLLM server, which takes {self.room:,}: start it with a higher --max-model-len."
        check_request(self.policy, max(map(len, prompts)) + max_new_tokens, self.room, sampling, refusal)
        self._take_weights()
        # Greedy answers to a prompt are the same, and vLLM refuses to give more than one.
        wanted = {
            "n": 1 if sampling.greedy else num_generations, "temperature": sampling.temperature,
            "top_k": sampling.top_k, "top_p": sampling.top_p, "max_tokens": max_new_tokens, "ignore_eos": True,
            "stop_token_ids": list(self.policy.eos_ids), "logprobs": 0, "output_kind": FINAL_ONLY,
        }  # fmt: skip

        def ask(prompt: list[int]) -> list[dict[str, Any]]:
            body = {"token_ids": list(prompt), "sampling_params": wanted}
            choices = self._post("/inference/v1/generate", body)["choices"]
            if (found := len(choices)) != (number := wanted["n"]):
                raise RuntimeError(f"The vLLM server at {self.url} gave {found} answers where {number} were asked for.")
            return choices * (num_generations // len(choices))

        with ThreadPoolExecutor(min(AT_ONCE, len(prompts))) as pool:
            choices = [choice for found in pool.map(ask, prompts) for choice in found]
        logprobs = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in choices]
        return rollout_of(self.policy, prompts, [choice["token_ids"] for choice in choices], logprobs)

    def sleep(self) -> None:
        """Nothing is kept here."""

    def _check_server(self) -> None:
        model = self._get("/server_info?config_format=json")["vllm_config"]["model_config"]
        if (model["logprobs_mode"], name_of(model["dtype"])) != ("processed_logprobs", name_of(self.dtype)):
            how = START.format(name_of(self.dtype))
            raise ValueError(f"The vLLM server at {self.url} was not started as its log-probs need: `{how}`.")
        self.room = int(model["max_model_len"])

    def _connect(self) -> Any:
        """A group of this process, its first rank, and those of the server, between whose GPUs weights go."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        others = self._get("/get_world_size")["world_size"]
        host, port = own_address(self.url)
        info = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": 1 + others}
        connect = partial(NCCLWeightTransferEngine.trainer_init, info)
        return self._together(connect, "/init_weight_transfer_engine", {"init_info": info})

    def _take_weights(self) -> None:
        """Send the policy's weights as they are now, an adapter merged. A pause clears the server's prompts."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        model = self.policy.model
        sizes, weights = dict(plain_parameters(model)), merged_parameters(model)
        if self.converted:
            sizes = as_saved(model, dict(weights))
            weights = iter(sizes.items())
        info = {
            "names": list(sizes), "shapes": [list(weight.shape) for weight in sizes.values()], "packed": True,
            "dtype_names": [name_of(self.dtype)] * len(sizes),
        }  # fmt: skip
        sent = ((name, weight.detach().to(self.dtype)) for name, weight in weights)
        arguments = NCCLTrainerSendWeightsArgs(group=self.group, packed=True)
        self._post("/pause?mode=wait")
        self._post("/start_weight_update", {})
        send = partial(NCCLWeightTransferEngine.trainer_send_weights, sent, arguments)
        self._together(send, "/update_weights", {"update_info": info})
        self._post("/finish_weight_update")
        self._post("/resume")

    def _together(self, here: Callable[[], Any], path: str, body: dict[str, Any]) -> Any:
        """What `here` gives, which waits for the server to do its part, `path`. NCCL cannot be interrupted: it runs in
        a thread that is left behind when the server fails."""
        done, device = Future(), self.policy.device

        def run() -> None:
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                    torch.cuda.synchronize()  # what is sent is there
                with torch.no_grad():
                    result = here()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                done.set_result(result)
            except Exception as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        self._post(path, body)
        try:
            return done.result(SECONDS)
        except Exception as error:
            said = "it took too long" if isinstance(error, TimeoutError) else error
            raise RuntimeError(f"Weights could not be sent to the vLLM server at {self.url}: {said}") from error

    def _get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(self.url + path))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}))

    def _ask(self, request: urllib.request.Request) -> Any:
        path = urllib.parse.urlsplit(request.full_url).path
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace").replace("\n", " ")
            hint = f" Start it with `{START.format(name_of(self.dtype))}`." if error.code == 404 else ""
            message = f"The vLLM server at {self.url} answers {path} with {error.code}, {said}.{hint}"
            raise RuntimeError(message) from None
        except (OSError, ValueError) as error:
            raise RuntimeError(f"The vLLM server at {self.url} does not answer {path}: {error}.") from None


def name_of(dtype: Any) -> str:
    """torch.bfloat16, or its name → 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def own_address(url: str) -> tuple[str, int]:
    """The address of this machine as the server at `url` sees it, and a free port."""
    server = urllib.parse.urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((server.hostname, server.port or 80))  # sends nothing
        host = towards.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((host, 0))
        return host, listener.getsockname()[1]
