"""vLLM beside ours in `python -m tools.bench serve`: the same requests, at the same times."""

import contextlib
import time
from collections.abc import Iterator

import torch

from rlcourse.rollout.arrivals import Request
from rlcourse.rollout.vllm import free_memory, new_llm, sampling_params
from rlcourse.sampling import Sampling


class ServingVLLM:
    """vLLM in this process. What `serve` and `generate` give is to be read at once: the clock starts with the first.
    Each begins with an empty prefix cache.

    steps: of the engine in the last call of `serve`, those that gave tokens.
    """

    def __init__(self, model: str, longest: int, rows: int, temperature: float):
        sizes = {"max_num_seqs": rows, "max_model_len": longest}
        self.llm = new_llm(model, torch.bfloat16, gpu_memory_utilization=0.3, **sizes)
        self.sampling, self.steps = Sampling(temperature), 0

    def _params(self, requests: list[Request], **options) -> list:
        return [sampling_params(self.sampling, request.max_new_tokens, **options) for request in requests]

    def serve(self, requests: list[Request]) -> Iterator[tuple[int, int]]:
        """(number, new tokens) of a request whenever the engine has some."""
        from vllm.sampling_params import RequestOutputKind

        self.llm.reset_prefix_cache()
        return self._serve(requests, self._params(requests, output_kind=RequestOutputKind.DELTA))

    def _serve(self, requests: list[Request], params: list) -> Iterator[tuple[int, int]]:
        engine, start = self.llm.llm_engine, time.perf_counter()
        self.steps = added = 0
        while added < len(requests) or engine.has_unfinished_requests():
            while added < len(requests) and requests[added].arrival_s <= time.perf_counter() - start:
                engine.add_request(str(added), {"prompt_token_ids": requests[added].prompt}, params[added])
                added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, start + requests[added].arrival_s - time.perf_counter()))
                continue
            new = [(int(output.request_id), len(output.outputs[0].token_ids)) for output in engine.step()]
            new = [(number, tokens) for number, tokens in new if tokens]
            self.steps += bool(new)
            yield from new

    def generate(self, requests: list[Request]) -> Iterator[tuple[int, int]]:
        """(number, all its tokens) of each request, when all have ended; when they come is not asked."""
        self.llm.reset_prefix_cache()
        return self._generate([{"prompt_token_ids": request.prompt} for request in requests], self._params(requests))

    def _generate(self, inputs: list[dict], params: list) -> Iterator[tuple[int, int]]:
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        yield from ((number, len(output.outputs[0].token_ids)) for number, output in enumerate(outputs))


@contextlib.contextmanager
def vllm_serve(model: str, longest: int, rows: int, temperature: float) -> Iterator[ServingVLLM | None]:
    """vLLM with room for `rows` sequences of up to `longest` tokens at once, and its memory back afterwards; None where
    it is not installed."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        yield None
        return
    serving = ServingVLLM(model, longest, rows, temperature)
    try:
        yield serving
    finally:
        del serving.llm
        free_memory()
