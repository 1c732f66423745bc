"""Ranks of which each has a part of the model alone: FSDP2, for a model that does not fit one GPU (`--shard`).

Of N ranks each keeps an N-th of every weight, of its gradient and of its two moments, split by rows, all in float32.
What is whole is so for a moment:

  forward, backward   a layer is gathered just before it computes, in bfloat16 where the config says so, then dropped
  gradients           of a layer, added up over ranks in float32 as soon as it is done; each rank keeps its rows
  update              by each rank, of its rows: AdamW needs no others, and the norm that clips is that of all
  engine              has all weights in its dtype: before a rollout they are gathered into it, one after the other
  checkpoint          gathered, one tensor after the other, into the first rank's memory on the CPU, and written as that
                      of one process: a run goes on with any number of ranks, sharded or not

Each pass is made by all ranks together. A rank that has fewer micro-batches than another makes up for it with empty
ones.
"""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from rlcourse.batch import Rollout
from rlcourse.dist import full_tensor
from rlcourse.distributed.world import SharedEngine, World
from rlcourse.logprobs import PlainPass
from rlcourse.policy import empty_copy, layers_of
from rlcourse.sampling import Sampling

CPU = torch.device("cpu")


class ShardedWorld(World):
    """One of several ranks that have a part of the model each."""

    def setup(self, device: torch.device, config: Any) -> None:
        super().setup(device, config)
        self.mesh = DeviceMesh.from_group(self.gpus or dist.group.WORLD, device.type)
        self.precision = MixedPrecisionPolicy()
        if config.dtype == "bfloat16":
            self.precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def load(self, load: Callable[[torch.device], Any], device: torch.device) -> Any:
        """The model is loaded on the CPU; a layer at a time is whole on a GPU."""
        policy = load(CPU)
        model = policy.model
        model.together = types.MethodType(lambda self, compute: compute(), model)
        for layer in layers_of(model):
            self.shard(layer, self.precision)
        self.shard(model, self.precision)  # what is around the layers: embedding, norm and head
        # The residual stream is float32, as it is under autocast alone.
        model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.float())
        register_fsdp_forward_method(model, "together")
        return policy

    def shard(self, module: nn.Module, precision: MixedPrecisionPolicy | None = None) -> nn.Module:
        """The module computes in `precision`, or in float32."""
        fully_shard(module, mesh=self.mesh, mp_policy=precision or MixedPrecisionPolicy())
        module.set_gradient_divide_factor(1.0)  # gradients are added up: losses are shares of the mini-batch's
        module.set_force_sum_reduction_for_comms(True)  # by a plain sum, which gloo has, too
        return module

    def shared(self, engine: Any, *tasks: Any) -> tuple[Any, ...]:
        return ShardedEngine(engine, self), *super().shared(engine, *tasks)[1:]

    def split_rows(self, rows: Tensor, cut: Callable[[Tensor], list[int]]) -> tuple[Tensor, ...]:
        """Empty ones follow until this rank has as many as any: a pass is made by all together."""
        found, none = super().split_rows(rows, cut), rows[:0]
        return (*found, *[none] * (max(self.all_gather(len(found))) - len(found)))

    def all_reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        pass  # the backward passes have

    def gather_state(self, policy: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        first = self.rank == 0
        model = empty_copy(policy.model, torch.float32, CPU) if first else None
        for name, parameter in policy.model.named_parameters():
            gathered = full_tensor(parameter.detach())
            if first:
                model.get_parameter(name).data.copy_(gathered)
        return replace(policy, model=model), _gathered(state, first)

    def shard_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Raises ValueError for a tensor of another shape than the optimizer's."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved, head = state["optimizer"], state["value_head"]
        moments = {index: dict(of_one) for index, of_one in saved["state"].items()}
        for index, of_one in moments.items():
            for name in ("exp_avg", "exp_avg_sq"):
                of_one[name] = self._rows(of_one[name], parameters[index])
        if head is not None:
            own = optimizer.param_groups[-1]["params"]
            head = {name: self._rows(value, p) for (name, value), p in zip(head.items(), own, strict=True)}
        return state | {"optimizer": saved | {"state": moments}, "value_head": head}

    def _rows(self, value: Tensor, like: DTensor) -> DTensor:
        """This rank's rows of a whole tensor, as it has them of the parameter."""
        if value.shape != like.shape:
            raise ValueError("a tensor of another model")
        found = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        return found.clone()  # or they would be a view that keeps the whole in memory


def _gathered(value: Any, keep: bool) -> Any:
    """A state with all its sharded tensors whole and on the CPU; None in their place on ranks that do not keep them."""
    if isinstance(value, dict):
        return {name: _gathered(inner, keep) for name, inner in value.items()}
    if isinstance(value, DTensor):
        gathered = full_tensor(value)
        return gathered.to(CPU) if keep else None
    return value


class ShardedPass(PlainPass):
    """`PlainPass` of a sharded model. All ranks call it together; one whose rollout has no rows computes a token for
    nothing."""

    def token_logprobs(self, rollout: Rollout, sampling: Sampling, chunk: int) -> tuple[Tensor, Tensor]:
        compute = super().token_logprobs
        return self._together(rollout, lambda some: compute(some, sampling, chunk))

    def hidden_states(self, rollout: Rollout) -> Tensor:
        compute = super().hidden_states
        return self._together(rollout, lambda some: (compute(some),))[0]

    def _together(self, rollout: Rollout, compute: Callable[[Rollout], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `compute` returns, each [rows, T, ...]. Within `together` embedding and head are whole."""
        some = rollout
        if not len(rollout.ids):
            one = torch.ones(1, dtype=torch.int64, device=rollout.ids.device)
            some = Rollout(one.new_zeros(1, 2), one, one, one.new_zeros(1, 1, dtype=torch.float32), one.bool())
        found = self.model.together(lambda: compute(some))
        if not torch.is_grad_enabled():
            self.model.reshard()  # FSDP keeps them whole for a backward pass that does not come
        return found if some is rollout else tuple(value[:0, :0] for value in found)


class ShardedEngine(SharedEngine):
    """A `SharedEngine` that gathers the weights at the start of `generate`, which takes all ranks."""

    def generate(
        self, prompts: list[list[int]], num_generations: int, max_new_tokens: int, sampling: Sampling
    ) -> Rollout:
        """A rank without a prompt of its own samples a token that nobody gets."""
        if not self.world.slice(prompts):
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                self.engine.generate(prompts[:1], num_generations, 1, sampling)
        return super().generate(prompts, num_generations, max_new_tokens, sampling)
