"""The generation settings that each export applies.

A setting that chooses between tokens, and that an export cannot apply, is refused by its name (`APPLIED`). A setting
that chooses between hypotheses is named in the line about the export (`OF_HYPOTHESES`).
"""

from typing import Any

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from .converted import Fields

ARGOS = "Argos Translate"
CTRANSLATE2 = "CTranslate2"
ONNX = "the ONNX export"
PAGE = "the page"  # of `export --to web`
TRANSFORMERS = "MarianMTModel"

#: The library of each format of `exporting.FORMATS`.
LIBRARIES = {
    "argos": ARGOS,
    "ctranslate2": CTRANSLATE2,
    "marian": TRANSFORMERS,
    "onnx": ONNX,
}

#: Each setting that chooses between tokens, and the libraries that apply it.
APPLIED = {
    "min_length": {ARGOS, CTRANSLATE2, ONNX},
    "min_new_tokens": {ARGOS, CTRANSLATE2, ONNX},
    "repetition_penalty": {CTRANSLATE2},
    "no_repeat_ngram_size": {CTRANSLATE2},
    "bad_words_ids": {ARGOS, CTRANSLATE2, ONNX},
    "suppress_tokens": {ARGOS, CTRANSLATE2, ONNX},
    "begin_suppress_tokens": {ONNX},
    "forced_bos_token_id": {CTRANSLATE2, ONNX},
    "forced_eos_token_id": {ARGOS, CTRANSLATE2, ONNX},
}
#: The libraries that apply these settings with more than one end token, sequence of tokens or beam.
APPLIED_WITH_SEVERAL: dict[str, set[str]] = {
    "eos_token_id": {CTRANSLATE2, ONNX},
    "bad_words_ids": {CTRANSLATE2},
    "repetition_penalty": set(),
}
#: Settings that choose between hypotheses or end a search, and the libraries that apply them.
OF_HYPOTHESES: dict[str, set[str]] = {
    "num_beams": {CTRANSLATE2, PAGE, TRANSFORMERS},
    "num_return_sequences": {PAGE, TRANSFORMERS},
    "length_penalty": {CTRANSLATE2, PAGE, TRANSFORMERS},
    "paper_length_penalty": {PAGE},
    "counted_prefix": set(),
    "beam_search_rule": set(),
    "early_stopping": {PAGE, TRANSFORMERS},
    "max_length": {CTRANSLATE2, ONNX, PAGE, TRANSFORMERS},
    "max_new_tokens": {CTRANSLATE2, ONNX, PAGE, TRANSFORMERS},
    "max_length_over_source": {ONNX, PAGE},
}
# Of these, the ones that a greedy search does not have.
_OF_BEAMS = {
    "num_beams",
    "length_penalty",
    "paper_length_penalty",
    "counted_prefix",
    "beam_search_rule",
    "early_stopping",
}
#: Settings that do not change which token is best: of hypotheses, of sampling, of speed and of outputs.
HARMLESS = {
    *OF_HYPOTHESES,
    "decoder_start_token_id",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "renormalize_logits",
    "remove_invalid_values",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_lookbehind",
    "assistant_confidence_threshold",
    "target_lookbehind",
    "max_matching_ngram_size",
    "compile_config",
    "disable_compile",
    "low_memory",
    "prefill_chunk_size",
    "transformers_version",
    "_from_model_config",
}
_TOKENS = {name for name in APPLIED if name.endswith(("_ids", "_id", "s_tokens"))}
_NEUTRAL = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "num_beam_groups": 1,
    "guidance_scale": 1,
}


