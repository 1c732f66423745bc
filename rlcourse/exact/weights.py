"""The weights of a Qwen2, Qwen3 or Llama model as engine and training pass read them: fused, in one dtype."""

import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from rlcourse.cuda_graphs import CudaGraphs
from rlcourse.dist import is_sharded
from rlcourse.lora import copy_merged, has_adapter

COMPARED = 64  # weights compared at once: few launches, and little memory
FAMILIES = ("qwen2", "qwen3", "llama")
ROPES = ("default", "llama3")  # an angle is the position times a frequency, which transformers' model has


def count_step(optimizer: Optimizer, *_: object) -> None:
    """Count a step in its parameters' `_version`, which PyTorch itself does unless the optimizer is a fused one."""
    for group in optimizer.param_groups:
        increment_version(group["params"])


register_optimizer_step_post_hook(count_step)


@dataclass
class Layer:
    """Weights of one layer; each matrix is [out, in]. Qwen2 has a bias, Qwen3 norms of heads, Llama neither."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def sources(cls, layer) -> list[list[Tensor]]:
        """For each field, in order, the parameters of transformers' layer that are stacked into it; none for None."""
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        return [
            [layer.input_layernorm.weight],
            [p.weight for p in projections],
            [p.bias for p in projections if p.bias is not None],
            [attention.q_norm.weight] if hasattr(attention, "q_norm") else [],
            [attention.k_norm.weight] if hasattr(attention, "k_norm") else [],
            [attention.o_proj.weight],
            [layer.post_attention_layernorm.weight],
            [mlp.gate_proj.weight, mlp.up_proj.weight],
            [mlp.down_proj.weight],
        ]


class FusedWeights:
    """Copies of a model's weights: the query, key and value projections are one matrix, so are gate and up. Matrices in
    `dtype`, norms in float32. They are those of the last `sync`; syncs: how many there have been. cos, sin: RoPE's
    table [positions, D / 2] float32. Raises ValueError for what `unknown_part` finds."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        config, unknown = model.config, unknown_part(model)
        if unknown:
            raise ValueError(f"The fast engine does not know {unknown}: use --engine hf-dynamic.")
        self.dtype = dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.inv_freq = model.model.rotary_emb.inv_freq
        angles = torch.arange(config.max_position_embeddings, device=self.inv_freq.device)[:, None] * self.inv_freq
        self.cos, self.sin = angles.cos(), angles.sin()
        self._allocate(model)
        self.parameters = list(model.parameters())
        self.graphs = CudaGraphs()
        self.syncs = 0
        self.sync(model)

    def _allocate(self, model: PreTrainedModel) -> None:
        trunk = model.model

        def empty(name: str, parts: list[Tensor]) -> Tensor | None:
            if not parts:
                return None
            dtype = torch.float32 if name.endswith("norm") else self.dtype
            shape = (sum(len(p) for p in parts), *parts[0].shape[1:])
            return torch.empty(shape, dtype=dtype, device=parts[0].device)

        names = [f.name for f in fields(Layer)]
        self.layers = [
            Layer(*(empty(*pair) for pair in zip(names, Layer.sources(layer), strict=True))) for layer in trunk.layers
        ]
        self.embedding = empty("embedding", [trunk.embed_tokens.weight])
        self.norm = empty("norm", [trunk.norm.weight])
        tied = trunk.embed_tokens.weight is model.lm_head.weight
        self.head = self.embedding if tied else empty("head", [model.lm_head.weight])
        self.targets: list[Tensor] = []  # where each weight of the model goes
        for fused, layer in zip(self.layers, trunk.layers, strict=True):
            for target, parts in zip(vars(fused).values(), Layer.sources(layer), strict=True):
                self.targets += target.split([len(p) for p in parts]) if parts else []
        self.targets += [self.embedding, self.norm] + ([] if tied else [self.head])

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        """Take over the model's weights as they are now, an adapter merged, in place, where captured graphs read."""
        sources = self._sources(model)
        self._captured("sync", model, sources, partial(copy_merged, self.targets, sources, model))
        self.syncs += 1
        self.version = self._version()

    def follow(self, model: PreTrainedModel) -> None:
        """`sync` if PyTorch has counted a change of a weight since; it counts none of a weight's `.data`."""
        if self._version() != self.version:
            self.sync(model)

    def follow_any_change(self, model: PreTrainedModel) -> None:
        """`sync` unless they are the model's weights as they are now."""
        if self._version() != self.version or not self.same_as(model):
            self.sync(model)

    def _version(self) -> int:
        return sum(parameter._version for parameter in self.parameters)

    @torch.no_grad()
    def same_as(self, model: PreTrainedModel) -> bool:
        """Whether they are the model's weights as they are now, compared number by number."""
        sources = self._sources(model)
        return not self._captured("compare", model, sources, partial(self._apart, sources, model))

    def _apart(self, sources: list[Tensor], model: PreTrainedModel) -> Tensor:
        """True if a number differs."""
        largest = []
        for first in range(0, len(sources), COMPARED):
            held = self.targets[first : first + COMPARED]
            apart = [torch.empty_like(weight) for weight in held]
            copy_merged(apart, sources[first : first + COMPARED], model)
            torch._foreach_sub_(apart, held)
            largest += torch._foreach_norm(apart, float("inf"))
        return torch.stack(largest).any()

    def _captured(self, name: str, model: PreTrainedModel, sources: list[Tensor], run: Callable) -> Tensor | None:
        """`run()`: on a GPU hundreds of small kernels are one launch, a graph for where the weights are."""
        if not self.embedding.is_cuda or is_sharded(model) or has_adapter(model):
            return run()
        return self.graphs.run((name, *((weight.data_ptr(), weight.dtype) for weight in sources)), run)

    def _sources(self, model: PreTrainedModel) -> list[Tensor]:
        """The model's weights, as `targets` has them."""
        trunk = model.model
        sources = [weight for layer in trunk.layers for parts in Layer.sources(layer) for weight in parts]
        sources += [trunk.embed_tokens.weight, trunk.norm.weight]
        return sources + ([] if self.head is self.embedding else [model.lm_head.weight])


