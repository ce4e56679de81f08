"""Configuration of the Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762).

Sections, equations and tables cited in this package are the paper's.
"""

import copy
import os
from typing import Any, ClassVar

from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig, strict

POSITION_ENCODING_TYPES = ("sinusoidal", "sinusoidal_split", "sinusoidal_fairseq", "learned")
LAYER_NORM_POSITIONS = ("post", "pre")
ATTENTION_KERNELS = ("auto", "torch")

_TRANSLATOR = "VanillaTransformerForConditionalGeneration"

# Written into config.json: the Auto classes find the code in the checkpoint where this package is not installed.
AUTO_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": f"modeling_vanilla_transformer.{_TRANSLATOR}",
    "AutoModelForCausalLM": "modeling_vanilla_transformer.VanillaTransformerForCausalLM",
    "AutoModelForTextEncoding": "modeling_vanilla_transformer.VanillaTransformerEncoderModel",
    "AutoModelForSequenceClassification": "modeling_vanilla_transformer.VanillaTransformerForSequenceClassification",
}

# Table 3, row by row, as differences from "base".
#
# With a vocabulary of exactly 37,000 (§5.1: "about 37000 tokens") the parameter counts of base, big, rows A, and rows
# B and C from 60M up are within 3 % of the table's. B16 (-3.5 %), C2 (-6.5 %), C4 (-3.3 %), C256 (-4.2 %) and C1024ff
# (-4.7 %) are about 4,000 · d_model parameters short: with a vocabulary of 41,000 every row is within 3 %.
PRESETS: dict[str, dict[str, Any]] = {
    "base": {"dropout": 0.1, "label_smoothing": 0.1},
    # (A) heads, at equal computation: h · d_k = 512.
    **{f"A{heads}": {"heads": heads} for heads in (1, 4, 16, 32)},
    # (B) d_k alone, d_v stays 64.
    **{f"B{d_k}": {"head_dim": d_k, "value_head_dim": 64} for d_k in (16, 32)},
    **{f"C{layers}": {"layers": layers} for layers in (2, 4, 8)},  # (C) depth and width
    **{
        f"C{width}": {"d_model": width, "head_dim": width // 8, "value_head_dim": width // 8}
        for width in (256, 1024)
    },
    **{f"C{width}ff": {"ffn_dim": width} for width in (1024, 4096)},
    **{f"D{dropout}": {"dropout": dropout} for dropout in (0.0, 0.2)},  # (D) regularisation
    **{f"Dls{epsilon}": {"label_smoothing": epsilon} for epsilon in (0.0, 0.2)},
    "E": {"position_encoding_type": "learned"},  # (E) learned positions instead of sinusoids
    "big": {"d_model": 1024, "ffn_dim": 4096, "heads": 16, "dropout": 0.3},
}

# Table 3 writes one symbol where the configuration has a field for each stack.
_SYMBOLS = {
    "layers": ("encoder_layers", "decoder_layers"),
    "heads": ("encoder_attention_heads", "decoder_attention_heads"),
    "ffn_dim": ("encoder_ffn_dim", "decoder_ffn_dim"),
}

_POSITIVE = (
    "vocab_size",
    "decoder_vocab_size",
    "d_model",
    "head_dim",
    "value_head_dim",
    "max_position_embeddings",
    *_SYMBOLS["layers"],
    *_SYMBOLS["heads"],
    *_SYMBOLS["ffn_dim"],
)
_PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Architecture and regularisation of a model. The defaults are Table 3's "base".

    Sizes that do not fit together, probabilities outside [0, 1) and unknown names raise a ValueError.

    Args:
        vocab_size: rows of the source embedding, or of the one matrix where all are shared (§5.1: about 37,000).
        decoder_vocab_size: rows of the target embedding and the output layer. None means `vocab_size`.
        d_model: width of every sub-layer's output (§3.1).
        encoder_layers, decoder_layers: N (§3.1).
        encoder_attention_heads, decoder_attention_heads: h (§3.2.2).
        encoder_ffn_dim, decoder_ffn_dim: d_ff (§3.3).
        head_dim, value_head_dim: d_k and d_v, the widths of one head's keys and values. None means d_model / h.
        activation_function: of the feed-forward network (Eq. 2: ReLU), any name of `ACT2FN`.
        dropout: probability, on each sub-layer's output and on embeddings + positions (§5.4).
        attention_dropout, activation_dropout: on the attention weights, after the activation. Not in the paper.
        position_encoding_type: "sinusoidal" (§3.5, sines and cosines interleaved), "sinusoidal_split" (the same
            values, all sines before all cosines: Marian), "sinusoidal_fairseq" (other wavelengths, positions counted
            from `position_offset`: fairseq, FSMT, M2M-100) or "learned" (Table 3, row E).
        position_offset: the first position of "sinusoidal_fairseq". None means `pad_token_id` + 1.
        max_position_embeddings: maximum sequence length for "learned". Sinusoids have no limit.
        scale_embedding: multiply embeddings by sqrt(d_model) (§3.4).
        layer_norm_position: "post", LayerNorm(x + Sublayer(x)) (§3.1), or "pre", x + Sublayer(LayerNorm(x)).
        layer_norm_eps: added to the variance in every layer normalisation.
        attention_bias: biases in the four projections of an attention. Eq. 1 has none, published weights do.
        lm_head_bias: a bias in the output layer. The paper has none.
        final_layer_norm: one more normalisation after each stack, as in `torch.nn.Transformer`. None means with "pre"
            only.
        share_encoder_decoder_embeddings: one matrix embeds source and target (§3.4).
        tie_word_embeddings: the output layer uses the target embedding (§3.4).
        label_smoothing: ε of §5.4, in training only. The smoothed target is (1 - ε) for the label plus ε / V for each
            of the V tokens (Szegedy et al. 2015, the paper's reference).
        attention_kernels: "auto" leaves cuDNN out of attention on GPUs, because it plans anew for each shape of a
            batch. "torch" lets torch choose: for batches of one shape.
        use_cache: keep keys and values between decoding steps.
        bos_token_id, pad_token_id, eos_token_id, unk_token_id: ids of the special tokens.
        decoder_start_token_id: the decoder's first input.
        decoder_pad_token_id, decoder_eos_token_id: ids in a separate target vocabulary. None means those above. With a
            `decoder_vocab_size` their values are kept here, because `Trainer` sets those above to the ids of the
            source's tokenizer.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    # transformers reads its decoder-only models' plans here. Encoder and decoder have plans.
    base_model_tp_plan: ClassVar[dict[str, str]] = {}
    base_model_fsdp_plan: ClassVar[dict[str, str]] = {}

    vocab_size: int = 37000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    head_dim: int | None = None
    value_head_dim: int | None = None
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    position_encoding_type: str = "sinusoidal"
    position_offset: int | None = None
    max_position_embeddings: int = 1024
    scale_embedding: bool = True
    layer_norm_position: str = "post"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    lm_head_bias: bool = False
    final_layer_norm: bool | None = None
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    label_smoothing: float | int = 0.0
    attention_kernels: str = "auto"
    use_cache: bool = True
    is_encoder_decoder: bool = True
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    unk_token_id: int | None = 3
    decoder_start_token_id: int | None = 0
    decoder_pad_token_id: int | None = None
    decoder_eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        own = AUTO_MAP if type(self).__module__ == __name__ else {}  # a subclass has other files
        kwargs["auto_map"] = {**own, **(kwargs.get("auto_map") or {})}
        if self.final_layer_norm is None:
            self.final_layer_norm = self.layer_norm_position == "pre"
        # Before the base class checks the special tokens, so that users get this plain ValueError.
        self.validate_architecture()
        if self.position_encoding_type == "sinusoidal_fairseq" and self.position_offset is None:
            self.position_offset = (self.pad_token_id or 0) + 1  # stays if the pad token changes
        separate = not self.share_encoder_decoder_embeddings and self.decoder_vocab_size is not None
        self.decoder_pad_token_id = self.target_pad_token_id if separate else None
        self.decoder_eos_token_id = self.target_eos_token_id if separate else None
        # A shared vocabulary has one size field, so that resizing cannot leave two that differ.
        self.decoder_vocab_size = (
            None if self.share_encoder_decoder_embeddings else self.target_vocab_size
        )
        super().__post_init__(**kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write config.json. For a translation model it names the pipeline, and the pipeline's code is saved too."""
        # This import makes transformers copy the pipeline's file with the model's.
        from .pipeline_vanilla_transformer import CUSTOM_PIPELINES

        ours = CUSTOM_PIPELINES["translation"]["impl"]
        present = (getattr(self, "custom_pipelines", None) or {}).items()
        pipelines = dict(CUSTOM_PIPELINES) if _TRANSLATOR in (self.architectures or ()) else {}
        pipelines |= {task: entry for task, entry in present if entry["impl"] != ours}
        written = copy.deepcopy(self)
        written.custom_pipelines = pipelines
        if not pipelines:
            del written.custom_pipelines
        super(VanillaTransformerConfig, written).save_pretrained(
            save_directory, push_to_hub, **kwargs
        )

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> PreTrainedConfig:
        """The base class's view of one stack, where `vocab_size` and the special tokens are the target's."""
        if decoder and not encoder and None in (self.decoder_vocab_size, self.decoder_eos_token_id):
            filled = copy.deepcopy(self)
            for name in ("vocab_size", "pad_token_id", "eos_token_id"):
                setattr(filled, f"decoder_{name}", getattr(self, f"target_{name}"))
            return super(VanillaTransformerConfig, filled).get_text_config(decoder, encoder)
        return super().get_text_config(decoder, encoder)

    @property
    def target_vocab_size(self) -> int:
        """V, the size of the target vocabulary: `decoder_vocab_size`, or `vocab_size` where that is None."""
        return self.decoder_vocab_size or self.vocab_size

    @property
    def target_pad_token_id(self) -> int | None:
        """The pad token of the target vocabulary."""
        return self.pad_token_id if self.decoder_pad_token_id is None else self.decoder_pad_token_id

    @property
    def target_eos_token_id(self) -> int | list[int] | None:
        """The end-of-sentence token of the target vocabulary."""
        return self.eos_token_id if self.decoder_eos_token_id is None else self.decoder_eos_token_id

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "VanillaTransformerConfig":
        """Row `name` of Table 3, one of `PRESETS`, with any field replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(
                f"preset={name!r} is not a row of Table 3; choose one of {', '.join(PRESETS)}"
            )
        row = {**PRESETS["base"], **PRESETS[name]}.items()
        fields = {
            field: value for symbol, value in row for field in _SYMBOLS.get(symbol, (symbol,))
        }
        return cls(**{**fields, **overrides})

    def validate_architecture(self) -> None:
        """Check values and their combinations. Types are checked when a field is set."""
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in _PROBABILITIES:
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be at least 0 and below 1")
        for name in _SYMBOLS["heads"]:
            heads = getattr(self, name)
            if self.d_model % heads and None in (self.head_dim, self.value_head_dim):
                raise ValueError(
                    f"d_model={self.d_model} cannot be divided by {name}={heads}: "
                    f"change one of them, or give both head_dim and value_head_dim"
                )
        choices = {
            "position_encoding_type": POSITION_ENCODING_TYPES,
            "layer_norm_position": LAYER_NORM_POSITIONS,
            "attention_kernels": ATTENTION_KERNELS,
            "activation_function": sorted(ACT2FN),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
                )
        if self.layer_norm_position == "pre" and not self.final_layer_norm:
            raise ValueError(
                "final_layer_norm=False: layer_norm_position='pre' needs a LayerNorm after each stack"
            )
        has_first_position = self.pad_token_id is not None or self.position_offset is not None
        if self.position_encoding_type == "sinusoidal_fairseq" and not has_first_position:
            raise ValueError(
                "pad_token_id=None: sinusoidal_fairseq counts positions from pad_token_id + 1"
            )
        if self.share_encoder_decoder_embeddings and self.target_vocab_size != self.vocab_size:
            raise ValueError(
                f"decoder_vocab_size={self.decoder_vocab_size} differs from vocab_size={self.vocab_size}: two "
                f"vocabularies need share_encoder_decoder_embeddings=False"
            )


__all__ = ["VanillaTransformerConfig"]
