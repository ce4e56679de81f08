"""JoeyNMT's model folders: config.yaml, checkpoints and vocabularies."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..utils.errors import UserError, shown
from ..utils.untrusted import parse_yaml_mapping, require_file
from . import state_dicts, vocabularies
from .checkpoint import Checkpoint
from .converted import Converted, Fields, Tensors
from .options import Options
from .state_dicts import STACKS, Renames
from .vocabularies import TextSide

EPSILON = 1e-6  # of its LayerNorm
SIDES = ("src", "trg")
_SPECIAL_TOKENS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # by id
_IDS = {f"{name}_token_id": number for number, name in enumerate(_SPECIAL_TOKENS)}
_IDS["decoder_start_token_id"] = _IDS["bos_token_id"]
_TABLES = {"encoder.pe.pe", "decoder.pe.pe"}  # the sinusoids of §3.5

SEARCH_NOTE_OF_VERSION_1 = (
    "JoeyNMT 1 ends its beam search when the best candidate ends, "
    "`generate` when no other hypothesis can win any more"
)

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
    """A Transformer that JoeyNMT trained: pre-norm of version 1, or of version 2 with `layer_norm: "post"` or `"pre"`.

    Args:
        source: the model_dir with its best.ckpt, or a .ckpt in the folder of config.yaml, src_vocab.txt and
            trg_vocab.txt.

    Returns:
        The model, with the search of the section `testing`, and its tokenizer: for raw text if the vocabularies are
        SentencePiece or split at white space, for tokenized text if they need JoeyNMT's classes.
    """
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    options, is_version_1 = _read_options(folder / "config.yaml")
    architecture = options.section("model")
    data = options.section("data")
    _refuse(architecture)
    symbols = data.section("special_symbols")
    special = _special_tokens(symbols)
    # the separator and the language tags, the next tokens of the vocabulary
    further = [*filter(None, [symbols.text("sep_token")]), *symbols.texts("lang_tags")]
    sides = [_text(folder, data.section(side), side, special, further) for side in SIDES]
    if not all(side.spm for side in sides):
        sides = [replace(side, spm=None) for side in sides]
    search, notes = _search(options.section("testing"))
    if is_version_1:
        del search["beam_search_rule"], search["suppress_tokens"]
        notes.append(SEARCH_NOTE_OF_VERSION_1)
    else:
        # its search never writes these tokens
        banned = [special["bos_token"], special["pad_token"], *further]
        search["suppress_tokens"] += map(sides[1].tokens.index, banned)
    return Checkpoint(
        _read_tensors(path),
        partial(state_dicts.rename, renames=RENAMES),
        _fields(architecture) | _IDS,
        search,
        _TABLES,
        sides,
        notes,
    ).converted()


def _read_tensors(path: Path) -> Tensors:
    """The weights of a .ckpt, or of the best or only one in a folder."""
    files = [path]
    if path.is_dir():
        files = list(path.glob("best.ckpt")) or sorted(path.glob("*.ckpt"))
    if len(files) != 1:
        raise UserError(f"{path}: no best.ckpt and {len(files)} other checkpoints; name the file")
    state = state_dicts.read_torch_file(files[0])
    state = state.get("model_state") if isinstance(state, Mapping) else None
    return state_dicts.require_tensors(state, f"{files[0]}: model_state", "src_embed.lut.weight")


def _special_tokens(symbols: Options) -> dict[str, str]:
    """The special tokens by their names in tokenizers. Raises a UserError for other ids than the usual ones."""
    special = {}
    for number, (name, token) in enumerate(_SPECIAL_TOKENS.items()):
        if symbols.integer(f"{name}_id", number) != number:
            raise symbols.error(f"{name}_id", f"only {number} is supported")
        special[f"{name}_token"] = symbols.text(f"{name}_token", token)
    return special


def _read_options(path: Path) -> tuple[Options, bool]:
    """The options under the names of version 2, and whether they are of version 1."""
    require_file(path, "name the model_dir of JoeyNMT, or a .ckpt in it")
    refusal = f"{path}: no configuration of JoeyNMT"
    options = Options(parse_yaml_mapping(path.read_bytes(), refusal), f"{path}: ")
    data = options.section("data").values
    # its languages: text, or false for Norwegian, `no`
    is_version_1 = all(isinstance(data.get(side), str | bool) for side in SIDES)
    if is_version_1:
        options = Options(_of_version_2(options), options.where)
    for outer, inner in [("data", side) for side in SIDES] + [("model", stack) for stack in STACKS]:
        if not isinstance(options.section(outer).values.get(inner), Mapping):
            raise UserError(f"{refusal}: the section {outer}.{inner} is missing")
    return options, is_version_1


def _of_version_2(options: Options) -> Fields:
    """Options of version 1, which are the same for both sides. Its models are pre-norm.

    Its search may write an empty translation, and has its longest in the section `training`.
    """
    data = options.section("data")
    model = options.section("model")
    sides = {side: {**data.values, "voc_file": data.text(f"{side}_vocab")} for side in SIDES}
    stacks = {stack: {**model.section(stack).values, "layer_norm": "pre"} for stack in STACKS}
    longest = options.section("training").integer("max_output_length", -1)
    lengths = {"min_output_length": 0, "max_output_length": longest}
    return {
        "data": sides,
        "model": {**model.values, **stacks},
        "testing": {**options.section("testing").values, **lengths},
    }


def _refuse(model: Options) -> None:
    stacks = [model.section(stack) for stack in STACKS]
    for options, default_type in zip(stacks, ("recurrent", "transformer"), strict=True):
        if options.text("type", default_type) != "transformer":
            raise options.error("type", "only its Transformer can be converted")
        if options.number("alpha", 1.0) != 1:
            raise options.error("alpha", "§3.1 adds the input once, not alpha times")
    norms = stacks[0].text("layer_norm"), stacks[1].text("layer_norm", "post")
    if norms not in (("post", "post"), ("pre", "pre")):
        # without the option JoeyNMT's encoder is pre-norm, but has no normalisation after its last layer
        raise UserError(
            f"{model.where}encoder.layer_norm={shown(norms[0]) or 'missing'}, decoder.layer_norm={shown(norms[1])}: "
            f"pre in both or post in both is needed"
        )
    # tied embeddings have the encoder's options
    embedded = stacks[:1] if model.flag("tied_embeddings") else stacks
    for name, values in {
        "hidden_size": [options.integer("hidden_size", 512, 1) for options in stacks],
        "activation": [options.text("activation", "relu") for options in stacks],
        "embeddings.scale": [options.section("embeddings").flag("scale") for options in embedded],
    }.items():
        if values[0] != values[-1]:
            reason = f"encoder and decoder have {shown(values[0])} and {shown(values[1])}"
            raise UserError(f"{model.where}{name}: {reason}; here both have the same")


def _fields(model: Options) -> Fields:
    encoder, decoder = (model.section(stack) for stack in STACKS)
    dropout = decoder.number("dropout", 0.1, 0.0)
    fields: Fields = {
        "activation_function": encoder.text("activation", "relu"),
        "scale_embedding": encoder.section("embeddings").flag("scale"),
        "layer_norm_eps": EPSILON,
        "layer_norm_position": encoder.text("layer_norm"),
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
    }
    for stack, options, heads in zip(STACKS, (encoder, decoder), (4, 8), strict=True):
        # JoeyNMT's defaults.
        fields[f"{stack}_attention_heads"] = options.integer("num_heads", heads, 1)
        fields[f"{stack}_ffn_dim"] = options.integer("ff_size", 2048, 1)
    return fields


def _text(
    folder: Path, options: Options, side: str, special: Mapping[str, str], further: list[str]
) -> TextSide:
    """The text of a side. Its tokens are in the order of JoeyNMT's `Vocabulary`, each once, special ones first."""
    file = folder / f"{side}_vocab.txt"
    named = options.text("voc_file")
    if not file.is_file() and named:
        file = folder / Path(named).name
    listed = [*special.values(), *further, *vocabularies.vocabulary_lines(file)]
    tokens = list(dict.fromkeys(listed))
    is_split = options.text("level") == "word" and not _changes_text(options)
    return TextSide(
        tokens,
        special,
        origin=f"{side}_vocab.txt",
        is_tokenized=not is_split,
        lowercase=options.flag("lowercase"),
        spm=_sentencepiece_model(folder, options, tokens),
    )


