"""The generation settings that an export applies. A setting that it cannot apply is refused by its name."""

from typing import Any

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..utils.errors import UserError
from .translate_exported import check_settings, ends


def check_search(
    model: VanillaTransformerForConditionalGeneration, library: str, applied: set[str]
) -> dict[str, Any]:
    """The generation settings of a model, without defaults.

    Args:
        library: for messages.
        applied: the settings that choose between tokens, and that the export applies.

    Raises:
        UserError: a setting that the export does not apply, or a token outside the vocabulary.
    """
    settings = model.generation_config.to_diff_dict()
    try:
        check_settings(settings, model.config.target_vocab_size, applied)
    except ValueError as error:
        raise UserError(
            f"generation_config.json: {error}: {library} cannot apply it; change or remove it"
        ) from None
    return settings


def shortest(settings: dict[str, Any]) -> int:
    """The number of tokens after which a translation may end."""
    # Without the start token.
    return max(settings.get("min_new_tokens") or 0, (settings.get("min_length") or 0) - 1)


def longest(settings: dict[str, Any]) -> int | None:
    """The maximum number of tokens, the end included. None if it depends on the source."""
    length = settings.get("max_length")
    return settings.get("max_new_tokens") or (None if length is None else max(length - 1, 1))


def banned_tokens(settings: dict[str, Any]) -> list[int]:
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
