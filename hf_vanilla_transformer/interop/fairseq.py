"""fairseq's `transformer` checkpoints: one file with weights and options, and the dictionaries in the same folder."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from ..data.language_tokens import DIRECTIONS, MARKS, TOKENS
from ..inference.languages import name_languages
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError, shown
from . import state_dicts, vocabularies
from .converted import Converted, Fields, File, Tensors
from .options import Options, Unsupported
from .state_dicts import STACKS, Renames
from .transformers_folders import set_generation_config

# `Dictionary` puts them before the tokens of the file.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
_SPECIAL_NAMES = ("bos_token", "pad_token", "eos_token", "unk_token")
_IDS = {f"{name}_id": number for number, name in enumerate(_SPECIAL_NAMES)}
_IDS["decoder_start_token_id"] = _IDS["eos_token_id"]
_SIDES = ("source", "target")
_MARKS = {"src": "source", "tgt": "target"}  # values of --encoder-langtok

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
# Of the task: a translation starts with the token of an expert.
REFUSED_TASKS: Unsupported = {"num_experts": ((False,), "is a mixture of experts")}
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

_MULTILINGUAL = "translation_multi_simple_epoch"
_BART = "translation_from_pretrained_bart"
_LANGUAGE_OPTIONS = ("langs", "encoder_langtok", "decoder_langtok", "lang_tok_replacing_bos_eos")

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
        source_language, target_language: which dictionaries, unless the checkpoint names them. A checkpoint of
            `translation_multi_simple_epoch` keeps all directions with these dictionaries, and this is the default one.

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
    model = state_dicts.build_model(fields, tensors, _locate)
    set_generation_config(model, _search(search) | _IDS)
    folder = Path(data) if data else path.parent
    dictionaries = _Dictionaries(task, folder, source_language, target_language)
    raw_text = vocabularies.raw_text(
        vocabularies.both_sides(sentencepiece, target_sentencepiece),
        vocabularies.both_sides(codes),
    )
    converted = _with_tokenizers(model, dictionaries, raw_text)
    if source_language and target_language:
        tokenizers = filter(None, (converted.tokenizer, converted.target_tokenizer))
        name_languages(tokenizers, (source_language, target_language))
    converted.notes += search.dropped(DROPPED)
    return converted


def _with_tokenizers(
    model: VanillaTransformerForConditionalGeneration,
    dictionaries: "_Dictionaries",
    raw_text: Sequence[Fields],
) -> Converted:
    """The model with tokenizers of its dictionaries, or without any if these are not in the folder.

    Args:
        raw_text: of `vocabularies.raw_text`, for source and target.

    Raises:
        UserError: raw text needs dictionaries, but there are none or they overwrite special tokens.
    """
    files = dictionaries.files(dictionaries.direction)
    if not all(file.is_file() for file in files):
        if any(raw_text):
            raise UserError(
                "dict.SOURCE.txt and dict.TARGET.txt are not in the checkpoint's folder: give data=FOLDER"
            )
        is_unnamed = any(dictionaries.folder.glob("dict.*.txt"))
        note = "its dictionaries were not chosen: give source_language and target_language"
        return Converted(model, notes=[note] if is_unnamed else [])
    sizes = model.config.vocab_size, model.config.target_vocab_size
    tokens = [dictionaries.tokens(*pair) for pair in zip(files, sizes, strict=True)]
    if any(raw_text) and any(side[:4] != SPECIAL_TOKENS for side in tokens):
        reason = "leave out codes and sentencepiece, and tokenize the text first"
        raise UserError(f"a dictionary overwrites a special token: {reason}")
    sides = [
        vocabularies.Side(
            tokens=tokens_of_side,
            special=dict(zip(_SPECIAL_NAMES, tokens_of_side, strict=False)),
            origin=file,
            language=language,
            **raw,
        )
        for tokens_of_side, file, language, raw in zip(
            tokens, files, dictionaries.direction, raw_text, strict=True
        )
    ]
    converted = vocabularies.with_tokenizers(model, *sides)
    dictionaries.keep_directions(converted, files, tokens)
    return converted


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


class _Dictionaries:
    """The dictionaries of a task, and its languages."""

    def __init__(self, task: Options, folder: Path, source: str | None, target: str | None):
        """`folder` has the files, wherever they were at the training. `source` and `target` override the task's."""
        self.task = task
        self.folder = folder
        name = task.text("task", task.text("_name"))
        self.is_bart = name == _BART or task.text("lang_tok_style") == "mbart"
        self.is_multilingual = name == _MULTILINGUAL
        #: source and target of each direction of `translation_multi_simple_epoch`
        self.pairs: list[list[str]] = []
        if self.is_multilingual:
            self.pairs = [pair.split("-", 1) for pair in self._listed("lang_pairs") if "-" in pair]
        first = self.pairs[0] if self.pairs and "source_lang" not in task else ("None", "None")
        self.direction = [
            given or task.text(f"{side}_lang", code)
            for given, side, code in zip((source, target), _SIDES, first, strict=True)
        ]

    def _listed(self, name: str) -> list[str]:
        values = self.task.values.get(name)
        return values.split(",") if isinstance(values, str) else self.task.texts(name)

    def files(self, pair: Sequence[str]) -> list[Path]:
        """The files of source and target for two languages."""
        names = [
            self.task.text(f"{side}_dict")
            or self.task.text("fixed_dictionary", f"dict.{language}.txt")
            for side, language in zip(_SIDES, pair, strict=True)
        ]
        return [self.folder / Path(name).name for name in names]

    @cached_property
    def languages(self) -> dict[str, str]:
        """The token of each language, in the order of their ids (`MultilingualDatasetManager.load_langs`)."""
        codes = self._listed("langs") or sorted({code for pair in self.pairs for code in pair})
        if self.task.text("lang_dict"):
            lines = vocabularies.read_lines(self.folder / Path(self.task.text("lang_dict")).name)
            codes = [line.strip() for line in lines if line.strip()]
        return {code: f"[{code}]" if self.is_bart else f"__{code}__" for code in codes}

    def tokens(self, file: Path, size: int) -> list[str]:
        """The tokens of a file by id, and those of languages (`augment_dictionary`) if they are fewer than `size`."""
        tokens = _read_dictionary(file)
        if len(tokens) < size and self.languages:
            tokens += [*self.languages.values()] + ["<mask>"] * self.is_bart
        return tokens

    def keep_directions(
        self, converted: Converted, files: Sequence[Path], sides: Sequence[Sequence[str]]
    ) -> None:
        """Record the languages and the directions in the tokenizers, or add a note about tokens that they do not add.

        `translation_multi_simple_epoch` puts the token of a language before a source (`src_dataset_tranform_func`),
        and starts a translation with one (`inference_step`).
        """
        tokens = self.languages
        langtoks = self.task.values.get("langtoks")
        marks = langtoks.get("main") if isinstance(langtoks, Mapping) else None
        source, target = marks or (
            self.task.values.get("encoder_langtok"),
            self.task.flag("decoder_langtok"),
        )
        if (
            not self.is_multilingual
            or source not in (*_MARKS, None, "")
            or self.task.flag("lang_tok_replacing_bos_eos")
            or not all(map(set(tokens.values()).issubset, sides))
        ):
            given = [name for name in _LANGUAGE_OPTIONS if self.task.values.get(name)]
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            reason = (
                f"its task adds tokens of languages to the text ({names}), the tokenizer does not"
            )
            converted.notes += [reason] if tokens else []
            return
        if not source and not target:
            return
        kept = [pair for pair in self.pairs if self._have_content(pair, files)]
        if lost := ", ".join("-".join(pair) for pair in self.pairs if pair not in kept):
            reason = "are not kept: source_language and target_language choose"
            converted.notes.append(f"{lost} have other dictionaries, and {reason}")
        for tokenizer in filter(None, (converted.tokenizer, converted.target_tokenizer)):
            tokenizer.init_kwargs |= {
                DIRECTIONS: kept,
                MARKS: [_MARKS.get(source or ""), bool(target)],
                TOKENS: tokens,
            }

    def _have_content(self, pair: Sequence[str], files: Sequence[Path]) -> bool:
        """True if a direction has the dictionaries in these files. Folders may have one file for all languages."""
        return all(
            not other.is_file() or other.read_bytes() == file.read_bytes()
            for other, file in zip(self.files(pair), files, strict=True)
        )


def _read_dictionary(file: Path) -> list[str]:
    """The tokens of `Dictionary.load`: the special tokens, then one in each line before its count and flag."""
    tokens = list(SPECIAL_TOKENS)
    ids = {token: number for number, token in enumerate(tokens)}
    for number, line in enumerate(vocabularies.read_lines(file), 1):
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