def _search(testing: Options) -> tuple[Fields, list[str]]:
    """JoeyNMT's search, with the paper's length penalty, and notes on the differences of `generate`."""
    notes = []
    alpha = testing.number("alpha", testing.number("beam_alpha", -1.0))
    settings: Fields = {
        "num_beams": testing.integer("beam_size", 1, 1),
        "length_penalty": None,
        "paper_length_penalty": max(0.0, alpha),
        "min_new_tokens": testing.integer("min_output_length", 1, 0),
        "beam_search_rule": "joeynmt",
        "suppress_tokens": [],
        **_IDS,
    }
    if not testing.flag("generate_unk", True):
        settings["suppress_tokens"].append(_IDS["unk_token_id"])
    longest = testing.integer("max_output_length", -1)
    size = testing.integer("no_repeat_ngram_size", -1)
    penalty = testing.number("repetition_penalty", -1.0)
    if longest > 0:
        settings["max_new_tokens"] = longest
    else:
        notes.append(
            "a translation has at most 50 tokens more than its source, in JoeyNMT 1.5 times as many"
        )
    if size > 1:
        settings |= {"no_repeat_ngram_size": size, "encoder_no_repeat_ngram_size": size}
    if penalty > 1:
        # transformers takes the inverse for the encoder's tokens
        settings |= {"repetition_penalty": penalty, "encoder_repetition_penalty": 1 / penalty}
    if penalty > 1 or size > 1:
        notes.append(
            "JoeyNMT exempts special tokens from no_repeat_ngram_size and repetition_penalty, `generate` not"
        )
    return settings, notes


def _changes_text(side: Options) -> bool:
    pretokenizer = side.section("tokenizer_cfg").text("pretokenizer", "none")
    return side.flag("normalize") or pretokenizer != "none"


def _sentencepiece_model(folder: Path, side: Options, tokens: list[str]) -> Path | None:
    """The SentencePiece model of a side, if JoeyNMT applies nothing else to its text."""
    file = side.section("tokenizer_cfg").text("model_file")
    kind = side.text("tokenizer_type", side.text("bpe_type", "sentencepiece"))
    has_model = side.text("level") == "bpe" and kind == "sentencepiece" and file
    if not has_model or side.flag("lowercase") or _changes_text(side):
        return None
    path = folder / Path(file).name
    # JoeyNMT never splits text into a piece of several characters that its vocabulary lacks. Here it would be unknown.
    known = {*tokens, "<s>", "</s>", "<unk>"}
    pieces = vocabularies.sentencepiece_pieces(path)
    return path if all(len(piece) == 1 or piece in known for piece in pieces) else None
