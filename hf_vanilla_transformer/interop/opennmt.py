"""OpenNMT-py's Transformers, versions 1 to 3: all of them are pre-norm.

The option `layer_norm` chooses a formula, "standard" or "rms". No option chooses post-norm.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..utils.errors import UserError, shown
from ..utils.untrusted import require_file
from . import state_dicts, vocabularies
from .checkpoint import Checkpoint
from .converted import Converted, Fields, File, Tensors
from .options import Options, Unsupported
from .state_dicts import STACKS, Renames
from .vocabularies import TextSide

_MAX_NESTING = 8
_MAX_PARTS = 1000  # of the objects around a vocabulary of torchtext
EPSILON = 1e-6  # of its LayerNorm, unless norm_eps says otherwise
_EPSILON_OF_VERSION_0 = 1e-12  # (1e-6)²
SPECIAL = {"unk_token": "<unk>", "pad_token": "<blank>", "bos_token": "<s>", "eos_token": "</s>"}
# The order of torchtext's fields in versions 1 and 2.
_TORCHTEXT_IDS = {f"{name}_id": number for number, name in enumerate(SPECIAL)}
_TORCHTEXT_IDS["decoder_start_token_id"] = _TORCHTEXT_IDS["bos_token_id"]
_EMBEDDING = "{}.embeddings.make_embedding.emb_luts.0.weight"
_POSITIONS = "{}.embeddings.make_embedding.pe.pe"
_BIASED = re.compile(r".*\.feed_forward\.w_[12]\.weight")  # but in version 3 without -add_ffnbias

# Options of other architectures.
REFUSED: Unsupported = {
    "encoder_type": (("transformer",), "is another kind of model"),
    "decoder_type": (("transformer",), "is another kind of model"),
    "layer_norm": (("standard",), "has no LayerNorm (§3.1)"),
    "position_encoding": ((True,), "leaves out the positions of §3.5"),
    "position_encoding_type": (("SinusoidalInterleaved",), "has not the positions of §3.5"),
    "max_relative_positions": ((0,), "has relative positions"),
    "relative_positions_buckets": ((0,), "has relative positions"),
    "self_attn_type": (("scaled-dot", "scaled-dot-flash"), "has average attention"),
    "parallel_residual": ((False,), "adds attention and feed-forward network in parallel"),
    "multiquery": ((False,), "shares keys and values between heads"),
    "num_kv": ((0,), "shares keys and values between heads"),
    "sliding_window": ((0,), "attends to a window"),
    "num_experts": ((0,), "has experts"),
    "aan_useffn": ((False,), "has average attention"),
    "copy_attn": ((False,), "copies source tokens"),
    "generator_function": (("softmax",), "has another output than a softmax"),
    "full_context_alignment": ((False,), "attends to the whole target"),
    "lambda_coverage": ((0, 0.0), "has a coverage attention"),
    "feat_merge": (("concat", "sum", "mlp"), "has features"),
}

# Transforms of OpenNMT-py 3 and eole that change text. The others drop or corrupt training data.
TRANSFORMS = (
    "sentencepiece",
    "bpe",
    "onmt_tokenize",
    "prefix",
    "suffix",
    "normalize",
    "uppercase",
    "docify",
    "inlinetags",
    "terminology",
    "inferfeats",
    "insert_mask_before_placeholder",
)

SEARCH_NOTE = (
    "OpenNMT-py 3 permits 1.25 times as many tokens as the longest source of a batch has and 5 more"
)

# The defaults of `onmt_translate`: 5 beams, ranked by log-probability.
_SEARCH = {
    "num_beams": 5,
    "length_penalty": 0.0,
    "max_new_tokens": 100,
    "beam_search_rule": "opennmt2",
    "counted_prefix": 1,  # the start token is part of the length
}
# Version 3 ranks by the mean log-probability.
_SEARCH_OF_VERSION_3 = _SEARCH | {
    "length_penalty": 1.0,
    "max_new_tokens": 250,
    "beam_search_rule": "opennmt3",
}

ATTENTION_RENAMES: Renames = (
    ("cross_attn", "context_attn"),
    ("q_proj", "linear_query"),
    ("k_proj", "linear_keys"),
    ("v_proj", "linear_values"),
    ("out_proj", "final_linear"),
)
RENAMES: Renames = (
    (r"^model\.(en|de)coder\.embed_tokens", r"\1coder.embeddings.make_embedding.emb_luts.0"),
    (r"^model\.(en|de)coder\.embed_positions$", r"\1coder.embeddings.make_embedding.pe.pe"),
    ("^lm_head", "generator"),
    (r"^model\.", ""),
    (r"encoder\.layers\.", "encoder.transformer."),
    (r"decoder\.layers\.", "decoder.transformer_layers."),
    (r"(encoder\.transformer\.\d+)\.self_attn_layer_norm", r"\1.layer_norm"),
    ("self_attn_layer_norm", "layer_norm_1"),
    ("cross_attn_layer_norm", "layer_norm_2"),
    ("final_layer_norm", "feed_forward.layer_norm"),
    *ATTENTION_RENAMES,
    ("fc1", "feed_forward.w_1"),
    ("fc2", "feed_forward.w_2"),
)


def from_opennmt(
    checkpoint: str | Path,
    *,
    codes: File = None,
    sentencepiece: File = None,
    target_sentencepiece: File = None,
) -> Converted:
    """A pre-norm Transformer that OpenNMT-py trained.

    Args:
        checkpoint: a .pt of `onmt_train`.
        codes: a file of subword-nmt or fastBPE. The tokenizer then splits words, as the transform `bpe` does.
        sentencepiece, target_sentencepiece: models. The tokenizer then takes raw text. One may serve both sides.

    Returns:
        The model with the search of `onmt_translate`, and a tokenizer: without these files for text that is tokenized
        already.
    """
    path = Path(checkpoint)
    state = _read(path)
    options = Options(state_dicts.plain_options(state["opt"]), f"{path}: -")
    options.refuse(REFUSED)
    tensors = _tensors(state, path)
    locate = partial(state_dicts.rename, renames=RENAMES)
    tables = {_POSITIONS.format(stack) for stack in STACKS}
    found = [tensors[name].flatten(0, -2) for name in tables if name in tensors]
    if state_dicts.position_layout(found) == "learned":
        reason = "only SinusoidalInterleaved, the paper's (§3.5), is converted"
        raise UserError(f"{path}: -position_encoding_type: {reason}")
    is_old = any(str(name).endswith(".a_2") for name in state["model"])
    epsilon = _EPSILON_OF_VERSION_0 if is_old else EPSILON
    vocab = state.get("vocab")
    tokens = _vocabularies(vocab)
    is_version_3 = isinstance(vocab, Mapping) and isinstance(vocab.get("src"), list)
    sides: list[TextSide] = []
    notes = ["the checkpoint contains no vocabularies"]
    ids = search_ids = _TORCHTEXT_IDS
    if tokens:
        shared = state_dicts.weights_decide(tensors, locate)["share_encoder_decoder_embeddings"]
        ids, search_ids = special_ids(Options(vocab, f"{path}: vocab."), tokens, SPECIAL, shared)
        files = codes, sentencepiece, target_sentencepiece
        sides, notes = texts(tokens, SPECIAL, files, options.texts("transforms"))
        notes += [SEARCH_NOTE] * is_version_3
    search = _SEARCH_OF_VERSION_3 if is_version_3 else _SEARCH
    fields = _fields(options, epsilon) | ids
    return Checkpoint(
        tensors, locate, fields, search | search_ids, tables, sides, notes
    ).converted()


def _read(path: Path) -> Fields:
    state = state_dicts.read_torch_file(path)
    if isinstance(state, Mapping) and "opt" in state and "model" not in state:
        # version 3.4 with -save_format safetensors
        file = require_file(path.with_suffix(".safetensors"), "it contains the weights")
        state = {**state, "model": state_dicts.read_torch_file(file), "generator": None}
    has_parts = isinstance(state, Mapping) and {"model", "generator", "opt"} <= state.keys()
    if not has_parts or not state_dicts.plain_options(state["opt"]):
        raise UserError(
            f"{path}: no checkpoint of OpenNMT-py: 'model', 'generator' and 'opt' are needed"
        )
    return state


def _tensors(state: Fields, path: Path) -> Tensors:
    """The tensors of the model and of the generator, a Sequential in versions 1 and 2, under one set of names."""
    tensors = state_dicts.require_tensors(
        state["model"], f"{path}: model", _EMBEDDING.format("encoder")
    )
    head = state["generator"]
    generator = {} if head is None else state_dicts.require_tensors(head, f"{path}: generator")
    # version 0 divides by the unbiased standard deviation + 1e-6, as the Annotated Transformer
    for name in list(tensors):
        if name.endswith(".a_2"):
            gain = tensors.pop(name)
            biased = math.sqrt((len(gain) - 1) / len(gain))
            tensors[name.replace(".a_2", ".weight")] = gain * biased
        if name.endswith(".b_2"):
            tensors[name.replace(".b_2", ".bias")] = tensors.pop(name)
    tensors = state_dicts.with_zero_biases(tensors, _BIASED)
    for name, tensor in generator.items():
        tensors[f"generator.{name.removeprefix('0.')}"] = tensor
    return tensors


def _fields(options: Options, epsilon: float) -> Fields:
    heads = options.integer("heads", 8, 1)
    dropout = first_number(options, "dropout")
    return {
        "layer_norm_position": "pre",
        "activation_function": options.text("pos_ffn_activation_fn", "relu"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "layer_norm_eps": options.number("norm_eps", epsilon, 0.0),
        "scale_embedding": True,
        "dropout": dropout,
        "activation_dropout": dropout,
        "attention_dropout": first_number(options, "attention_dropout"),
    }


def first_number(options: Options, name: str, default: float = 0.1) -> float:
    """The value of an option, or the first one of a schedule such as [0.1]."""
    value = options.values.get(name)
    first = value[0] if isinstance(value, list) and value else value
    return Options({name: first}, options.where).number(name, default, 0.0)


def _vocabularies(vocab: Any) -> list[list[str]]:
    """The tokens of source and target by id. Before version 3 they are part of objects of torchtext."""
    is_pairs = isinstance(vocab, list) and all(isinstance(pair, tuple) for pair in vocab)
    fields = dict(vocab) if is_pairs else vocab
    if not isinstance(fields, Mapping):
        return []
    sides = [fields.get(side) for side in ("src", "tgt")]
    lists = [side if isinstance(side, list) else _tokens_of_torchtext(side) for side in sides]
    if not all(lists):
        return []
    return [Options({"tokens": tokens}, "vocab.").texts("tokens") for tokens in lists]


def _tokens_of_torchtext(field: Any) -> list[str] | None:
    """The attribute `itos` of a vocabulary, which may be part of a field, or of a list of fields."""
    parts = [field]
    for _ in range(_MAX_NESTING):
        parts = [part.state if isinstance(part, state_dicts.Ignored) else part for part in parts]
        mappings = [part for part in parts if isinstance(part, Mapping)]
        for part in mappings:
            if "itos" in part:
                return part["itos"]
        children: list[Iterable[object]] = [part.values() for part in mappings]
        children += [part for part in parts if isinstance(part, list | tuple)]
        parts = list(itertools.islice(itertools.chain(*children), _MAX_PARTS))
    return None


def special_ids(
    vocabulary: Options, sides: list[list[str]], special: Mapping[str, str], shared: bool
) -> tuple[Fields, Fields]:
    """The ids of the special tokens for the configuration, which are the source's, and for the search, the target's.

    An empty `decoder_start_token` in the vocabulary is an unknown token to the toolkits.

    Raises:
        UserError: a token is missing, or the sides have different ids in embeddings that they share.
    """
    source, target = sides
    for name, token in special.items():
        if token not in target or (token not in source and name not in ("bos_token", "eos_token")):
            raise UserError(f"vocab: {shown(token)} is missing there")
    start = vocabulary.text("decoder_start_token", special["bos_token"]) or special["unk_token"]
    if start not in target:
        raise vocabulary.error("decoder_start_token", "it is no token of tgt")
    search = {f"{name}_id": target.index(token) for name, token in special.items()}
    search["decoder_start_token_id"] = target.index(start)
    ids = dict(search)
    for name, token in special.items():
        if token in source:  # torchtext's sources have no ends
            ids[f"{name}_id"] = source.index(token)
    if not shared:
        ids |= {f"decoder_{name}": search[name] for name in ("pad_token_id", "eos_token_id")}
    elif ids != search:
        raise UserError(
            "vocab: source and target share their embeddings, but their special tokens have different ids"
        )
    return ids, search


def texts(
    tokens: list[list[str]],
    special: Mapping[str, str],
    files: Sequence[File],
    transforms: list[str],
) -> tuple[list[TextSide], list[str]]:
    """The text of source and target, and a note on transforms of the training that change text but are not applied.

    Sources do not end with </s>. `files` are `codes` and two SentencePiece models, or None.
    """
    codes, *spm_models = files
    raw_text = vocabularies.raw_text(
        vocabularies.both_sides(*spm_models), vocabularies.both_sides(codes)
    )
    sides = [
        TextSide(
            of_side,
            {name: token for name, token in special.items() if token in of_side},
            ends=ends,
            **raw,
        )
        for of_side, ends, raw in zip(tokens, (False, True), raw_text, strict=True)
    ]
    done = {"spm": "sentencepiece", "codes": "bpe"}
    applied = {*TRANSFORMS} & {*transforms} - {done[kind] for kind in raw_text[0]}
    names = ", ".join(sorted(applied))
    note = f"the toolkit applies {names} to its text, the tokenizer does not"
    return sides, [note] if applied else []
