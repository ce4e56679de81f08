"""The languages of a model folder, as codes such as `en` and `pt-BR`."""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..text.language_codes import SAME_LANGUAGE, CodePair, language_match
from ..text.language_tokens import DIRECTIONS, language_tokens
from ..text.tokenizer_files import load_tokenizers
from ..utils.errors import UserError
from ..utils.model_folder import are_pairs
from ..utils.untrusted import parse_yaml_mapping, read_json_object

#: English names for `GET /languages`. A code that is missing here is its name.
_NAMES = (
    "af=Afrikaans,ar=Arabic,az=Azerbaijani,be=Belarusian,bg=Bulgarian,bn=Bengali,bs=Bosnian,ca=Catalan,cs=Czech,"
    "cy=Welsh,da=Danish,de=German,el=Greek,en=English,eo=Esperanto,es=Spanish,et=Estonian,eu=Basque,fa=Persian,"
    "fi=Finnish,fr=French,ga=Irish,gl=Galician,gu=Gujarati,he=Hebrew,hi=Hindi,hr=Croatian,hu=Hungarian,"
    "hy=Armenian,id=Indonesian,is=Icelandic,it=Italian,ja=Japanese,ka=Georgian,kk=Kazakh,km=Khmer,kn=Kannada,"
    "ko=Korean,la=Latin,lb=Luxembourgish,lt=Lithuanian,lv=Latvian,mk=Macedonian,ml=Malayalam,mn=Mongolian,"
    "mr=Marathi,ms=Malay,mt=Maltese,my=Burmese,nb=Norwegian Bokmål,ne=Nepali,nl=Dutch,nn=Norwegian Nynorsk,"
    "no=Norwegian,pa=Punjabi,pl=Polish,ps=Pashto,pt=Portuguese,ro=Romanian,ru=Russian,si=Sinhala,sk=Slovak,"
    "sl=Slovenian,sq=Albanian,sr=Serbian,sv=Swedish,sw=Swahili,ta=Tamil,te=Telugu,th=Thai,tl=Tagalog,tr=Turkish,"
    "uk=Ukrainian,ur=Urdu,uz=Uzbek,vi=Vietnamese,zh=Chinese"
)
NAMES = dict(pair.split("=") for pair in _NAMES.split(","))

# keys of tokenizer_config.json: Marian's, then M2M-100's and NLLB's
_TOKENIZER_KEYS = ("source_lang", "target_lang"), ("src_lang", "tgt_lang")
_CODE = re.compile(r"([a-z]{2,3})((?:-[A-Za-z0-9]{2,8})*)")
_MAX_CARD = 2**20  # bytes that are read
_OPUS_NAME = re.compile(r"opus-mt-([a-z]{2,3})-([a-z]{2,3})")  # of the models of Helsinki-NLP


def model_languages(folder: str | Path) -> tuple[str, str] | None:
    """The source and target language of a model, or None if they are unknown or it has several directions.

    They are taken from its card, from its tokenizer, or from the name of a model of OPUS-MT, `opus-mt-en-de`. The
    folder need not exist, so that a name on the Hub can be given.
    """
    folder = Path(folder)
    if len(model_directions(folder)) > 1:
        return None
    languages = card_languages(folder)
    named = _tokenizer_languages(folder)
    if len(languages) == 2:
        # The cards of others list languages in any order.
        is_reversed = named and all(
            language_match(*pair) == SAME_LANGUAGE
            for pair in zip(reversed(languages), named, strict=True)
        )
        source, target = reversed(languages) if is_reversed else languages
        return source, target
    match = _OPUS_NAME.fullmatch(folder.resolve().name)
    return named or ((match[1], match[2]) if match else None)


def model_directions(folder: Path) -> list[CodePair]:
    """The directions of a model of many languages that was trained here, from its tokenizer_config.json."""
    pairs = _tokenizer_settings(folder).get(DIRECTIONS)
    if not are_pairs(pairs):
        return []
    return [(source, target) for source, target in pairs]


def has_language_tokens(folder: str | Path) -> bool:
    """Return whether the model of a folder has several directions. Reads its tokenizer."""
    return language_tokens(load_tokenizers(folder)[0]) is not None


def _tokenizer_settings(folder: Path) -> dict[str, object]:
    with suppress(OSError, UserError):
        return read_json_object(folder / "tokenizer_config.json")
    return {}


def _tokenizer_languages(folder: Path) -> tuple[str, str] | None:
    """The languages in tokenizer_config.json: two keys, or the list `langs` of FSMT."""
    settings = _tokenizer_settings(folder)
    candidates: list[object] = [[settings.get(key) for key in keys] for keys in _TOKENIZER_KEYS]
    candidates.append(settings.get("langs"))
    for values in candidates:
        codes = [language_code(value) for value in values[:2]] if isinstance(values, list) else []
        if len(codes) == 2 and codes[0] and codes[1]:
            return codes[0], codes[1]
    return None


def name_languages(tokenizers: Iterable[Any], languages: tuple[str, str] | None) -> None:
    """Store the languages in tokenizers, whose tokenizer_config.json then carries them to every copy and export.

    Classes that use their languages, such as `MarianTokenizer`, keep them.
    """
    if languages is None:
        return
    for tokenizer in tokenizers:
        if not any(hasattr(tokenizer, name) for name in ("source_lang", "src_lang", "langs")):
            tokenizer.init_kwargs |= dict(zip(_TOKENIZER_KEYS[0], languages, strict=True))


def language_code(value: object) -> str | None:
    """A language code with hyphens, such as pt-BR for pt_BR, or None if the value is no code."""
    # en_XX: mBART.
    text = value.replace("_", "-").removesuffix("-XX") if isinstance(value, str) else ""
    return text if _CODE.fullmatch(text) else None


def card_languages(folder: Path) -> list[str]:
    """Read the languages in the metadata of a model card, source and target in the cards of this package, or none.

    `language_bcp47` has the codes with their subtags, such as pt-BR, that the Hub refuses in `language`.
    """
    metadata = card_metadata(folder)
    languages = metadata.get("language_bcp47") or metadata.get("language")
    if not isinstance(languages, list):
        return []
    return [str(code).replace("_", "-") for code in languages]


def card_metadata(folder: Path) -> dict[Any, Any]:
    """Read the metadata of a model card, {} if there is none. All values are text: `no` is Norwegian, not false."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    try:
        with card.open("rb") as file:
            text = file.read(_MAX_CARD)
        if not text.startswith(b"---"):
            return {}
        return parse_yaml_mapping(text.split(b"---")[1], "", as_text=True)
    except (OSError, UserError):
        return {}
