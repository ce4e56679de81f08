"""JoeyNMT's model folders: config.yaml, checkpoints and vocabularies."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..untrusted import parse_yaml_mapping, require_file
from . import state_dicts, vocabularies
from .converting import Converted
from .state_dicts import PRE_NORM, STACKS, Renames

EPSILON = 1e-6  # of its LayerNorm
SIDES = ("src", "trg")
_SPECIAL_TOKENS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # by id
_TABLES = {"encoder.pe.pe", "decoder.pe.pe"}  # the sinusoids of §3.5

RENAMES: Renames = (
    (r"model\.encoder\.embed_tokens", "src_embed.lut"),
    (r"model\.decoder\.embed_tokens", "trg_embed.lut"),
    ("lm_head", "decoder.output_layer"),
    (r"^model\.", ""),
    (r"(encoder\.layers\.\d+)\.self_attn_layer_norm", r"\1.layer_norm"),
    (r"(decoder\.layers\.\d+)\.self_attn_layer_norm", r"\1.x_layer_norm"),
    ("cross_attn_layer_norm", "dec_layer_norm"),
    ("final_layer_norm", "feed_forward.layer_norm"),
    (r"(encoder\.layers\.\d+)\.self_attn\.", r"\1.src_src_att."),
    (r"self_attn\.", "trg_trg_att."),
    (r"cross_attn\.", "src_trg_att."),
    (r"\b(q|k|v)_proj", r"\1_layer"),
    ("out_proj", "output_layer"),
    ("fc1", "feed_forward.pwff_layer.0"),
    ("fc2", "feed_forward.pwff_layer.3"),
)


def from_joeynmt(source: str | Path) -> Converted:
    """A Transformer that JoeyNMT trained with `layer_norm: "post"`.

    Args:
        source: the model_dir, of which best.ckpt is read, or a .ckpt in the folder of config.yaml, src_vocab.txt and
            trg_vocab.txt.

    Returns:
        The model, with the search of the section `testing`, and its tokenizer: for raw text if the vocabularies are
        SentencePiece or split at white space, for tokenized text if they need JoeyNMT's own classes.

    Raises:
        UserError: an option that cannot be expressed here, damaged or missing files.
    """
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    options = _read_options(folder / "config.yaml")
    _refuse(options["model"], folder / "config.yaml")
    checkpoint = _checkpoint(path)
    found = state_dicts.read_torch_file(checkpoint)
    state = found.get("model_state") if isinstance(found, Mapping) else None
    tensors = state_dicts.require_tensors(state, f"{checkpoint}: model_state")
    embeddings = "src_embed.lut.weight", "trg_embed.lut.weight"
    tying = state_dicts.find_tying(tensors, *embeddings, "decoder.output_layer.weight")
    fields = _fields(options["model"]) | tying.fields | state_dicts.width_and_depth(tensors, embeddings[0])
    special = _special(options["data"])
    ids = {f"{name}_token_id": number for number, name in enumerate(_SPECIAL_TOKENS)}
    fields |= {**ids, "decoder_start_token_id": ids["bos_token_id"]}
    locate = partial(state_dicts.rename, renames=RENAMES)
    model = state_dicts.build_model(fields, tensors, locate, tying.copies | _TABLES)
    _set_search(model.generation_config, options.get("testing") or {})
    sizes = fields["vocab_size"], fields["decoder_vocab_size"]
    tokens = [_tokens(folder, options["data"], *each, special) for each in zip(SIDES, sizes, strict=True)]
    return _with_tokenizers(model, folder, options["data"], tokens, special)


def _read_options(path: Path) -> dict[str, Any]:
    require_file(path, "name the model_dir of JoeyNMT, or a .ckpt in it")
    options = parse_yaml_mapping(path.read_bytes(), f"{path}: no configuration of JoeyNMT")
    for outer, inner in [("data", side) for side in SIDES] + [("model", stack) for stack in STACKS]:
        section = options.get(outer)
        if not isinstance(section, dict) or not isinstance(section.get(inner), dict):
            raise UserError(f"{path}: no configuration of JoeyNMT: {outer}.{inner} is missing")
    return options


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [path / "best.ckpt"] if (path / "best.ckpt").is_file() else sorted(path.glob("*.ckpt"))
    if len(found) != 1:
        raise UserError(f"{path}: no best.ckpt and {len(found)} other checkpoints; name the file")
    return found[0]


def _refuse(model: Mapping[str, Any], path: Path) -> None:
    for stack, default_type, default_norm in (("encoder", "recurrent", "pre"), ("decoder", "transformer", "post")):
        options, name = model[stack], f"{path}: model.{stack}"
        norm = options.get("layer_norm", default_norm)
        if options.get("type", default_type) != "transformer":
            raise UserError(f"{name}.type={options.get('type')}: only its Transformer can be converted")
        if norm != "post":
            raise UserError(f"{name}.layer_norm={norm}: such a model {PRE_NORM}")
        if options.get("alpha", 1.0) != 1:
            raise UserError(f"{name}.alpha={options['alpha']}: §3.1 adds the input once, not alpha times")
    widths = {model[stack].get("hidden_size", 512) for stack in STACKS}
    scales = {_scales_embedding(model, stack) for stack in STACKS[: 1 if model.get("tied_embeddings") else 2]}
    for name, values in (("hidden_size", widths), ("embeddings.scale", scales)):
        if len(values) > 1:
            raise UserError(f"{path}: {name} differs between encoder and decoder; here it is one")


def _scales_embedding(model: Mapping[str, Any], stack: str) -> bool:
    return bool((model[stack].get("embeddings") or {}).get("scale", False))


def _fields(model: Mapping[str, Any]) -> dict[str, Any]:
    activations = {model[stack].get("activation", "relu") for stack in STACKS}
    if len(activations) > 1:
        raise UserError(f"activation is {' and '.join(sorted(activations))}; here both stacks have the same")
    fields: dict[str, Any] = {
        "activation_function": activations.pop(),
        "scale_embedding": _scales_embedding(model, "encoder"),
        "layer_norm_eps": EPSILON,
        "dropout": model["decoder"].get("dropout", 0.1),
    }
    for stack, heads in (("encoder", 4), ("decoder", 8)):  # JoeyNMT's defaults
        fields[f"{stack}_attention_heads"] = model[stack].get("num_heads", heads)
        fields[f"{stack}_ffn_dim"] = model[stack].get("ff_size", 2048)
    return fields


def _special(data: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens as keyword arguments of a tokenizer; their ids are 0 to 3."""
    given = data.get("special_symbols") or {}
    for number, name in enumerate(_SPECIAL_TOKENS):
        if given.get(f"{name}_id", number) != number:
            raise UserError(
                f"data.special_symbols.{name}_id={given[f'{name}_id']}: {number} is the only one that fits"
            )
    return {f"{name}_token": str(given.get(f"{name}_token", token)) for name, token in _SPECIAL_TOKENS.items()}


