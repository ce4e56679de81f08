"""fairseq's `transformer` checkpoints: one file with weights and options, and the dictionaries in the same folder."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..inference.languages import name_languages
from ..utils.errors import UserError, shown
from . import state_dicts, vocabularies
from .checkpoint import Checkpoint
from .converted import Converted, Fields, File, Tensors
from .options import Options, Unsupported
from .state_dicts import STACKS, Renames

# `Dictionary` puts them before the tokens of the file.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
_SPECIAL_NAMES = ("bos_token", "pad_token", "eos_token", "unk_token")
_IDS = {f"{name}_id": number for number, name in enumerate(_SPECIAL_NAMES)}
_IDS["decoder_start_token_id"] = _IDS["eos_token_id"]
_SIDES = ("source", "target")

# Options of other architectures. False stands for 0 too.
REFUSED: Unsupported = {
    "layernorm_embedding": ((False,), "normalises the embeddings, §3.4 does not"),
    "no_token_positional_embeddings": ((False,), "leaves out the positions of §3.5"),
    "adaptive_input": ((False,), "has embeddings of different widths"),
    "adaptive_softmax_cutoff": ((False,), "has an adaptive softmax"),
    "no_decoder_final_norm": ((False,), "has no normalisation after the decoder"),
    "no_cross_attention": ((False,), "has a decoder without cross-attention"),
    "cross_self_attention": ((False,), "attends to source and target at once"),
    "layer_wise_attention": ((False,), "attends to every encoder layer"),
    "encoder_layers_to_keep": ((False,), "leaves out layers when it is loaded"),
    "decoder_layers_to_keep": ((False,), "leaves out layers when it is loaded"),
    "base_layers": ((False,), "has BASE layers"),
    "char_inputs": ((False,), "reads characters"),
    "quant_noise_scalar": ((False,), "computes with weights rounded to 8 bits"),
    "encoder_xformers_att_config": ((False,), "may have another attention"),
    "decoder_xformers_att_config": ((False,), "may have another attention"),
}
# Of the task: a translation starts with the token of an expert, or of a language.
REFUSED_TASKS: Unsupported = {
    "num_experts": ((False,), "is a mixture of experts"),
    "lang_pairs": ((None,), "chooses between directions by tokens that are not kept"),
}
# Other models whose names start with "transformer", and what they do.
_OTHER_MODELS = re.compile(r"lm|unidirectional|monotonic|pointer_generator")

# Options of the search without a counterpart in `generate`, with the values that do nothing.
DROPPED = {
    "max_len_a": 0,
    "unkpen": 0,
    "match_source_len": False,
    "no_early_stop": False,
    "prefix_size": 0,
    "sampling": False,
    "diverse_beam_groups": -1,
    "diversity_rate": -1.0,
    "temperature": 1.0,
    "lm_weight": 0.0,
    "constraints": False,
    "replace_unk": False,
    "iter_decode_with_beam": 1,
    "decoding_format": "",
    "retain_dropout": False,
}

_BART = "translation_from_pretrained_bart"
_LANGUAGE_OPTIONS = ("langs", "encoder_langtok", "decoder_langtok")

# fairseq's names of activations, if they differ -> transformers' names.
ACTIVATIONS = {"gelu_accurate": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}

# Tensor names of older versions.
_UPGRADES: Renames = (
    (r"layer_norms\.0\.", "self_attn_layer_norm."),
    (r"(encoder\.layers\.\d+)\.layer_norms\.1\.", r"\1.final_layer_norm."),
    (r"(decoder\.layers\.\d+)\.layer_norms\.1\.", r"\1.encoder_attn_layer_norm."),
    (r"layer_norms\.2\.", "final_layer_norm."),
    (r"^decoder\.embed_out$", "decoder.output_projection.weight"),
)
_NOT_WEIGHTS = re.compile(
    r"(en|de)coder\.(version|embed_positions\.(_float_tensor|weights))"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"  # copies in version 0.12, filled at inference
)
_POSITIONS = "coder.embed_positions.weight"


def from_fairseq(
    checkpoint: str | Path,
    *,
    data: File = None,
    codes: File = None,
    sentencepiece: File = None,
    target_sentencepiece: File = None,
    source_language: str | None = None,
    target_language: str | None = None,
) -> Converted:
    """A checkpoint of fairseq's `transformer` architectures, post-norm or pre-norm.

    Args:
        checkpoint: such as checkpoint_best.pt.
        data: the folder of dict.SOURCE.txt and dict.TARGET.txt. Default: the checkpoint's.
        codes: a file of subword-nmt or fastBPE. The tokenizer then takes raw text, through Moses.
        sentencepiece, target_sentencepiece: models. The tokenizer then takes raw text. One may serve both sides.
        source_language, target_language: which dictionaries, unless the checkpoint names them.

    Returns:
        The model with fairseq's search and, if there are dictionaries, a tokenizer. Without codes or a SentencePiece
        model it takes tokenized text, as fairseq-preprocess does.
    """
    path = Path(checkpoint)
    state = state_dicts.read_torch_file(path)
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"{path}: no checkpoint of fairseq: it has no 'model'")
    options, task, search = _options(state, path)
    _refuse(options, task)
    tensors = _upgraded(
        state_dicts.require_tensors(state["model"], f"{path}: model", "encoder.embed_tokens.weight")
    )
    fields = _fields(options) | _IDS | _positions(tensors)
    raw_text = vocabularies.raw_text(
        vocabularies.both_sides(sentencepiece, target_sentencepiece),
        vocabularies.both_sides(codes),
    )
    folder = Path(data) if data else path.parent
    sides, notes = _texts(task, folder, (source_language, target_language), raw_text)
    notes += search.dropped(DROPPED)
    settings = _search(search) | _IDS
    converted = Checkpoint(tensors, _locate, fields, settings, sides=sides, notes=notes).converted()
    if source_language and target_language:
        tokenizers = filter(None, (converted.tokenizer, converted.target_tokenizer))
        name_languages(tokenizers, (source_language, target_language))
    return converted


def _texts(
    task: Options, folder: Path, direction: Sequence[str | None], raw_text: Sequence[Fields]
) -> tuple[list[vocabularies.TextSide], list[str]]:
    """The text of source and target, if their dictionaries are in the folder, and notes.

    Args:
        direction: the languages of source and target, if they are not the task's.
        raw_text: of `vocabularies.raw_text`, for source and target.

    Raises:
        UserError: raw text needs dictionaries, but there are none or they overwrite special tokens.
    """
    languages = [
        language or task.text(f"{side}_lang", "None")
        for language, side in zip(direction, _SIDES, strict=True)
    ]
    files = [folder / f"dict.{language}.txt" for language in languages]
    if not all(file.is_file() for file in files):
        if any(raw_text):
            raise UserError(
                "dict.SOURCE.txt and dict.TARGET.txt are not in the checkpoint's folder: give data=FOLDER"
            )
        is_unnamed = any(folder.glob("dict.*.txt"))
        note = "its dictionaries were not chosen: give source_language and target_language"
        return [], [note] if is_unnamed else []
    added = _language_tokens(task)
    sides = []
    for file, language, raw in zip(files, languages, raw_text, strict=True):
        tokens = _read_dictionary(file)
        if raw and tokens[:4] != SPECIAL_TOKENS:
            reason = "leave out codes and sentencepiece, and tokenize the text first"
            raise UserError(f"a dictionary overwrites a special token: {reason}")
        tokens += [token for token in added if token not in tokens]
        special = dict(zip(_SPECIAL_NAMES, tokens, strict=False))
        sides.append(vocabularies.TextSide(tokens, special, origin=file, language=language, **raw))
    given = [f"--{name.replace('_', '-')}" for name in _LANGUAGE_OPTIONS if name in task]
    names = ", ".join(given)
    note = f"its task adds tokens of languages to the text ({names}), the tokenizer does not"
    return sides, [note] if added else []


def _language_tokens(task: Options) -> list[str]:
    """The tokens of languages that a multilingual task adds to its dictionaries (`augment_dictionary`)."""
    languages = task.values.get("langs")
    codes = languages.split(",") if isinstance(languages, str) else task.texts("langs")
    if not codes:
        return []
    if task.text("task", task.text("_name")) == _BART or task.text("lang_tok_style") == "mbart":
        return [*(f"[{code}]" for code in codes), "<mask>"]
    return [f"__{code}__" for code in codes]


def _options(state: Fields, path: Path) -> tuple[Options, Options, Options]:
    """Options of model, task and generation: one namespace in older checkpoints, sections in newer ones."""
    where = f"{path}: --"
    if state.get("args") is not None:
        options = state_dicts.plain_options(state["args"])
        return Options(options, where), Options(options, where), Options({}, where)
    sections = state.get("cfg")
    if not isinstance(sections, Mapping) or "model" not in sections:
        raise UserError(f"{path}: no checkpoint of fairseq: it has neither 'args' nor 'cfg'")
    options = state_dicts.plain_options(sections["model"])
    for section in (*STACKS, "quant_noise"):  # of `transformer` itself
        for name, value in state_dicts.plain_options(options.pop(section, None)).items():
            options[f"{section}_{name}"] = value
    task, search = (
        Options(state_dicts.plain_options(sections.get(name)), where)
        for name in ("task", "generation")
    )
    return Options(options, where), task, search


def _search(search: Options) -> Fields:
    """The options of fairseq-generate under the names of `generate`, with fairseq's defaults."""
    beams = search.integer("beam", 5, 1)
    settings: Fields = {
        "num_beams": beams,
        "length_penalty": 0.0 if search.flag("unnormalized") else search.number("lenpen", 1.0),
        "min_new_tokens": search.integer("min_len", 1, 0),
        "no_repeat_ngram_size": search.integer("no_repeat_ngram_size", 0, 0),
        "suppress_tokens": [_IDS["pad_token_id"]],
        "forced_eos_token_id": _IDS["eos_token_id"],
    }
    if beams > 1:
        settings["early_stopping"] = True  # it ends when as many hypotheses as beams have ended
    if not search.number("max_len_a", 0.0):
        # the end-of-sentence token is not counted
        settings["max_new_tokens"] = search.integer("max_len_b", 200, 1) + 1
    return settings


