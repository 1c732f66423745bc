"""The sizes of a decoder: of the models that are known, of a folder, or of a model on the hub; and how many parameters
follow from them."""

from dataclasses import dataclass

from transformers import AutoConfig

from rlcourse.model_files import is_adapter, loaded
from rlcourse.paths import model_folder


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Qwen2-like decoder: RMSNorm, grouped-query attention with biased QKV, SwiGLU."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool  # one matrix for the embedding and the output head
    qk_norm: bool = False  # a norm of each query and key, as Qwen3 has

    @classmethod
    def from_config(cls, config) -> "ModelShape":
        """The shape in a `transformers` config, or anything with its attributes; ValueError if one is missing."""
        try:
            return cls(
                layers=config.num_hidden_layers,
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
                intermediate=config.intermediate_size,
                vocabulary=config.vocab_size,
                tied=getattr(config, "tie_word_embeddings", False),
                qk_norm=getattr(config, "model_type", None) == "qwen3",
            )
        except (AttributeError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"The model's config is not that of a Qwen2-like decoder: {error}.") from None


# The config.json of each model on the hub, https://huggingface.co/Qwen and https://huggingface.co/meta-llama
QWEN25 = {
    "Qwen/Qwen2.5-0.5B": ModelShape(24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": ModelShape(28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "Qwen/Qwen2.5-3B": ModelShape(36, 2048, 16, 2, 128, 11008, 151936, tied=True),
    "Qwen/Qwen2.5-7B": ModelShape(28, 3584, 28, 4, 128, 18944, 152064, tied=False),
}
OTHERS = {
    "Qwen/Qwen3-0.6B": ModelShape(28, 1024, 16, 8, 128, 3072, 151936, tied=True, qk_norm=True),
    "meta-llama/Llama-3.2-1B": ModelShape(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
}


def model_shape(name: str) -> ModelShape:
    """The shape of a model: known here, that of a folder, or looked up on the hub. Raises what `load_policy` does, and
    ValueError for a decoder of another kind."""
    known = (QWEN25 | OTHERS).get(name.removesuffix("-Instruct"))
    if known:
        return known
    folder = model_folder(name)
    if folder is not None and is_adapter(folder):
        from rlcourse.adapters import base_of

        return model_shape(base_of(folder))
    if folder is not None and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"There is no model in {folder}: it has no config.json.")
    return ModelShape.from_config(loaded(AutoConfig, name if folder is None else str(folder), folder))


def parameters(shape: ModelShape) -> int:
    """Number of parameters, exactly that of `Qwen2ForCausalLM`; a tied head counts once. Models without biases on QKV
    (Llama) have a fraction of a permille less."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (q + 2 * kv) + (q + 2 * kv) + q * shape.hidden
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * layer + embeddings + shape.hidden


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Number of parameters of an adapter, A [rank, in] and B [out, rank] for each linear layer: rank x (in + out)."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + q) + 2 * (shape.hidden + kv)
    return shape.layers * rank * (attention + 3 * (shape.hidden + shape.intermediate))