def check_search(model: VanillaTransformerForConditionalGeneration, library: str) -> Fields:
    """The generation settings of a model, without defaults.

    Args:
        library: a library of `APPLIED`.

    Raises:
        UserError: a setting that is neither harmless nor applied, or a token outside the vocabulary.
    """
    settings = model.generation_config.to_diff_dict()
    size = model.config.target_vocab_size
    for name, value in settings.items():
        neutral: list[Any] = [None, []]
        if name not in _TOKENS:
            neutral += [False, 0, {}, _NEUTRAL.get(name)]
        has_several = _has_several(name, value, model)
        if value in neutral or (name in HARMLESS and not has_several):
            continue
        applied = APPLIED_WITH_SEVERAL if has_several else APPLIED
        if library not in applied.get(name, ()):
            raise UserError(
                f"generation_config.json: {name}={value}: {library} cannot apply it; change or remove it"
            )
        if name in _TOKENS and not all(0 <= token < size for token in flat(value)):
            raise UserError(
                f"generation_config.json: {name}={value}: the vocabulary has {size} tokens"
            )
    return settings


def _has_several(name: str, value: Any, model: VanillaTransformerForConditionalGeneration) -> bool:
    """Return whether a setting has a value that only the libraries of `APPLIED_WITH_SEVERAL` apply."""
    if name == "eos_token_id":
        return len(flat(value)) > 1
    if name == "repetition_penalty":
        # CTranslate2 has that of `generate` for one beam: with several, `generate` penalises log-probabilities, not
        # logits. It also penalises the start token, which matters where it is an end token too.
        search = model.generation_config
        start = search.decoder_start_token_id
        start = model.config.decoder_start_token_id if start is None else start
        return (search.num_beams or 1) > 1 or start in flat(search.eos_token_id)
    is_list = name == "bad_words_ids" and isinstance(value, list)
    return is_list and len(flat(value)) > len(value)


def search_differences(model: VanillaTransformerForConditionalGeneration, library: str) -> str:
    """A note that names the settings of `OF_HYPOTHESES` that a library does not apply. No text if there are none."""
    settings = model.generation_config.to_diff_dict()
    beams = settings.get("num_beams") or 1
    # Argos never searches greedily
    unused = _OF_BEAMS if beams == 1 and library != ARGOS else set()
    ignored = []
    for name, libraries in OF_HYPOTHESES.items():
        value = None if name in unused else settings.get(name)
        if value is not None and value is not False and library not in libraries:
            ignored.append(f"{name}={value}")
    return f"; {library} does not apply {', '.join(ignored)}" if ignored else ""


def flat(value: Any) -> list[int]:
    """The token ids of a setting: one, several, or several lists."""
    if not isinstance(value, list):
        return [value]
    return [token for part in value for token in flat(part)]


def ends(settings: Fields) -> list[int]:
    """The end-of-sentence tokens."""
    tokens = settings.get("eos_token_id")
    return [] if tokens is None else flat(tokens)


def shortest(settings: Fields) -> int:
    """The number of tokens after which a translation may end."""
    # Without the start token.
    return max(settings.get("min_new_tokens") or 0, (settings.get("min_length") or 0) - 1)


def longest(settings: Fields) -> int | None:
    """The maximum number of tokens, the end included. None if it depends on the source."""
    length = settings.get("max_length")
    return settings.get("max_new_tokens") or (None if length is None else max(length - 1, 1))


def length_penalty(settings: Fields) -> float:
    """The exponent α of a beam search's scores, log P / length^α. The paper's formula differs, and has its own α."""
    paper: float = settings.get("paper_length_penalty", 1.0)
    return settings.get("length_penalty", paper)


def banned_tokens(settings: Fields) -> list[int]:
    """The single tokens that are never chosen."""
    single = {ids[0] for ids in settings.get("bad_words_ids") or [] if len(ids) == 1} - set(
        ends(settings)
    )
    return sorted(single.union(settings.get("suppress_tokens") or []))


def refuse_fields(config: VanillaTransformerConfig, reason: str, **refused: object) -> None:
    """Raise a UserError for the first field of a configuration that an export has to refuse."""
    for name, cannot in refused.items():
        if cannot:
            raise UserError(f"{name}={getattr(config, name)!r}: {reason}")
