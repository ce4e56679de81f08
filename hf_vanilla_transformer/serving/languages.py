"""The languages of a model folder, as codes of ISO 639 such as `en`."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..inference.languages import model_languages

#: English names for `GET /languages`. A code that is missing here is its own name.
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

_CODE = r"[a-z]{2,3}(?:-[A-Za-z0-9]{2,8})*"
_PAIR = re.compile(rf"(?P<source>{_CODE}?)-(?P<target>{_CODE})=(?P<folder>.+)")


def model_folders(arguments: Sequence[str]) -> dict[tuple[str, str], Path]:
    """(source, target) -> folder.

    Args:
        arguments: `en-de=FOLDER`, or `FOLDER` if its model card names two languages or its name ends in two codes,
            such as `runs/numbers_en_de` and `opus-mt-en-de`, or its tokenizer names them (`model_languages`).
    """
    folders: dict[tuple[str, str], Path] = {}
    for argument in arguments:
        match = _PAIR.fullmatch(argument)
        folder = Path(match["folder"] if match else argument)
        pair = (match["source"], match["target"]) if match else _pair_of(folder)
        if pair in folders:
            raise UserError(f"--model: {folders[pair]} and {folder} both translate {'-'.join(pair)}: give one of them")
        folders[pair] = folder
    return folders


def _pair_of(folder: Path) -> tuple[str, str]:
    if (languages := model_languages(folder)) is None:
        raise UserError(f"--model: {folder}: its languages are unknown: name them, as in en-de={folder}")
    return languages
