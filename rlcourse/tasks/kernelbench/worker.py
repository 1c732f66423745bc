"""A candidate's process: it loads the text, runs it on inputs that it makes itself, and answers the judge. The judge
checks its times against a clock outside, and its outputs against a reference that is never in here."""

import importlib.util
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcourse.sandbox import namespaces
from rlcourse.sandbox.wire import decode, encode, receive, send
from rlcourse.tasks.kernelbench.cases import as_list, chunks, digest, make_inputs, make_model, namespace

MOST_BYTES = 1 << 30  # of an answer with outputs
# Bound before the candidate's text runs: a later patch of `time` or `torch.cuda` does not reach them.
now, synchronize, Event = time.perf_counter, torch.cuda.synchronize, torch.cuda.Event


def main(file_descriptor: int, folder: str, limits: dict[str, int]) -> None:
    """Answer requests until the judge is gone. folder: to write to; limits: to set where nobody has for it."""
    connection = socket.socket(fileno=file_descriptor)
    namespaces.set_limits(limits)
    torch.set_num_threads(1)
    runner = Runner(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    send(connection, encode("ready"))
    while True:
        try:
            kind, *details = decode(receive(connection))
        except EOFError:
            return
        send(connection, answer({"load": runner.load, "run": runner.run, "show": runner.show}[kind], *details))


def answer(function, *arguments) -> bytes:
    """A call's {"value": ...} or {"error": [kind, module, message]}, encoded."""
    try:
        return encode({"value": function(*arguments)}, MOST_BYTES)
    except BaseException as error:  # a candidate may raise SystemExit
        kind, message = type(error), ""
        with suppress(BaseException):  # its own class of error may raise in __str__
            message = str(error)[-2000:]  # compilers end with what was wrong
        return encode({"error": [kind.__name__[:100], str(kind.__module__)[:100], message]})


class Runner:
    def __init__(self, folder: str):
        self.folder, self.outputs, self.model = folder, [], None

    def load(self, setup: dict) -> None:
        """Run the text and build its model. setup: the `text`, its class's `name`, the problem's `sources` per shape,
        the weights' `seed`, the `device`, and the `gpu_bytes` it may hold."""
        self.device = torch.device(setup["device"])
        if self.device.type == "cuda":
            share = setup["gpu_bytes"] / torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
            size = torch.cuda.get_device_properties(self.device).L2_cache_size
            self.flush = torch.empty(4 * size, dtype=torch.uint8, device=self.device)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(False)  # its first call imports a lot, which a trial would pay for
        self.problems = [namespace(source) for source in setup["sources"]]
        module = import_text(setup["text"], self.folder)
        self.model = make_model(self.problems[0], setup["name"], vars(module), setup["seed"], self.device)

    def run(self, seed: int, shape: int, kind: str, way: str) -> dict:
        """One trial: what it took, gave and called, for `readable`. way: "timed"; "checked", with nan in memory that
        nobody wrote to and torch's operations listed; or "empty", which returns the last trial's outputs, to measure a
        trial without a model."""
        inputs = make_inputs(self.problems[shape], seed, kind, self.device)
        listed = Operations()
        if way == "checked":
            torch.use_deterministic_algorithms(True, warn_only=True)
            with torch.no_grad(), listed:
                self.outputs = as_list(self.model(*inputs))
            torch.use_deterministic_algorithms(False)
            seconds = 0.0
        else:
            forward = (lambda *_: self.outputs) if way == "empty" else self.model
            seconds = self.timed(forward, inputs)
        if not all(type(output) is torch.Tensor for output in self.outputs):
            raise TypeError("the model gave something else than plain tensors")
        tensors = [item for item in inputs if isinstance(item, torch.Tensor) and way == "checked"]
        return {
            "seconds": seconds, "digest": digest(self.outputs), "shapes": [list(o.shape) for o in self.outputs],
            "dtypes": [str(o.dtype) for o in self.outputs], "operations": sorted(listed.names),
            "inputs": digest(tensors),
        }  # fmt: skip

    def timed(self, forward, inputs: list) -> float:
        """Seconds of one pass; on a GPU by events and with a flushed L2 cache."""
        with torch.no_grad():
            if self.device.type != "cuda":
                start = now()
                self.outputs = as_list(forward(*inputs))
                return now() - start
            start, end = Event(enable_timing=True), Event(enable_timing=True)
            self.flush.zero_()  # while it runs, the pass is queued behind it
            start.record()
            self.outputs = as_list(forward(*inputs))
            end.record()
            synchronize()
            return start.elapsed_time(end) / 1e3

    def show(self, wanted: list[list[int]]) -> list:
        """These chunks of each of the last trial's outputs."""
        return [chunks(output, numbers).cpu() for output, numbers in zip(self.outputs, wanted, strict=True)]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None) -> Any:
        self.names.add(operation.name().removeprefix("aten::").split(".")[0])
        return operation(*arguments, **(options or {}))


def import_text(text: str, folder: str):
    """The module of a candidate's text, in a file because Triton and CuTe DSL read a kernel's source from one."""
    path = os.path.join(folder, "candidate.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    spec = importlib.util.spec_from_file_location("candidate", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    return module
