"""Every causal architecture of the installed transformers, made tiny: is it right here, or refused in a sentence?

`python -m tools.architectures` writes the list to docs/architectures.md.
"""

import contextlib
import io
import re
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlcourse.config import make_config
from rlcourse.head import OWN_LOGITS
from rlcourse.learner import Learner
from rlcourse.paths import model_folder
from rlcourse.policy import Policy, load_policy
from rlcourse.publish import save_model
from rlcourse.rollout.hf import HFEngine
from rlcourse.sampling import Sampling
from rlcourse.sft.data import Example
from rlcourse.sft.packing import check_packing, pack, summed_loss
from rlcourse.train import update
from rlcourse.trial import checkpoint_activations

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
MOST = 20e6  # parameters of a tiny model
CLOSE = 1e-4  # nats between sampler and trainer, and of gradients and losses relative to the largest
NOT_TINY = "cannot be made tiny here"
WIDTH, HEAD, LAYERS, VOCABULARY = 32, 8, 2, 600
SIZES = {
    WIDTH: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim dim_model attn_hidden_size lru_width "
    "state_size d_embedding input_embedding_size embed_dim hidden_dim emb_dim attention_hidden_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dim_ff dff d_inner "
    "ffn_intermediate_size expert_ffn_hidden_size ffn_config dense_intermediate_size mlp_hidden_size",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank moe_ffn_hidden_size "
    "o_lora_rank mamba_d_state ssm_state_size mamba_expand_dim index_head_dim expert_dim mamba_d_head mamba_head_dim "
    "altup_rank shared_intermediate_size moe_shared_expert_intermediate_size hidden_size_per_layer_input laurel_rank",
    HEAD: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim d_kv "
    "kv_channels global_head_dim swa_head_dim attention_head_dim dim_head conv_dim_head",
    4: "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads mamba_n_heads "
    "mamba_num_heads num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim "
    "num_decoder_attention_heads num_encoder_attention_heads index_n_heads linear_num_value_heads attention_heads",
    2: "num_key_value_heads num_experts_per_tok linear_num_key_heads num_experts_per_token moe_topk moe_k num_kv_heads "
    "num_global_key_value_heads n_expert_used top_k_experts num_hidden_layers n_layer n_layers num_layers "
    "decoder_layers encoder_layers num_decoder_layers num_encoder_layers depth num_hidden_groups",
    1: "n_group topk_group n_groups mamba_n_groups num_shared_experts n_shared_experts first_k_dense_replace",
    64: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx seq_length",
    VOCABULARY: "vocab_size vocab_size_per_layer_input text_vocab_size",
}
CHANGES = {name: size for size, names in SIZES.items() for name in names.split()}
TOKENS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}


def tiny_config(kind: str) -> Any:
    """The config of an architecture with small sizes, those of its parts, too."""
    usual = AutoConfig.for_model(kind)
    return type(usual).from_dict(smaller(usual, usual.to_dict()) | {"initializer_range": 0.05, "is_decoder": True})


def smaller(usual: Any, values: dict[str, Any]) -> dict[str, Any]:
    latent = "kv_lora_rank" in values  # whose heads have sizes of their own
    changed = {}
    for name, value in values.items():
        if isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
            value = smaller(getattr(usual, name, None), value)
        elif name in TOKENS:
            value = TOKENS[name] if name != "bos_token_id" or value is None else 1
        elif name in CHANGES and type(value) in (int, type(None)) and not (latent and name == "head_dim"):
            value = 4 if latent and name == "num_key_value_heads" else CHANGES[name] if value is not None else value
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_layers", "hybrid_layer_ids"):
            value = two_of(value) if isinstance(value, list) and len(value) > LAYERS else value
        changed[name] = value
    return changed


def two_of(kinds_of_layers: list[Any]) -> list[Any]:
    first = kinds_of_layers[0]
    return [first, next((kind for kind in kinds_of_layers if kind != first), first)]