def _refuse(options: Options, task: Options) -> None:
    arch = "arch" if options.text("arch") else "_name"
    if not options.text(arch).startswith("transformer") or _OTHER_MODELS.search(options.text(arch)):
        raise options.error(
            arch, "only fairseq's transformer architectures of translation are converted"
        )
    options.refuse(REFUSED)
    task.refuse(REFUSED_TASKS)
    if len({options.flag(f"{stack}_normalize_before") for stack in STACKS}) > 1:
        raise options.error(
            "encoder_normalize_before", "the decoder has a different order of normalisations"
        )
    width = options.integer("encoder_embed_dim")
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if options.integer(name, width) != width:
            reason = "here all sub-layers have one width d_model (§3.1)"
            raise options.error(name, f"--encoder-embed-dim={width}: {reason}")


def _upgraded(tensors: Tensors) -> Tensors:
    """The weights under the names of newer versions, with separate projections."""
    kept = {name: tensor for name, tensor in tensors.items() if not _NOT_WEIGHTS.fullmatch(name)}
    upgraded = {state_dicts.rename(name, _UPGRADES): tensor for name, tensor in kept.items()}
    for name in list(upgraded):
        if fused := re.fullmatch(r"(.*)\.in_proj_(weight|bias)", name):
            for projection, part in zip("qkv", upgraded.pop(name).chunk(3), strict=False):
                upgraded[f"{fused[1]}.{projection}_proj.{fused[2]}"] = part
    return upgraded


