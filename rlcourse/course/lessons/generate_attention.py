"""The decode-attention kernel inside `generate`: as a function that breaks the compiled step, and as an operation.

transformers calls an attention function by name, after it has rotated the heads and written the cache. It compiles the
decode step around whatever it finds there. `BREAKS` is the trap: Dynamo cannot look into the function, ends its graph
in every layer, and what was one program falls to pieces. `OPERATION` launches the same kernel through `torch.library`:
the compiler knows its shapes and goes on. On a CPU a reference stands in the kernel's place, so graphs can be counted
there.
"""

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlcourse.kernels.decode_common import decode_attention_reference
from rlcourse.kernels.decode_ops import decode_attention

BREAKS, OPERATION = "rlcourse-breaks", "rlcourse-operation"


@torch.library.custom_op("rlcourse::decode_attention_on_cpu", mutates_args=())
def decode_attention_on_cpu(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, start: Tensor) -> Tensor:
    """`rlcourse::decode_attention` in PyTorch, for a machine without a GPU."""
    return decode_attention_reference(q, k_cache, v_cache, position, start)


@decode_attention_on_cpu.register_fake
def _(q, k_cache, v_cache, position, start):
    return q.new_empty(q.shape)


def seen_slots(mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """First and last slot [B] that a row may attend to, from the mask of a decode step: bool [B, 1, 1, S].

    Raises ValueError without a mask: a name that is not in `AttentionMaskInterface` gets none, and would attend to
    padding and to slots that hold nothing yet.
    """
    if mask is None:
        raise ValueError(
            "This attention needs the mask of a static cache and got none: register its name in AttentionMaskInterface."
        )
    seen = mask[:, 0, 0]
    start = seen.long().argmax(-1)
    return start, start + seen.sum(-1) - 1


def operation(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, start: Tensor) -> Tensor:
    """The kernel as an operation that the compiler keeps in its graph."""
    attend = decode_attention if q.is_cuda else decode_attention_on_cpu
    return attend(q, k_cache, v_cache, position, start)


breaks = torch.compiler.disable(operation)


def forward(attend):
    """An attention function of transformers: `attend` for one query token per row, else scaled_dot_product_attention.

    query [B, H, L, D]; key, value [B, K, S, D], the whole static cache; returns [B, L, H, D] and no weights.
    """

    def attention(module, query, key, value, attention_mask, **kwargs) -> tuple[Tensor, None]:
        if query.shape[2] > 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        start, position = seen_slots(attention_mask)
        return attend(query[:, :, 0], key, value, position, start)[:, None], None

    return attention


for name, attend in ((BREAKS, breaks), (OPERATION, operation)):
    AttentionInterface.register(name, forward(attend))
    AttentionMaskInterface.register(name, sdpa_mask)  # without it, the mask is None and nothing fails


def use(model: PreTrainedModel, name: str) -> None:
    """Let a model attend by `BREAKS`, `OPERATION`, or a name of transformers. Raises ValueError for others."""
    if name not in AttentionInterface():
        raise ValueError(f"Unknown attention {name!r}: use sdpa, {BREAKS} or {OPERATION}.")
    model.set_attn_implementation(name)
