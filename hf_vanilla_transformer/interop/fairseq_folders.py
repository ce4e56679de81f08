"""Folders of transformers' ports of fairseq's Transformers: FSMT, and M2M-100 with NLLB-200, which are pre-norm."""

from pathlib import Path
from typing import Any

from transformers import FSMTConfig, M2M100Config, PreTrainedTokenizerBase
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from ..utils.errors import UserError, shown
from ..utils.untrusted import read_json_object
from .converted import Converted, Fields
from .transformers_folders import from_peer, load_tokenizer, read_folder

_NLLB_PIECES = ("sentencepiece.bpe.model",)
# The tokenizer classes of M2M-100 and NLLB-200, and the files that each needs. NLLB-200 has one of two files.
_TOKENIZERS: list[tuple[str, tuple[str, ...]]] = [
    ("M2M100Tokenizer", ("vocab.json", "sentencepiece.bpe.model")),
    ("NllbTokenizer", ("tokenizer.json",)),
    ("NllbTokenizer", _NLLB_PIECES),
]


def from_fsmt(folder: str | Path) -> Converted:
    """A folder of an `FSMTForConditionalGeneration`, such as facebook/wmt19-en-de.

    The tokenizer stays an `FSMTTokenizer`, so that ids and text are the same. It needs sacremoses.

    Args:
        folder: config.json, the weights and, if it has a tokenizer, vocab-src.json, vocab-tgt.json and merges.txt.
    """
    files = ("vocab-src.json", "vocab-tgt.json", "merges.txt")
    tokenizer: Any = load_tokenizer("FSMTTokenizer", folder, files)
    for token in [] if tokenizer is None else tokenizer.all_special_tokens:
        if tokenizer.decoder.get(tokenizer.encoder.get(token)) != token:
            raise UserError(
                f"{folder}: {token} has different ids in vocab-src.json and vocab-tgt.json"
            )
    return from_peer(
        read_folder(FSMTConfig, folder),
        tokenizer,
        {"lm_head.weight": "model.decoder.output_projection.weight"},
        position_encoding_type="sinusoidal_fairseq",
    )


def from_m2m100(
    folder: str | Path, *, source_language: str | None = None, target_language: str | None = None
) -> Converted:
    """A folder of an `M2M100ForConditionalGeneration`, such as facebook/m2m100_418M or nllb-200-distilled-600M.

    A source starts with the token of its language (`tokenizer.src_lang`). `generate` starts a translation with the
    token of the target language (`forced_bos_token_id`).

    Args:
        folder: config.json, the weights and, if it has a tokenizer, sentencepiece.bpe.model and vocab.json
            (M2M-100), or tokenizer.json or sentencepiece.bpe.model (NLLB-200).
        source_language, target_language: the default direction, codes of the tokenizer such as "de" or "deu_Latn".
            Default: the languages of the tokenizer and of the generation settings. The other directions are kept.
    """
    peer = read_folder(M2M100Config, folder)
    tokenizer = _tokenizer(Path(folder))
    converted = from_peer(
        peer, tokenizer, position_encoding_type="sinusoidal_fairseq", layer_norm_position="pre"
    )
    if source_language is not None:
        _language_id(tokenizer, "source_language", source_language)
        tokenizer.src_lang = tokenizer.init_kwargs["src_lang"] = source_language
    if target_language is not None:
        number = _language_id(tokenizer, "target_language", target_language)
        converted.model.generation_config.forced_bos_token_id = number
        tokenizer.tgt_lang = tokenizer.init_kwargs["tgt_lang"] = target_language
    return converted


def _tokenizer(folder: Path) -> Any:
    """The tokenizer, or None without its files, which decide the class if tokenizer_config.json does not name it."""
    file = folder / "tokenizer_config.json"
    name = read_json_object(file).get("tokenizer_class") if file.is_file() else None
    known = [pair for pair in _TOKENIZERS if not name or pair[0] == str(name).removesuffix("Fast")]
    if not known:
        raise UserError(
            f"{file}: tokenizer_class={shown(name)} is none of M2M100Tokenizer, NllbTokenizer"
        )
    complete = (pair for pair in known if all((folder / file).is_file() for file in pair[1]))
    class_name, files = next(complete, known[0])
    codes: Fields = {}
    if files == _NLLB_PIECES:
        # a SentencePiece model contains no languages. They follow its pieces, before a mask
        codes = {
            "mask_token": None,
            "extra_special_tokens": [*FAIRSEQ_LANGUAGE_CODES, "<mask>"],
        }
    return load_tokenizer(class_name, folder, files, **codes)


def _language_id(tokenizer: PreTrainedTokenizerBase, name: str, language: str) -> int:
    # M2M-100 has the token __de__ for "de", NLLB-200 the code itself
    token = getattr(tokenizer, "lang_code_to_token", {}).get(language, language)
    number = None if tokenizer is None else tokenizer.convert_tokens_to_ids(token)
    if number is None or number == tokenizer.unk_token_id:
        raise UserError(f"{name}={language}: the tokenizer has no such language")
    return number
