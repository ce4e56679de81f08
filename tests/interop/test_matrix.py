"""Every kind of converted model, with different tokens on the two sides, in the engine of every export."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data import load_tokenizers
from hf_vanilla_transformer.interop.exporting import export
from tests.interop.foreign import SOURCES
from tests.interop.two_vocabularies import MODELS

LENGTH = 9


class Model:
    """A converted model, its text, and its tokens by id from the files themselves."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval()
        self.source, self.target = load_tokenizers(folder)
        special = set(self.source.all_special_ids)
        words = self.source.convert_tokens_to_string(self.source.convert_ids_to_tokens([5, 6, 7, 6]))
        self.lines = [line for line in SOURCES if set(self.source(line)["input_ids"]) - special] or [words, "s0"]

    def translate(self, **settings: Any) -> list[str]:
        texts = []
        for line in self.lines:
            batch = self.source(line, return_tensors="pt")
            ids = self.model.generate(**batch, num_beams=1, max_new_tokens=LENGTH, max_length=None, **settings)
            texts.append(self.target.decode(ids[0], skip_special_tokens=True).strip())
        return texts


@pytest.fixture(params=MODELS)
def converted_model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(MODELS[request.param](tmp_path))


def ctranslate2_pieces(model: Model, folder: Path) -> list[list[str]]:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
    engine = ctranslate2.Translator(str(folder), "cpu")
    # the pieces of the source without this package's function: what the tokenizer splits, and what it adds
    prefix = getattr(model.source, "prefix_tokens", None) or []
    end = model.source.eos_token or model.source.sep_token  # FSMT has the second only
    ends = model.source("a")["input_ids"][-1:] == [model.source.convert_tokens_to_ids(end)]
    rows = []
    for line in model.lines:
        pieces = model.source.tokenize(line)
        known = [piece if model.source.convert_tokens_to_ids(piece) is not None else "<unk>" for piece in pieces]
        start = [f"__{model.source.src_lang}__"] if prefix else []
        rows.append([*start, *known, *([end] if ends else [])])
    settings = model.model.generation_config
    start = {} if settings.forced_bos_token_id is None else {"target_prefix": [["__de__"]] * len(rows)}
    length = LENGTH - (settings.forced_eos_token_id is not None)  # the last token, which is no text
    results = engine.translate_batch(rows, beam_size=1, max_decoding_length=length, **start)
    return [result.hypotheses[0] for result in results]


def test_ctranslate2_writes_the_text_of_every_converted_model(converted_model: Model, tmp_path: Path) -> None:
    export("ctranslate2", converted_model.folder, tmp_path / "ct2")
    config = json.loads((tmp_path / "ct2" / "config.json").read_text())
    target = converted_model.target
    texts = []
    for pieces in ctranslate2_pieces(converted_model, tmp_path / "ct2"):
        own = [piece for piece in pieces if piece not in target.all_special_tokens]
        assert all(piece not in config.values() for piece in own)
        texts.append(target.convert_tokens_to_string(own).strip())
    assert texts == converted_model.translate(min_new_tokens=1)
    assert any(texts)