def _positions(tensors: Tensors) -> Fields:
    """The fields of positions. fairseq saves only learned ones.

    Their tables in `tensors` lose the rows that no position uses: the first one follows the padding's.
    """
    tables = {name: table for name, table in tensors.items() if name.endswith(_POSITIONS)}
    if not tables:
        return {"position_encoding_type": "sinusoidal_fairseq"}
    if len(tables) == 1:
        raise UserError(
            f"{next(iter(tables))}: the other stack has sinusoids; here both stacks have the same kind"
        )
    first = _IDS["pad_token_id"] + 1
    end = min(map(len, tables.values()))
    tensors |= {name: table[first:end] for name, table in tables.items()}
    return {"position_encoding_type": "learned", "max_position_embeddings": end - first}


def _fields(options: Options) -> Fields:
    activation = options.text("activation_fn", "relu")
    fields: Fields = {
        "activation_function": ACTIVATIONS.get(activation, activation),
        "layer_norm_position": "pre" if options.flag("encoder_normalize_before") else "post",
        "scale_embedding": not options.flag("no_scale_embedding"),
    }
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        fields[name] = options.number(name, 0.0, 0.0)
    if not fields["activation_dropout"]:  # its name before version 0.7
        fields["activation_dropout"] = options.number("relu_dropout", 0.0, 0.0)
    for stack in STACKS:
        name = f"{stack}_attention_heads"
        fields[name] = options.integer(name, None, 1)
        if fields[name] is None:
            raise options.error(name, "the checkpoint's options must give the number of heads")
    return fields


def _locate(name: str) -> str:
    name = name.removeprefix("model.").replace("cross_attn", "encoder_attn")
    return name.replace("lm_head", "decoder.output_projection")


def _read_dictionary(file: Path) -> list[str]:
    """The tokens of `Dictionary.load`: the special tokens, then one in each line before its count and flag."""
    tokens = list(SPECIAL_TOKENS)
    ids = {token: number for number, token in enumerate(tokens)}
    for number, line in enumerate(vocabularies.vocabulary_lines(file), 1):
        if not line.strip():
            continue
        rest, _, last = line.rstrip().rpartition(" ")
        overwrites = last == "#fairseq:overwrite"
        token, _, count = rest.rpartition(" ") if overwrites else (rest, "", last)
        if not count.isdigit():
            raise UserError(
                f"{file}: line {number} is {shown(line)!r}: a token and its count are needed"
            )
        if overwrites and token in ids:
            # the earlier token keeps its id, but no text contains it any more
            tokens[ids[token]] = f"{token}#overwritten-{number}"
        ids[token] = len(tokens)
        tokens.append(token)
    return tokens