def _tokens(folder: Path, data: Mapping[str, Any], side: str, size: int, special: Mapping[str, str]) -> list[str]:
    """The tokens of a side by id: special ones first, each once, as JoeyNMT's `Vocabulary` orders them."""
    file = folder / f"{side}_vocab.txt"
    if not file.is_file() and data[side].get("voc_file"):
        file = folder / Path(str(data[side]["voc_file"])).name
    given = data.get("special_symbols") or {}
    first = [*special.values(), *filter(None, [given.get("sep_token")]), *(given.get("lang_tags") or [])]
    tokens = dict.fromkeys([*map(str, first), *vocabularies.read_lines(file)])
    return vocabularies.require_size(list(tokens), size, file)


def _set_search(generation_config: Any, testing: Mapping[str, Any]) -> None:
    """JoeyNMT's beam search divides by the paper's ((5 + length) / 6)^α too."""
    beams, alpha = testing.get("beam_size", 1), testing.get("beam_alpha", testing.get("alpha", -1))
    generation_config.num_beams = int(beams)
    generation_config.paper_length_penalty = float(max(0, alpha))
    if testing.get("max_output_length", -1) > 0:
        generation_config.max_new_tokens = int(testing["max_output_length"])


def _with_tokenizers(
    model: Any, folder: Path, data: Mapping[str, Any], tokens: list[list[str]], special: Mapping[str, str]
) -> Converted:
    sides = [data[side] for side in SIDES]
    spm_models = [_sentencepiece_model(folder, *each) for each in zip(sides, tokens, strict=True)]
    found = [path for path in spm_models if path]
    if len(found) == len(SIDES):
        return Converted(model, vocabularies.sentencepiece_tokenizer(found, tokens, special))
    plain = [side.get("level") == "word" and not _preprocesses(side) for side in sides]  # split at white space
    lowercase = [bool(side.get("lowercase")) and is_plain for side, is_plain in zip(sides, plain, strict=True)]
    tokenizers = vocabularies.whitespace_tokenizers(tokens, special, ("src_vocab.txt", "trg_vocab.txt"), lowercase)
    return Converted(model, *tokenizers, note="" if all(plain) else vocabularies.PRETOKENIZED)


def _preprocesses(side: Mapping[str, Any]) -> bool:
    return side.get("normalize") or (side.get("tokenizer_cfg") or {}).get("pretokenizer", "none") != "none"


def _sentencepiece_model(folder: Path, side: Mapping[str, Any], tokens: list[str]) -> Path | None:
    """The SentencePiece model of a side, if JoeyNMT applies nothing else to its text."""
    file = (side.get("tokenizer_cfg") or {}).get("model_file")
    kind = side.get("tokenizer_type", side.get("bpe_type", "sentencepiece"))
    if (
        side.get("level") != "bpe"
        or kind != "sentencepiece"
        or side.get("lowercase")
        or _preprocesses(side)
        or not file
    ):
        return None
    path = folder / Path(str(file)).name
    # JoeyNMT never splits text into a piece of several characters that its vocabulary lacks; here it would be unknown.
    known = {*tokens, "<s>", "</s>", "<unk>"}
    forbidden = [piece for piece in vocabularies.sentencepiece_pieces(path) if len(piece) > 1 and piece not in known]
    return None if forbidden else path
