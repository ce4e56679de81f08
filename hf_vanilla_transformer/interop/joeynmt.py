"""JoeyNMT's model folders: config.yaml, checkpoints and vocabularies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from .converting import Converted
from .state_dicts import Names, build_model, read_torch_file, rename, require_tensors, width_and_depth, word_matrices
from .vocabularies import pieces_tokenizer, read_lines, sentencepiece_pieces, sentencepiece_tokenizer

EPSILON = 1e-6  # of its normalisations
_SPECIAL_WORDS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # in the order of their numbers
_TABLES = {"encoder.pe.pe", "decoder.pe.pe"}  # the sinusoids of §3.5
_IN_PIECES = "it takes text that is in pieces already, with spaces between"

NAMES: Names = (
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
        source: the model_dir, whose best.ckpt is taken, or a .ckpt with config.yaml, src_vocab.txt and trg_vocab.txt
            beside it.

    Returns:
        The model, decoding as `testing` says, and its tokenizer: of raw text for SentencePiece and words, of text in
        pieces for what only JoeyNMT's own classes can do.

    Raises:
        UserError: an option that cannot be expressed here, damaged or missing files.
    """
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    options = _read_options(folder / "config.yaml")
    _refuse(options["model"], folder / "config.yaml")
    checkpoint = _checkpoint(path)
    found = read_torch_file(checkpoint)
    tensors = require_tensors(
        found.get("model_state") if isinstance(found, Mapping) else None, f"{checkpoint}: model_state"
    )
    words = word_matrices(tensors, "src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer.weight")
    layers = {f"{stack}_layers": f"{stack}.layers." for stack in ("encoder", "decoder")}
    fields = _fields(options["model"]) | words.fields
    fields |= width_and_depth(tensors, "src_embed.lut.weight", layers)
    special = _special(options["data"])
    ids = {f"{name}_token_id": number for number, name in enumerate(_SPECIAL_WORDS)}
    fields |= {**ids, "decoder_start_token_id": ids["bos_token_id"]}
    model = build_model(fields, tensors, lambda name: rename(name, NAMES), words.copies | _TABLES)
    _decode_as(model.generation_config, options.get("testing") or {})
    sides = [
        _words(folder, options["data"], side, special, size)
        for side, size in (("src", fields["vocab_size"]), ("trg", fields["decoder_vocab_size"]))
    ]
    return _with_tokenizers(Converted(model), folder, options["data"], sides, special)


