"""Floors against torch's own count of operations in a real model, and against sizes of real tensors."""

import pytest
import torch
from policies import DEVICE, make_policy
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from rlcourse.measure import roofline
from rlcourse.measure.shapes import ModelShape

LARGER = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}


def eager_model():
    """Its attention is two matrix products, which torch counts on every device."""
    model = make_policy(**LARGER).model
    model.set_attn_implementation("eager")
    return model


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (4, 40)])
def test_operations_of_a_decode_step_are_those_that_torch_counts(rows, context):
    model = eager_model()
    shape = ModelShape.from_config(model.config)
    cache = DynamicCache(config=model.config)
    tokens = torch.randint(3, 100, (rows, context), device=DEVICE)
    model(tokens[:, :-1], past_key_values=cache) if context > 1 else None
    work = roofline.decode_step(shape, rows, context)
    found = counted(lambda: model(tokens[:, -1:], past_key_values=cache))
    biases_and_norms = 2 * rows * sum(p.numel() for n, p in model.named_parameters() if p.dim() == 1)
    assert 0 <= work.total_flops - found <= biases_and_norms  # which are counted as weights, and not multiplied


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_decode_step_are_weights_and_cache(tied):
    model = make_policy(tied=tied, **LARGER).model.to(torch.bfloat16)
    shape = ModelShape.from_config(model.config)
    cache = DynamicCache(config=model.config)
    model(torch.randint(3, 100, (5, 21), device=DEVICE), past_key_values=cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    work = roofline.decode_step(shape, rows=5, context=20)
    assert work.bytes["keys and values"] == kept
    embedding = 0 if tied else model.model.embed_tokens.weight.nbytes  # of which a step reads a few rows
    norm = model.model.norm.weight.nbytes
    assert work.bytes["layers"] + work.bytes["head"] == sum(p.nbytes for p in model.parameters()) - embedding - norm


def test_operations_of_an_update_are_those_that_torch_counts_but_for_half_of_attention():
    """Torch counts attention in full, although it is causal."""
    model = eager_model()
    shape = ModelShape.from_config(model.config)
    tokens = torch.randint(3, 100, (4, 24), device=DEVICE)
    found = counted(lambda: model(tokens).logits.float().logsumexp(-1).sum().backward())
    work = roofline.update(shape, rows=4, length=24, completion=24)
    assert work.total_flops + work.flops["attention"] == pytest.approx(found, rel=0.03)
