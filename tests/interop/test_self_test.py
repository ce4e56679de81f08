"""An export tests itself: it finds faults that are planted in its files, and leaves nothing."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer.interop import ctranslate2
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.exports import write_model
from tests.interop.two_vocabularies import MODELS

pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")


def swapped_tokens(config: Any, *tokenizers: Any) -> list[list[str]]:
    """The source's tokens on the target's side: the result of `get_vocab()`."""
    sizes = config.vocab_size, config.target_vocab_size
    tokens = [{number: token for token, number in one.get_vocab().items()} for one in tokenizers]
    return [
        [of_side.get(i, f"<unused_{i}>") for i in range(size)] for of_side, size in zip(tokens, sizes, strict=True)
    ]


def test_export_with_a_swapped_vocabulary_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["marian"](tmp_path)
    monkeypatch.setattr(ctranslate2, "tokens_of_sides", swapped_tokens)
    for name, options in (("ctranslate2", {}), ("argos", {"languages": ("en", "de")})):
        with pytest.raises(UserError, match=name):
            export(name, model, tmp_path / "out.argosmodel", **options)
    assert not (tmp_path / "out.argosmodel").exists()


LEARNED = {"position_encoding_type": "learned", "max_position_embeddings": 6}


@pytest.mark.parametrize(
    ("target_format", "fields", "settings"), [("ctranslate2", LEARNED, {}), ("marian", {}, {"do_sample": True})]
)
def test_export_of_few_positions_or_of_sampling_is_checked(target_format, fields, settings, tmp_path):
    model = write_model(tmp_path / "model", **fields)
    model.generation_config.update(**settings)
    model.generation_config.save_pretrained(tmp_path / "model")
    assert "; checked with" in export(target_format, tmp_path / "model", tmp_path / "out")


@pytest.mark.slow
def test_export_names_the_library_without_which_it_is_not_checked(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    model = MODELS["joeynmt"](tmp_path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "not checked, because onnxruntime" in export("onnx", model, tmp_path / "onnx")
