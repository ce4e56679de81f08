"""`.argosmodel`: a package of Argos Translate and LibreTranslate, a zip archive with a CTranslate2 model.

Argos tokenizes with one SentencePiece model, searches with CTranslate2, and joins pieces with the same SentencePiece
model. Pieces that it lacks keep their text, so the source's model serves both languages.
"""

import json
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import transformers

from ..data.tokenizer_training import load_tokenizers
from ..errors import UserError
from ..inference.languages import model_languages
from ..untrusted import require_file, shown
from . import ctranslate2

_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,4})?")
_DATE = (1980, 1, 1, 0, 0, 0)  # for every member, so that the same model gives the same file


def write(folder: str | Path, output: Path, languages: Any, quantization: str | None = None) -> None:
    """Write a model folder with a `MarianTokenizer`, because Argos needs its SentencePiece models, as an .argosmodel.

    `languages` are the codes of source and target, such as ("en", "de"), or None for those of the model. See
    `ctranslate2.convert` for `quantization`.
    """
    source, target = _codes(languages or model_languages(folder))
    _require_sentencepiece(folder)
    metadata = {
        **{"package_version": "1.0", "argos_version": "1.9", "type": "translate"},
        **{"from_code": source, "from_name": source, "to_code": target, "to_name": target},
    }
    name = f"translate-{source}_{target}-1_0"
    with tempfile.TemporaryDirectory() as temporary:
        model = ctranslate2.convert(folder, Path(temporary) / "model", quantization)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        # Argos passes the pieces of a sentence without its end
        (model / "config.json").write_text(json.dumps({**config, "add_source_eos": True}, indent=2), encoding="utf-8")
        with zipfile.ZipFile(output, "w") as archive:
            _add(archive, f"{name}/metadata.json", json.dumps(metadata, indent=2).encode())
            _add(archive, f"{name}/sentencepiece.model", (Path(folder) / "source.spm").read_bytes())
            for file in ("config.json", "model.bin", *(path.name for path in sorted(model.glob("*vocabulary.*")))):
                _add(archive, f"{name}/model/{file}", (model / file).read_bytes())


def _codes(languages: Any) -> tuple[str, str]:
    given = list(languages or ())
    if len(given) != 2 or not all(isinstance(code, str) and _CODE.fullmatch(code) for code in given):
        raise UserError(f"languages={shown(given)}: two codes are needed, of source and target, such as en de")
    return given[0], given[1]


def _require_sentencepiece(folder: str | Path) -> None:
    tokenizer, _ = load_tokenizers(folder)
    if not isinstance(tokenizer, transformers.MarianTokenizer):
        raise UserError(
            f"{folder}: Argos tokenizes with SentencePiece, and no SentencePiece model gives the tokens of a "
            f"{type(tokenizer).__name__}; train with `vanilla-transformer tokenizer --sentencepiece`, tokenizer_name=…"
        )
    require_file(Path(folder) / "source.spm")


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
