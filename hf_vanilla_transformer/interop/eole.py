"""Encoder-decoder Transformers of eole, OpenNMT-py's successor.

All its decoders are pre-norm, so only pre-norm encoders are converted. Its option `layer_norm` chooses a formula.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ..utils.errors import UserError, shown
from ..utils.untrusted import read_json_object
from . import opennmt, state_dicts
from .checkpoint import Checkpoint
from .converted import Converted, Fields, File, Tensors
from .options import Options, Unsupported
from .sources import read_parts
from .state_dicts import STACKS, Renames

EPSILON = 1e-5  # of its LayerNorm from version 0.2 on, unless norm_eps says otherwise
SEARCH_NOTE = "eole permits twice as many tokens as the source has and 5 more"

# Options of `eole predict` without a counterpart in `generate`, with the values that do nothing.
DROPPED = {
    "ratio": 0,
    "top_k": 0,
    "top_p": 0,
    "coverage_penalty": "none",
    "max_length_ratio": 2,
    "replace_unk": False,
    "ignore_when_blocking": [],
    "optional_eos": [],
}

# eole's names of activations -> transformers' names.
ACTIVATIONS = {
    **{name: name for name in ("relu", "gelu", "quick_gelu", "silu")},
    "gelu-tanh": "gelu_pytorch_tanh",
}
# Its kinds of positions. Only with sinusoids it scales the embeddings.
POSITIONS = {
    "SinusoidalInterleaved": {"position_encoding_type": "sinusoidal", "scale_embedding": True},
    "Learned": {"position_encoding_type": "learned", "scale_embedding": False},
}

# Options of other architectures, by section.
_OF_BOTH_STACKS: Unsupported = {
    "layer_norm": (("standard", "standardFP32"), "has no LayerNorm (§3.1)"),
    "mlp_activation_fn": (tuple(ACTIVATIONS), "has a gated feed-forward network"),
    "parallel_residual": ((False,), "adds attention and feed-forward network in parallel"),
    "ffn_layernorm": ((False,), "normalises the output of its sub-layers too"),
    "query_norm": ((False,), "normalises its queries"),
    "key_norm": ((False,), "normalises its keys"),
    "value_norm": ((False,), "normalises its values"),
    "q_gating": ((False,), "has gates in its attention"),
    "attn_scaling": ((None,), "scales its attention by another width than d_k (§3.2.1)"),
    "relative_positions_buckets": ((0,), "has relative positions"),
    "sliding_window": ((0,), "attends to a window"),
    "num_experts": ((0,), "has experts"),
}
REFUSED: dict[str, Unsupported] = {
    "": {
        "architecture": (("transformer", "custom"), "is another kind of model"),
        "generator_function": (("softmax",), "has another output than a softmax"),
        "add_estimator": ((False,), "estimates the quality too"),
    },
    "embeddings": {
        "embedding_type": (("standard",), "normalises the embeddings, §3.4 does not"),
        "position_encoding_type": (
            tuple(POSITIONS),
            "has not the positions of §3.5, nor learned ones",
        ),
        "position_shift": ((0, None), "has positions that do not start at 0"),
        "normalize": ((False, None), "scales its positions too, §3.4 does not"),
    },
    "encoder": {
        "encoder_type": (("transformer",), "is another kind of model"),
        "encoder_layer_style": (
            ("standard",),
            "is post-norm in the encoder, but pre-norm in the decoder",
        ),
        "final_encoder_layer_norm": ((True,), "has no normalisation after the encoder"),
        **_OF_BOTH_STACKS,
    },
    "decoder": {
        "decoder_type": (("transformer",), "is another kind of model"),
        "layer_types": ((None,), "has layers of several kinds"),
        "num_mtp_heads": ((0,), "predicts several tokens at once"),
        **_OF_BOTH_STACKS,
    },
}

RENAMES: Renames = (
    (r"^model\.encoder\.embed_tokens", "src_emb.embeddings"),
    (r"^model\.decoder\.embed_tokens", "tgt_emb.embeddings"),
    (r"^model\.encoder\.embed_positions", "src_emb.pe"),
    (r"^model\.decoder\.embed_positions", "tgt_emb.pe"),
    ("^lm_head", "generator"),
    (r"^model\.", ""),
    (r"coder\.layers\.", "coder.transformer_layers."),
    ("self_attn_layer_norm", "input_layernorm"),
    ("cross_attn_layer_norm", "precontext_layernorm"),
    ("final_layer_norm", "post_attention_layernorm"),
    *opennmt.ATTENTION_RENAMES,
    ("fc1", "mlp.gate_up_proj"),
    ("fc2", "mlp.down_proj"),
)
# It may lack the biases of the feed-forward network, and those of a part of attention. Here all projections of
# attention have one, or none has.
_BIASED = re.compile(r".*mlp\.\w+_proj\.weight")
_BIASED_TOO = re.compile(r".*(_attn\.(linear_\w+|final_linear)|mlp\.\w+_proj)\.weight")
_ATTENTION_BIAS = re.compile(r".*_attn\.(linear_\w+|final_linear)\.bias")
# Tables of sinusoids, and a factor of a different kind of layers. Version 0.6 saves it in all layers.
_NOT_WEIGHTS = re.compile(r"(src|tgt)_emb\.pe\.pe|decoder\.transformer_layers\.\d+\.layer_scalar")


def from_eole(
    source: str | Path,
    *,
    codes: File = None,
    sentencepiece: File = None,
    target_sentencepiece: File = None,
) -> Converted:
    """A pre-norm encoder-decoder Transformer that eole trained.

    Args:
        source: the model_path of a training, or a step_NUMBER in it: a folder with config.json, vocab.json and
            model.00.safetensors.
        codes, sentencepiece, target_sentencepiece: as in `from_opennmt`.

    Returns:
        The model with the search of `eole predict`, and a tokenizer: without these files for text that is tokenized
        already.
    """
    folder = Path(source)
    config = Options(read_json_object(folder / "config.json"), f"{folder / 'config.json'}: ")
    if not config.section("model").values:
        raise UserError(f"{folder / 'config.json'}: no configuration of eole: model is missing")
    model_options = config.section("model")
    # an option that a section lacks has the model's value
    of_model = model_options.values.items()
    shared = {name: value for name, value in of_model if not isinstance(value, Mapping)}
    sections = {}
    for name, unsupported in REFUSED.items():
        options = model_options.section(name) if name else model_options
        sections[name] = Options({**shared, **options.values}, options.where)
        sections[name].refuse(unsupported, neutral=())
    files = sorted(folder.glob("model.*.safetensors")) or [folder / "model.00.safetensors"]
    tensors = read_parts(files, "src_emb.embeddings.weight")
    has_bias = any(map(_ATTENTION_BIAS.fullmatch, tensors))
    biased = _BIASED_TOO if has_bias else _BIASED
    tensors = state_dicts.with_zero_biases(tensors, biased)
    locate = partial(state_dicts.rename, renames=RENAMES)
    decided = state_dicts.weights_decide(tensors, locate)
    vocabulary = Options(read_json_object(folder / "vocab.json"), f"{folder / 'vocab.json'}: ")
    sides = [vocabulary.texts(side) for side in ("src", "tgt")]
    specials = vocabulary.section("specials")
    special = {name: specials.text(name, token) for name, token in opennmt.SPECIAL.items()}
    is_shared = decided["share_encoder_decoder_embeddings"]
    ids, search_ids = opennmt.special_ids(vocabulary, sides, special, is_shared)
    fields = _fields(sections, config.section("training"), tensors) | ids
    unused = [*filter(_NOT_WEIGHTS.fullmatch, tensors)]
    for name in unused:
        if name.endswith("layer_scalar") and not tensors[name].eq(1).all():
            raise UserError(f"{folder}: {name} is not 1: such a layer scales its output")
    inference = config.section("inference")
    search = _search(inference, search_ids["unk_token_id"]) | search_ids
    raw_text = codes, sentencepiece, target_sentencepiece
    texts, notes = opennmt.texts(sides, special, raw_text, config.texts("transforms"))
    notes += [SEARCH_NOTE, *inference.dropped(DROPPED)]
    return Checkpoint(tensors, locate, fields, search, unused, texts, notes).converted()


def _fields(sections: Mapping[str, Options], training: Options, tensors: Tensors) -> Fields:
    _refuse_differences(sections["encoder"], sections["decoder"])
    dropout = opennmt.first_number(training, "dropout", 0.3)
    both = sections["encoder"]
    fields: Fields = {
        "layer_norm_position": "pre",
        "layer_norm_eps": both.number("norm_eps", EPSILON, 0.0),
        "activation_function": ACTIVATIONS[both.text("mlp_activation_fn", "relu")],
        "dropout": dropout,
        "activation_dropout": dropout,
        "attention_dropout": opennmt.first_number(training, "attention_dropout"),
    }
    if width := both.integer("head_dim", None, 1):
        fields |= {"head_dim": width, "value_head_dim": width}
    for stack in STACKS:
        options = sections[stack]
        heads = options.integer("heads", 8, 1)
        fields[f"{stack}_attention_heads"] = heads
        if options.integer("heads_kv", heads) != heads:
            raise options.error("heads_kv", "such a model shares keys and values between heads")
    positions = POSITIONS[
        sections["embeddings"].text("position_encoding_type", next(iter(POSITIONS)))
    ]
    if positions["position_encoding_type"] == "learned":
        fields["max_position_embeddings"] = len(tensors.get("src_emb.pe.weight", ()))
    return fields | positions


def _refuse_differences(encoder: Options, decoder: Options) -> None:
    """Refuse stacks that differ in an option that they have in common here."""
    defaults = {"norm_eps": EPSILON, "mlp_activation_fn": "relu", "head_dim": None}
    for name, default in defaults.items():
        value = encoder.values.get(name) or default
        other = decoder.values.get(name) or default
        if value != other:
            reason = f"{decoder.where}{name}={shown(other)}; here both stacks have the same"
            raise encoder.error(name, reason)


def _search(inference: Options, unk: int) -> Fields:
    """The section `inference`, with the defaults of `eole predict`, under the names of `generate`."""
    alpha = inference.number("alpha", 1.0)
    settings: Fields = {
        "num_beams": inference.integer("beam_size", 5, 1),
        "max_new_tokens": inference.integer("max_length", 250, 1),
        "min_new_tokens": inference.integer("min_length", 0, 0),
        "no_repeat_ngram_size": inference.integer("block_ngram_repeat", 0, 0),
        "beam_search_rule": "opennmt3",
        "counted_prefix": 1,  # the start token is part of the length
    }
    if inference.flag("ban_unk_token"):
        settings["suppress_tokens"] = [unk]
    penalty = inference.text("length_penalty", "avg")
    if penalty == "wu":
        return settings | {"length_penalty": None, "paper_length_penalty": alpha}
    if penalty not in ("avg", "none"):
        raise inference.error("length_penalty", "it is none of avg, wu, none")
    return settings | {"length_penalty": alpha if penalty == "avg" else 0.0}