def _read_options(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; name the model_dir of JoeyNMT, or a .ckpt in it")
    try:
        options = yaml.safe_load(path.read_bytes().decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no configuration of JoeyNMT ({' '.join(str(error).split())[:120]})") from None
    for names in (("data", "src"), ("data", "trg"), ("model", "encoder"), ("model", "decoder")):
        section = options
        for name in names:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise UserError(f"{path}: no configuration of JoeyNMT: {'.'.join(names)} is missing")
    return options


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [path / "best.ckpt"] if (path / "best.ckpt").is_file() else sorted(path.glob("*.ckpt"))
    if len(found) != 1:
        raise UserError(f"{path}: no best.ckpt and {len(found)} other checkpoints; name the file")
    return found[0]


def _refuse(model: Mapping[str, Any], path: Path) -> None:
    for stack, default in (("encoder", "pre"), ("decoder", "post")):
        options = model[stack]
        if options.get("type", "recurrent" if stack == "encoder" else "transformer") != "transformer":
            raise UserError(f"{path}: model.{stack}.type={options.get('type')}: only its Transformer can be converted")
        norm = options.get("layer_norm", default)
        if norm != "post":
            raise UserError(
                f"{path}: model.{stack}.layer_norm={norm}: such a model normalises before each sub-layer, this "
                f"architecture after (§3.1)"
            )
        if options.get("alpha", 1.0) != 1:
            raise UserError(
                f"{path}: model.{stack}.alpha={options['alpha']}: §3.1 adds the input once, not alpha times"
            )
    widths = {model[stack].get("hidden_size", 512) for stack in ("encoder", "decoder")}
    scales = {_embeddings(model, stack).get("scale", False) for stack in ("encoder", "decoder")}
    if model.get("tied_embeddings"):
        scales = {_embeddings(model, "encoder").get("scale", False)}
    for name, values in (("hidden_size", widths), ("embeddings.scale", scales)):
        if len(values) > 1:
            raise UserError(f"{path}: {name} differs between encoder and decoder; here it is one")


def _embeddings(model: Mapping[str, Any], stack: str) -> Mapping[str, Any]:
    return model[stack].get("embeddings") or {}


def _fields(model: Mapping[str, Any]) -> dict[str, Any]:
    activations = {model[stack].get("activation", "relu") for stack in ("encoder", "decoder")}
    if len(activations) > 1:
        raise UserError(f"activation is {' and '.join(sorted(activations))}; here both stacks have the same")
    fields: dict[str, Any] = {
        "activation_function": activations.pop(),
        "scale_embedding": bool(_embeddings(model, "encoder").get("scale", False)),
        "layer_norm_eps": EPSILON,
        "dropout": model["decoder"].get("dropout", 0.1),
    }
    for stack, heads in (("encoder", 4), ("decoder", 8)):  # its defaults
        fields[f"{stack}_attention_heads"] = model[stack].get("num_heads", heads)
        fields[f"{stack}_ffn_dim"] = model[stack].get("ff_size", 2048)
    return fields


def _special(data: Mapping[str, Any]) -> dict[str, str]:
    """The special words by the names of tokenizers; their numbers are 0 to 3."""
    given = data.get("special_symbols") or {}
    for number, name in enumerate(_SPECIAL_WORDS):
        if given.get(f"{name}_id", number) != number:
            raise UserError(
                f"data.special_symbols.{name}_id={given[f'{name}_id']}: {number} is the only one that fits"
            )
    return {f"{name}_token": str(given.get(f"{name}_token", word)) for name, word in _SPECIAL_WORDS.items()}


def _words(folder: Path, data: Mapping[str, Any], side: str, special: Mapping[str, str], size: int) -> list[str]:
    """The words of a side in the order of their numbers: special ones first, each once, as `Vocabulary` does."""
    file = folder / f"{side}_vocab.txt"
    if not file.is_file() and data[side].get("voc_file"):
        file = folder / Path(str(data[side]["voc_file"])).name
    given = data.get("special_symbols") or {}
    first = [*special.values(), *filter(None, [given.get("sep_token")]), *(given.get("lang_tags") or [])]
    words = list(dict.fromkeys([*map(str, first), *read_lines(file)]))
    if len(words) != size:
        raise UserError(f"{file}: {len(words)} words with the special ones, but the model has {size}")
    return words


def _decode_as(generation_config: Any, testing: Mapping[str, Any]) -> None:
    """Its beam search divides by the paper's ((5 + length) / 6)^α too."""
    beams, alpha = testing.get("beam_size", 1), testing.get("beam_alpha", testing.get("alpha", -1))
    generation_config.num_beams = int(beams)
    generation_config.paper_length_penalty = float(max(0, alpha))
    if testing.get("max_output_length", -1) > 0:
        generation_config.max_new_tokens = int(testing["max_output_length"])


def _with_tokenizers(
    converted: Converted, folder: Path, data: Mapping[str, Any], sides: list[list[str]], special: Mapping[str, str]
) -> Converted:
    source, target = sides
    models = [
        _sentencepiece_model(folder, data[side], words) for side, words in zip(("src", "trg"), sides, strict=True)
    ]
    if models[0] and models[1]:
        tokenizer = sentencepiece_tokenizer(models[0], models[1], source, target, special, "the vocabularies")
        return Converted(converted.model, tokenizer)
    plain = [_is_plain(data[side]) for side in ("src", "trg")]
    lowercase = [
        bool(data[side].get("lowercase")) and is_plain for side, is_plain in zip(("src", "trg"), plain, strict=True)
    ]
    in_pieces = pieces_tokenizer(source, special, "src_vocab.txt", lowercase[0])
    for_target = in_pieces
    if source != target or lowercase[0] != lowercase[1]:
        for_target = pieces_tokenizer(target, special, "trg_vocab.txt", lowercase[1])
    return Converted(converted.model, in_pieces, for_target, note="" if all(plain) else _IN_PIECES)


def _is_plain(side: Mapping[str, Any]) -> bool:
    """Whether words are what stands between spaces, and nothing more is done to them than lower-casing."""
    steps = side.get("tokenizer_cfg") or {}
    return side.get("level") == "word" and not side.get("normalize") and steps.get("pretokenizer", "none") == "none"


def _sentencepiece_model(folder: Path, side: Mapping[str, Any], words: list[str]) -> Path | None:
    """The model of a side, if what it does alone is what JoeyNMT does with it."""
    steps = side.get("tokenizer_cfg") or {}
    kind = side.get("tokenizer_type", side.get("bpe_type", "sentencepiece"))
    more = side.get("lowercase") or side.get("normalize") or steps.get("pretokenizer", "none") != "none"
    if side.get("level") != "bpe" or kind != "sentencepiece" or more or "model_file" not in steps:
        return None
    path = folder / Path(str(steps["model_file"])).name
    # It forbids longer pieces that are no words; they would be unknown here.
    known = {*words, "<s>", "</s>", "<unk>"}
    forbidden = [piece for piece in sentencepiece_pieces(path) if len(piece) > 1 and piece not in known]
    return None if forbidden else path