def tiny_model(kind: str) -> Any:
    """A model of the architecture with random weights. Raises ValueError, in a sentence, if it cannot be tiny."""
    try:
        config = tiny_config(kind)
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise ValueError(f"{NOT_TINY} ({said(error)})") from None
    if count > MOST:
        raise ValueError(f"{NOT_TINY} ({count / 1e6:.0f} million parameters)")
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config).eval()
        model.generate(torch.arange(5, 9)[None], max_new_tokens=2)  # or the sizes do not fit each other
        return model
    except Exception as error:
        raise ValueError(f"{NOT_TINY} ({said(error)})") from None


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def verdict(kind: str) -> tuple[str, str]:
    """("right", with what restrictions), ("refused", why), ("not tried", why) or ("wrong", how)."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(action="ignore"):
        folder = Path(place) / "model"
        try:
            model = tiny_model(kind)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(model_folder("embedded")).save_pretrained(folder)
        except Exception as error:
            return "not tried", str(error) if NOT_TINY in str(error) else f"{NOT_TINY} ({said(error)})"
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                policy = load_policy(str(folder))
                tokens = HFEngine(policy).generate([[7, 8, 9], [5, 6, 30, 31, 32]], 2, 7, Sampling())
        except (ValueError, FileNotFoundError) as error:
            return "refused", str(error).replace(str(folder), "FOLDER")
        except Exception as error:
            return "wrong", said(error)
        try:
            limits = ["own logits"] * getattr(policy.model, OWN_LOGITS)
            return "right", ", ".join(limits + train(policy, tokens) + fine_tune(policy) + save(policy, place))
        except AssertionError as error:
            return "wrong", str(error)
        except Exception as error:
            return "wrong", said(error)


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    apart = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert apart <= CLOSE, f"{what}: {apart:.1e}"


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def train(policy: Policy, rollout: Any) -> list[str]:
    """A training step: log-probs as sampled, gradients the model's own; with checkpointing if there is any."""
    learner = Learner(policy, make_config(warmup_steps=0, lr=1e-3))
    logprobs, _ = learner.logprobs_and_values(rollout)
    close(logprobs, rollout.logprobs, "sampler and trainer")
    own = []
    for ids, prompt, length in zip(rollout.ids, rollout.prompt_lengths, rollout.lengths, strict=True):
        logits = policy.model(input_ids=ids[None, :length], use_cache=False).logits[0, :-1].log_softmax(-1)
        own.append(logits.gather(1, ids[1:length, None])[prompt - 1 :].sum())
    sum(own).backward()
    expected = gradient(policy)
    policy.model.zero_grad()
    limits = []
    try:
        checkpoint_activations(policy.model)
    except ValueError:
        limits.append("no gradient checkpointing")
    learner.logprobs_and_values(rollout)[0].sum().backward()
    close(gradient(policy), expected, "gradient")
    update(learner.optimizer, learner.config, 0)
    policy.model.eval()
    return limits


def fine_tune(policy: Policy) -> list[str]:
    """The loss of two examples is the model's own; packed in a row where the model keeps them apart."""
    limits, examples = [], [torch.arange(10, 22), torch.arange(40, 47)]
    try:
        check_packing(policy.model)
        rows = [[Example(ids.int(), torch.ones(len(ids), dtype=torch.bool)) for ids in examples]]
    except ValueError:
        limits.append("no packing")
        rows = [[Example(ids.int(), torch.ones(len(ids), dtype=torch.bool))] for ids in examples]
    packed = pack(rows, policy.pad_id, policy.device)
    for row in packed.learned:
        row[0] = False
    starts = packed.positions == 0
    packed.learned[starts] = False
    found = summed_loss(policy.model, packed, 5)
    expected = sum(
        -policy.model(input_ids=ids[None], use_cache=False)
        .logits[0, :-1]
        .log_softmax(-1)
        .gather(1, ids[1:, None])
        .sum()
        for ids in examples
    )
    close(found, expected, "loss of fine-tuning")
    found.backward()
    return limits


def save(policy: Policy, place: str) -> list[str]:
    """What is saved and loaded again computes the same."""
    save_model(policy, Path(place) / "again")
    ids = torch.arange(10, 22)[None]
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        again = load_policy(str(Path(place) / "again")).model
        close(again(input_ids=ids).logits, policy.model(input_ids=ids).logits, "saved and loaded")
    return []


def kinds() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main(names: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    found = {}
    for kind in names or kinds():
        found[kind] = what, why = verdict(kind)
        print(kind, what, why, sep="\t", flush=True)
    if not names:
        PAGE.write_text(page(found), encoding="utf-8")


def page(found: dict[str, tuple[str, str]]) -> str:
    """The list as a page of the docs, the types that fare alike together."""
    counts = Counter(what for what, _ in found.values())
    parts = [
        "# Which models work?",
        f"Every causal language model of transformers {transformers.__version__}, made tiny with random weights, went "
        "through sampling, log-probs, a training step, fine-tuning, saving and loading. "
        + ", ".join(f"{count} {what}" for what, count in counts.most_common())
        + ". A model that would train on wrong numbers is refused in a sentence when it's loaded. Where it says `own "
        "logits`, training takes the model's own, for a whole micro-batch at once: lower `--micro-batch-tokens` "
        "if memory runs out. `no packing` is about `rlcourse sft`. Our own engine runs Qwen2, Qwen3 and Llama; the "
        "others sample with `generate`. "
        "`python -m tools.architectures` writes this page.",
    ]
    for what in sorted(counts, key="right refused not tried wrong".find):
        alike: dict[str, list[str]] = {}
        for kind, (this, why) in found.items():
            if this == what:
                alike.setdefault("" if what == "not tried" else reason_of(why, kind), []).append(f"`{kind}`")
        parts.append(f"## {what.capitalize()}")
        parts += [f"{why}: {', '.join(kinds)}." if why else f"{', '.join(kinds)}." for why, kinds in alike.items()]
    return "\n\n".join(textwrap.fill(part, 120, break_on_hyphens=False) for part in parts) + "\n"


def reason_of(why: str, kind: str) -> str:
    """Without the names that differ from type to type."""
    inner = re.search(r"\((.*)\)", why)
    text = re.sub(r"<class '[^']*'>", "its config", inner[1] if inner else why).replace(f"the type {kind} ", "")
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    main(sys.argv[1:])
