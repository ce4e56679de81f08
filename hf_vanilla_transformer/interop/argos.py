"""`.argosmodel`: a package of Argos Translate and LibreTranslate, a zip archive with a CTranslate2 model.

Argos tokenizes with one SentencePiece model, searches with CTranslate2, and joins pieces with the same SentencePiece
model. Pieces that it lacks keep their text, so the source's model serves both languages. Argos fetches the splitter
that cuts text into sentences itself.
"""

import json
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import transformers

from ..inference.directions import Directions
from ..inference.languages import NAMES, model_languages
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..text.tokenizer_files import load_tokenizers
from ..utils.errors import UserError, shown
from ..utils.untrusted import require_file
from . import ctranslate2
from .search_settings import ARGOS, check_search, shortest

_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,4})?")
_DATE = (1980, 1, 1, 0, 0, 0)  # for every member, so that the same model gives the same file


def write(
    model: VanillaTransformerForConditionalGeneration,
    folder: str | Path,
    output: Path,
    languages: Any,
    quantization: str | None = None,
) -> None:
    """Write the model in `folder` as an .argosmodel.

    Args:
        folder: a model with a `MarianTokenizer`, because Argos needs its SentencePiece models.
        output: the file.
        languages: the codes of source and target, such as ("en", "de"), or None for those of the model.
        quantization: see `ctranslate2.write_ctranslate2`.
    """
    codes = list(languages or model_languages(folder) or ())
    if len(codes) != 2 or not all(_CODE.fullmatch(str(code)) for code in codes):
        raise UserError(
            f"languages={shown(codes)}: two codes are needed, of source and target, such as en de"
        )
    source, target = codes
    least = shortest(check_search(model, ARGOS))
    if least > 1:
        raise UserError(
            f"generation_config.json: a minimum of {least} tokens: {ARGOS} cannot apply it; change or remove it"
        )
    tokenizer, _ = load_tokenizers(folder)
    if not isinstance(tokenizer, transformers.MarianTokenizer):
        raise UserError(
            f"{folder}: Argos tokenizes with SentencePiece, and no SentencePiece model gives the tokens of a "
            f"{type(tokenizer).__name__}; train with `vanilla-transformer tokenizer --sentencepiece`, tokenizer_name=…"
        )
    content = {"sentencepiece.model": require_file(Path(folder) / "source.spm").read_bytes()}
    metadata = {
        "package_version": "1.0",
        "argos_version": "1.11",
        "type": "translate",
        "from_code": source,
        "from_name": NAMES.get(source, source),
        "to_code": target,
        "to_name": NAMES.get(target, target),
    }
    directions = Directions(tokenizer, tokenizer)
    if directions.prefix_length:
        directions.check((source, target))
        metadata["target_prefix"] = tokenizer.convert_ids_to_tokens(
            directions.prefix((source, target))[0]
        )
    name = f"translate-{source}_{target}-1_0"
    content["metadata.json"] = json.dumps(metadata, indent=2).encode()
    with tempfile.TemporaryDirectory() as temporary:
        converted = ctranslate2.write_ctranslate2(folder, Path(temporary) / "model", quantization)
        content |= {
            f"model/{file.name}": file.read_bytes()
            for file in sorted(converted.glob("*vocabulary.*"))
        }
        content["model/model.bin"] = (converted / "model.bin").read_bytes()
        # Argos passes the pieces of a sentence without its end
        config = json.loads((converted / "config.json").read_text(encoding="utf-8")) | {
            "add_source_eos": True
        }
        content["model/config.json"] = json.dumps(config, indent=2).encode()
    with zipfile.ZipFile(output, "w") as archive:
        for file, data in content.items():
            archive.writestr(zipfile.ZipInfo(f"{name}/{file}", _DATE), data, zipfile.ZIP_DEFLATED)
