"""The languages of a model folder, as codes such as `en` and `pt-BR`."""

import re
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..untrusted import read_json_object
from .documents import card_languages

# keys of tokenizer_config.json: Marian's; M2M-100's and NLLB's
_TOKENIZER_KEYS = ("source_lang", "target_lang"), ("src_lang", "tgt_lang")
_CODE = re.compile(r"([a-z]{2,3})((?:-[A-Za-z0-9]{2,8})*)")
_NAME = re.compile(r"(?:^|[-_.])([a-z]{2,3})[-_]([a-z]{2,3})$")


def model_languages(folder: str | Path) -> tuple[str, str] | None:
    """The source and target language of a model, or None if they are unknown.

    They are taken from its card, from its tokenizer, and as a last hint from the name of the folder, such as
    `numbers_en_de` and `opus-mt-en-de`. The folder need not exist, so that a name on the Hub can be given.
    """
    folder = Path(folder)
    languages = card_languages(folder)
    if len(languages) == 2:
        return languages[0], languages[1]
    name = _NAME.search(folder.resolve().name)
    return _tokenizer_languages(folder) or ((name[1], name[2]) if name else None)


def _tokenizer_languages(folder: Path) -> tuple[str, str] | None:
    """The languages in tokenizer_config.json: two keys, or the list `langs` of FSMT."""
    try:
        settings = read_json_object(folder / "tokenizer_config.json")
    except (OSError, UserError):
        return None
    langs = settings.get("langs")
    for values in (*([settings.get(key) for key in keys] for keys in _TOKENIZER_KEYS), langs):
        first, second, *_ = [*map(language_code, values if isinstance(values, list) else ()), None, None]
        if first and second:
            return first, second
    return None


def language_code(value: Any) -> str | None:
    """A language code with hyphens, such as pt-BR for pt_BR, or None if the value is no code."""
    text = value.replace("_", "-").removesuffix("-XX") if isinstance(value, str) else ""  # en_XX: mBART
    return text if _CODE.fullmatch(text) else None