def unknown_part(model: PreTrainedModel) -> str:
    """The part of the model that is not computed here; '' if it is a Qwen2, Qwen3 or Llama as these are published."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"models of the type {config.model_type} (but Qwen2, Qwen3 and Llama)"
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPES:
        return f"RoPE of the type {rope}"
    if getattr(config, "use_sliding_window", False):
        return "a sliding window"
    if config.hidden_act not in ("silu", "swish"):
        return f"the activation {config.hidden_act}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "the biases that attention_bias or mlp_bias adds"
    return ""


def fits(weights: FusedWeights) -> bool:
    """Whether our Triton kernels' tiles divide the model's sizes."""
    hidden, inner = weights.layers[0].down.shape
    queries = weights.heads * weights.head_dim
    whole = all(size % 128 == 0 for size in (hidden, inner, queries)) and hidden <= 8192
    return whole and weights.head_dim in (32, 64, 128) and weights.heads // weights.kv_heads <= 32


def has_kernels(weights: FusedWeights) -> bool:
    """Whether our Triton kernels can do this model's decode step: a GPU since Ampere, 16 bits, sizes that fit."""
    held = weights.embedding
    if not held.is_cuda or importlib.util.find_spec("triton") is None or torch.version.hip:
        return False
    if held.dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability(held.device)[0] < 8:
        return False
    return fits(weights)


def is_exact(weights: FusedWeights) -> bool:
    """Whether decode step and training pass have the same numbers, to the last bit."""
    return has_kernels(weights) and may_be_exact(weights.embedding.device)


def may_be_exact(device: torch.device) -> bool:
    """Whether it is a GPU whose matrix products are known to have one order, Hopper, and PyTorch can forbid others."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        return torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k in (True, False)
    except AttributeError:  # before 2.10
        return False


_MADE: weakref.WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, FusedWeights]] = weakref.WeakKeyDictionary()


def fused_weights(model: PreTrainedModel, dtype: torch.dtype) -> FusedWeights:
    """The model's fused weights in `dtype`: the same object for all who ask, so that engine and trainer share them."""
    made = _MADE.setdefault(model, {})
    if dtype not in made:
        made[dtype] = FusedWeights(model, dtype)
    return made[dtype]
