"""Every kind of converted model, with different tokens on the two sides, in the engine of every export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import MarianMTModel

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.exports import OnnxTranslator
from tests.interop.foreign import SOURCES
from tests.interop.test_argos import argos_translations, installed_package
from tests.interop.two_vocabularies import MODELS
from tests.model_helpers import slow

LENGTH = 9


class Model:
    """A converted model, its text, and its tokens by id from the files themselves."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval()
        self.source, self.target = load_tokenizers(folder)
        special = set(self.source.all_special_ids)
        words = self.source.convert_tokens_to_string(
            self.source.convert_ids_to_tokens([5, 6, 7, 6])
        )
        self.lines = [
            line for line in SOURCES if set(self.source(line)["input_ids"]) - special
        ] or [words, "s0"]

    def translate(self, **settings: Any) -> list[str]:
        texts = []
        for line in self.lines:
            batch = self.source(line, return_tensors="pt")
            ids = self.model.generate(
                **batch, num_beams=1, max_new_tokens=LENGTH, max_length=None, **settings
            )
            texts.append(self.target.decode(ids[0], skip_special_tokens=True).strip())
        return texts


def ctranslate2_pieces(model: Model, folder: Path) -> list[list[str]]:
    ctranslate2 = pytest.importorskip(
        "ctranslate2", reason="the extra `ctranslate2` is not installed"
    )
    engine = ctranslate2.Translator(str(folder), "cpu")
    # the pieces of the source without this package's function: what the tokenizer splits, and what it adds
    prefix = getattr(model.source, "prefix_tokens", None) or []
    end = model.source.eos_token or model.source.sep_token  # FSMT has the second only
    ends = model.source("a")["input_ids"][-1:] == [model.source.convert_tokens_to_ids(end)]
    starts = model.source("a")["input_ids"][0] == model.source.bos_token_id
    rows = []
    for line in model.lines:
        pieces = model.source.tokenize(line)
        known = [
            piece if model.source.convert_tokens_to_ids(piece) is not None else "<unk>"
            for piece in pieces
        ]
        start = [f"__{model.source.src_lang}__"] if prefix else [model.source.bos_token] * starts
        rows.append([*start, *known, *([end] if ends else [])])
    settings = model.model.generation_config
    start = (
        {} if settings.forced_bos_token_id is None else {"target_prefix": [["__de__"]] * len(rows)}
    )
    length = LENGTH - (settings.forced_eos_token_id is not None)  # the last token, which is no text
    results = engine.translate_batch(rows, beam_size=1, max_decoding_length=length, **start)
    return [result.hypotheses[0] for result in results]


def ctranslate2_texts(model: Model, folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    texts = []
    for pieces in ctranslate2_pieces(model, folder):
        own = [piece for piece in pieces if piece not in model.target.all_special_tokens]
        assert all(piece not in config.values() for piece in own)
        texts.append(model.target.convert_tokens_to_string(own).strip())
    return texts


def argos_texts(model: Model, file: Path) -> list[str]:
    package = installed_package(file, file.parent / "packages")
    length = LENGTH - (model.model.generation_config.forced_eos_token_id is not None)
    return argos_translations(package, model.lines, 1, length)


def onnx_texts(model: Model, folder: Path) -> list[str]:
    return OnnxTranslator(folder).translate(model.lines, LENGTH)


def marian_texts(model: Model, folder: Path) -> list[str]:
    peer: Any = MarianMTModel.from_pretrained(folder).eval()
    source, target = load_tokenizers(folder)
    rows = [source(line, return_tensors="pt") for line in model.lines]
    ids = [
        peer.generate(**row, num_beams=1, max_new_tokens=LENGTH, max_length=None)[0] for row in rows
    ]
    return [target.decode(row, skip_special_tokens=True).strip() for row in ids]


ENGINES: dict[str, Callable[[Model, Path], list[str]]] = {
    "ctranslate2": ctranslate2_texts,
    "argos": argos_texts,
    "marian": marian_texts,
    "onnx": onnx_texts,
}
# The models that a format refuses, and the reason that it names.
_NO_SENTENCEPIECE = {*MODELS} - {"marian", "marian-npz", "fairseq-spm"}
REFUSED: dict[str, dict[str, str]] = {
    "argos": dict.fromkeys(_NO_SENTENCEPIECE, "SentencePiece") | {"m2m100": "languages"},
    "onnx": {
        "marian": "different ids",
        "m2m100": "languages",
        **dict.fromkeys(("fsmt", "fairseq-codes", "opennmt-codes"), "no tokenizer.json"),
    },
    "marian": {
        **dict.fromkeys(
            ("fsmt", "m2m100", "fairseq-spm", "fairseq-codes", "fairseq"),
            "position_encoding_type",
        ),
        **{
            "marian-npz": "position_encoding_type",
            "joeynmt": "layer_norm_eps",
            **dict.fromkeys(
                ("opennmt", "opennmt-spm", "opennmt-codes", "torch"), "layer_norm_position"
            ),
            "eole": "attention_bias",
        },
    },
}
SLOW = slow("onnx")


@pytest.mark.covering(1)
@pytest.mark.parametrize("target_format", ["ctranslate2", "argos", "marian", *SLOW])
@pytest.mark.parametrize("name", MODELS)
def test_every_export_of_every_converted_model_writes_its_text(
    name: str, target_format: str, tmp_path: Path
) -> None:
    libraries = {"ctranslate2": "ctranslate2", "argos": "ctranslate2", "onnx": "onnxscript"}
    pytest.importorskip(libraries.get(target_format, "torch"))
    model = Model(MODELS[name](tmp_path))
    options: dict[str, Any] = {"languages": ("en", "de")} if target_format == "argos" else {}
    if name in REFUSED.get(target_format, {}):
        with pytest.raises(UserError, match=REFUSED[target_format][name]):
            export(target_format, model.folder, tmp_path / "out.argosmodel", **options)
        return
    line = export(target_format, model.folder, tmp_path / "out.argosmodel", **options)
    assert "; checked with" in line
    minimum = {"min_new_tokens": 1} if target_format in ("ctranslate2", "argos") else {}
    texts = ENGINES[target_format](model, tmp_path / "out.argosmodel")
    expected = model.translate(**minimum)
    assert texts == expected
    assert any(texts)
