"""Try a model before trusting it: does training compute what the model itself computes? It may cap or scale its logits,
drop activations at random, or look at padding. So a few tokens go through the model as it comes, and as training sends
them through: that needs no list of architectures."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from rlcourse.head import OWN_LOGITS, logprobs_and_states, trunk_of
from rlcourse.sampling import Sampling

TOKENS = 8
LOUD = 100.0  # the largest logit of a trial: a soft-cap at 30 would not show in an untrained model's
TOLERANCE = 2e-3  # nats, of log-probs as large as LOUD: a 50th of it is what float32 rounds in 24 layers
NOISY = "noisy_in_training"  # the attribute of a model that computes something else in training mode
RENAMED = partial(warnings.catch_warnings, action="ignore", category=FutureWarning)  # transformers 5.23 renames it
RANDOM = ("drop", "jitter")  # parts of the names of what a module does at random while it trains


def try_model(model: PreTrainedModel, tokens: list[int], pad_id: int) -> None:
    """Turn off what the model does at random in training, and compare its own log-probs with the trainer's: with chunks
    and padding, and with gradient checkpointing in training mode. tokens: two or more of an ordinary text.

    Where only the head differs, training takes the model's own logits, with a warning on stderr. Raises ValueError if
    even those differ.
    """
    silence(model)
    kind, tokens = model.config.model_type, tokens[:TOKENS]
    # The second row is the first, with padding for its last token, which should change nothing before that.
    ids = torch.tensor([tokens, [*tokens[:-1], pad_id]], device=model.device)
    compared = torch.ones(2, len(tokens) - 1, dtype=torch.bool, device=model.device)
    compared[1, -1] = False

    def differs() -> bool:
        def pick(of_ids: Tensor) -> Tensor:
            return of_ids[:, :-1][compared]

        try:
            found, _ = logprobs_and_states(model, pick, ids[:, 1:][compared], Sampling(), 5, False, input_ids=ids)
        except Exception:  # of a model that has no such parts
            return True
        return not (found - expected.expand(2, -1)[compared]).abs().max() <= TOLERANCE

    def differs_in_training() -> bool:
        try:
            with torch.enable_grad():
                checkpoint_activations(model)
                return differs()
        except ValueError:  # it has no checkpointing
            return True
        finally:
            with RENAMED():
                model.gradient_checkpointing_disable()
            model.eval()

    with torch.no_grad(), loud(model):
        logits = model(input_ids=ids[:1], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        expected = logits.gather(1, ids[0, 1:, None])[:, 0]
        # A bias may be zero, but would not stay so.
        setattr(model, OWN_LOGITS, getattr(model.get_output_embeddings(), "bias", None) is not None)
        if differs_in_training():
            if differs():
                setattr(model, OWN_LOGITS, True)
            if differs():
                raise ValueError(
                    f"the type {kind} gives a token a different probability when padding follows it, or in each pass"
                )
            setattr(model, NOISY, differs_in_training())
        if not (sampled(model, ids[0, :-1], pad_id) - logits[-1]).abs().max() <= TOLERANCE:
            raise ValueError(f"the type {kind} gives a token a different probability when padding precedes it")
    if getattr(model, OWN_LOGITS):
        tqdm.write(
            f"The logits of a model of the type {kind} are more than hidden states times output embeddings: training "
            "takes the model's own, all at once (lower --micro-batch-tokens if memory runs out).",
            file=sys.stderr,
        )


def sampled(model: PreTrainedModel, tokens: Tensor, pad_id: int) -> Tensor:
    """Log-probs [vocabulary] after these tokens as `generate` has them: with padding before, the last one read with a
    cache."""
    prompt, last = tokens[:-1], tokens[-1].item()
    ids = torch.stack([torch.cat([prompt.new_full((2,), pad_id), prompt]), torch.cat([prompt[:2], prompt])])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options["prefix_allowed_tokens_fn"] = lambda row, so_far: [last]
    options["eos_token_id"] = model.get_input_embeddings().num_embeddings  # no token, as `last` may be an end
    found = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=pad_id, **options)
    return found.logits[1][0].float().log_softmax(-1)


def silence(model: nn.Module) -> None:
    """Turn dropout and other noise of training mode off. The config, which is saved, stays as it is."""
    for module in model.modules():
        of_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" if of_dropout else any(part in name for part in RANDOM)):
                setattr(module, name, 0.0)


@contextmanager
def loud(model: PreTrainedModel) -> Iterator[None]:
    """Within, the last hidden states are scaled so that the largest logit of the first pass is LOUD."""
    factor: list[Tensor] = []

    def scale(module: nn.Module, inputs: tuple, output: dict) -> None:
        states, head = output["last_hidden_state"], model.get_output_embeddings()
        if head is None or states.shape[-1] != head.weight.shape[-1]:
            return  # there is more between them, which training leaves to the model
        factor[:] = factor or [LOUD / (states[0] @ head.weight.T).abs().max().clamp(min=1e-9)]
        output["last_hidden_state"] = states * factor[0]

    decoder = trunk_of(model)
    with nullcontext() if decoder is model else decoder.register_forward_hook(scale):
        yield


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass, which transformers does in training mode only. Raises
    ValueError for a model that cannot, or that computes something else in that mode (`try_model`)."""
    kind, remedy = model.config.model_type, "use --no-gradient-checkpointing"
    try:
        with RENAMED():
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError:
        raise ValueError(f"A model of the type {kind} has no gradient checkpointing: {remedy}.") from None
    if getattr(model, NOISY, False):
        raise ValueError(f"A model of the type {kind} computes something else with gradient checkpointing: {remedy}.")
    model.train()
