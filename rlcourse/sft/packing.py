"""Several examples in one row of a batch, kept apart, and the loss of their answers.

Padding is work for nothing, so examples are put one behind the other in rows of at most `width` tokens. Each has
positions 0, 1, 2, ... of its own, and transformers' attention, given such positions and no mask, lets a token see the
earlier ones of its own example alone; `check_packing` tries that on the model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlcourse.head import logprobs_and_states
from rlcourse.logprobs import WIDTH_ON_GPU
from rlcourse.sampling import Sampling
from rlcourse.sft.data import Example

Row = list[Example]


@dataclass(frozen=True)
class Rows:
    """Packed examples, padded on the right: ids [rows, L] int64; positions [rows, L] int64, from 0 in each example;
    learned [rows, L] bool, True on the tokens of answers."""

    ids: Tensor
    positions: Tensor
    learned: Tensor


def plan_rows(examples: list[Example], width: int) -> list[Row]:
    """Examples of at most `width` tokens in as few rows as first-fit decreasing finds: the longest first, each into the
    first row with room. With width 0 each has its own row."""
    rows: list[Row] = []
    for example in sorted(examples, key=lambda e: -len(e.ids)):
        row = next((row for row in rows if tokens_of([*row, example]) <= width), None)
        if row is None:
            rows.append(row := [])
        row.append(example)
    return rows


def tokens_of(row: Row) -> int:
    return sum(len(example.ids) for example in row)


def pack(rows: list[Row], pad_id: int, device: torch.device) -> Rows:
    """The rows as tensors, as wide as the longest. Padding counts on as part of a row's last example: causal attention
    hides it from all before it, so rows of one example need no mask."""
    width = max(map(tokens_of, rows))
    width += -width % WIDTH_ON_GPU if device.type == "cuda" else 0
    ids = torch.full((len(rows), width), pad_id)
    positions = torch.zeros((len(rows), width), dtype=torch.long)
    learned = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        start = 0
        for example in row:
            end = start + len(example.ids)
            ids[i, start:end], learned[i, start:end] = example.ids.long(), example.learned
            positions[i, start:] = torch.arange(width - start)
            start = end
    return Rows(ids.to(device), positions.to(device), learned.to(device))


def summed_loss(model: PreTrainedModel, rows: Rows, chunk: int, compile: bool = False) -> Tensor:
    """-log p of every token of an answer, added up: a scalar, nats. Float32 logits exist for `chunk` tokens at once."""
    learned = rows.learned[:, 1:]  # token t is predicted at t - 1, which is of the same example
    logprobs, _ = logprobs_and_states(
        model, lambda of_ids: of_ids[:, :-1][learned], rows.ids[:, 1:][learned], Sampling(), chunk, compile,
        input_ids=rows.ids, position_ids=rows.positions,
    )  # fmt: skip
    return -logprobs.sum()


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Raise ValueError unless the model computes the same for two short sequences in a row as for each alone."""

    def logits(ids: list[int], positions: list[int]) -> Tensor:
        inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions])}
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        return model(**inputs, use_cache=False).logits[0]

    first, second = [1, 2, 3, 4, 5], [5, 4, 3]
    together = logits(first + second, [0, 1, 2, 3, 4, 0, 1, 2])
    apart = torch.cat([logits(ids, list(range(len(ids)))) for ids in (first, second)])
    if (together - apart).abs().max() > 1e-3 * apart.abs().max():
        raise ValueError(
            f"The {model.config.model_type} architecture does not keep packed examples apart: use --no-packing."
        )
