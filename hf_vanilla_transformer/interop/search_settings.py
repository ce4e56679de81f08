"""The generation settings that each export applies. A setting that an export cannot apply is refused by its name."""

from typing import Any

import numpy as np

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from .converted import Fields

ARGOS = "Argos Translate"
CTRANSLATE2 = "CTranslate2"
MARIAN = "Marian"
ONNX = "the ONNX export"

#: Each setting that chooses between tokens, and the libraries that apply it. Marian's forced end replaces the last
#: token at the limit, which is no text.
APPLIED = {
    "min_length": {ARGOS, CTRANSLATE2, ONNX},
    "min_new_tokens": {ARGOS, CTRANSLATE2, ONNX},
    "repetition_penalty": {CTRANSLATE2},
    "no_repeat_ngram_size": {CTRANSLATE2},
    "bad_words_ids": {ARGOS, CTRANSLATE2, MARIAN, ONNX},
    "suppress_tokens": {ARGOS, CTRANSLATE2, MARIAN, ONNX},
    "begin_suppress_tokens": {ONNX},
    "forced_bos_token_id": {CTRANSLATE2, ONNX},
    "forced_eos_token_id": {ARGOS, CTRANSLATE2, MARIAN, ONNX},
}
#: Settings that do not change which token is best: of lengths, of a beam search, of sampling, of speed and of outputs.
HARMLESS = {
    "max_length",
    "max_new_tokens",
    "max_length_over_source",
    "decoder_start_token_id",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "num_beams",
    "length_penalty",
    "paper_length_penalty",
    "counted_prefix",
    "beam_search_rule",
    "early_stopping",
    "num_return_sequences",
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
        if name in HARMLESS or value in neutral:
            continue
        if library not in APPLIED.get(name, ()):
            raise UserError(
                f"generation_config.json: {name}={value}: {library} cannot apply it; change or remove it"
            )
        if name in _TOKENS and not all(0 <= token < size for token in flat(value)):
            raise UserError(
                f"generation_config.json: {name}={value}: the vocabulary has {size} tokens"
            )
    return settings


def flat(value: Any) -> list[int]:
    """The token ids of a setting: one, several, or several lists."""
    if not isinstance(value, list):
        return [value]
    return [token for part in value for token in flat(part)]


def best_token(scores: np.ndarray, tokens: list[int], limit: int, settings: Fields) -> int:
    """The best next token, as `generate` chooses it with the settings that `ONNX` applies.

    Args:
        scores: logits (V), which are changed.
        tokens: of the translation until now.
        limit: its maximum length.
        settings: of generation_config.json.
    """
    first = settings.get("forced_bos_token_id")
    last = settings.get("forced_eos_token_id")
    if len(tokens) + 1 == limit and last is not None:
        return flat(last)[0]
    if not tokens and first is not None:
        return first
    banned = banned_tokens(settings)
    if len(tokens) == int(first is not None):
        banned += settings.get("begin_suppress_tokens") or []
    if len(tokens) < shortest(settings):
        banned += ends(settings)
    scores[banned] = -np.inf
    return int(scores.argmax())


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


def unusual_heads(config: VanillaTransformerConfig) -> dict[str, bool]:
    """The fields of heads, and whether they differ from the encoder's number h of heads of width d_model / h."""
    heads = config.encoder_attention_heads
    widths = None, config.d_model // heads
    return {
        "decoder_attention_heads": config.decoder_attention_heads != heads,
        "head_dim": config.head_dim not in widths,
        "value_head_dim": config.value_head_dim not in widths,
    }
