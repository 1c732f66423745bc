"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685) through `peft`: W becomes W + s B A; only A and B learn.

W is [out, in], A [rank, in], B [out, rank], s = alpha / rank; B begins as zeros, so that the policy begins as the base.
The base below an adapter never changes: it is the reference of the KL divergence. An engine samples from merged
weights, each W + s B A written to where the engine keeps that matrix. `adapters.py` reads and writes adapters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcourse.dist import full_tensor, is_sharded
from rlcourse.head import trunk_of

ALL_LINEAR = "all-linear"
ALPHA = 32.0  # an adapter's product counts ALPHA / rank
NAME = "default"  # peft's, of the one adapter that a model has here
ALONE = 2**19  # numbers of a weight from which on a launch of its own copies it faster


def add_adapter(model: PreTrainedModel, base: str, rank: int, alpha: float, targets: str) -> None:
    """Give the model a new adapter, its A drawn from torch's global generator; the model's own weights stop learning.
    base: the name that `load_policy` finds the model by. targets: 'all-linear', or the name of a linear layer."""
    from peft import LoraConfig, inject_adapter_in_model

    names = linear_layers(model) if targets == ALL_LINEAR else [targets]
    path = Path(base).expanduser()
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=names)
    config.base_model_name_or_path = str(path.resolve()) if path.is_dir() else base
    inject_adapter_in_model(config, model, NAME)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers below the output head, such as q_proj, in the order of a layer."""
    linear = (name for name, module in trunk_of(model).named_modules() if isinstance(module, nn.Linear))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def has_adapter(model: PreTrainedModel) -> bool:
    return bool(adapted_layers(model))


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model is its base. A model without an adapter stays as it is."""
    layers = adapted_layers(model)
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def copy_merged(targets: list[Tensor], sources: list[Tensor], model: PreTrainedModel) -> None:
    """Copy each source, a weight of `model`, into its target, as W + s B A where an adapter changes it, one merged
    matrix at a time: summed in the weight's own dtype, float32, and rounded once. A sharded model's weights are
    gathered one by one, in the target's dtype, by all ranks together."""
    if is_sharded(model):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(full_tensor(source.to(target.dtype)))
        return
    adapted, merged, small = {id(layer.weight) for layer in adapted_layers(model)}, merged_weights(model), []
    for target, source in zip(targets, sources, strict=True):
        if id(source) not in adapted and target.numel() < ALONE:
            small.append((target, source))
        else:
            target.copy_(merged(source))
    for dtype in {target.dtype for target, _ in small}:  # in few launches; mixed, each weight would be one
        torch._foreach_copy_(*zip(*(pair for pair in small if pair[0].dtype == dtype), strict=True))


def base_parameters(model: PreTrainedModel) -> list[Tensor]:
    """The model's parameters without its adapter's, in the order of the plain model's."""
    return [parameter for _, parameter in plain_parameters(model)]


def plain_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The same, each with its name in the plain model."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


def merged_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The same, W + s B A where an adapter changes W, made or gathered when it's asked for."""
    merged = merged_weights(model)
    for name, parameter in plain_parameters(model):
        yield name, full_tensor(merged(parameter).detach())


def merged_weights(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """What turns a weight of the model into the one that it computes with, so that gradients reach A and B."""
    adapted = {id(layer.weight): layer for layer in adapted_layers(model)}
    return lambda weight: _merged_weight(adapted[id(weight)]) if id(weight) in adapted else weight


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """W = W + s B A, without the adapter from then on: a plain model that can learn."""
    adapted = set(adapted_layers(model))
    for name, layer in [*model.named_modules()]:
        if layer in adapted:
            layer.weight.copy_(_merged_weight(layer))
            model.set_submodule(name, layer.get_base_layer())
    if adapted:
        del model.peft_config
    model.requires_grad_(True)


def adapted_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that an adapter changes; they are peft's."""
    if not hasattr(model, "peft_config"):
        return []  # at once, as this is asked before every forward pass
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "get_base_layer")]


def _merged_weight(layer: nn.Module) -> Tensor:
    """W + s B A of one layer: [out, in]."""
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    return torch.addmm(layer.weight, b, a, alpha=layer.scaling[NAME])
