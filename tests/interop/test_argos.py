"""A package of Argos Translate: its tokens, its translations, and what it refuses."""

import gzip
import itertools
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.tokenizer_training import train_sentencepiece_tokenizer
from tests.interop.exports import CORPUS
from tests.interop.foreign import SOURCES, TARGETS, UNSEEN, converted, write_opus_folder
from tests.model_helpers import error_of, tiny_model

ctranslate2 = pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")
TEXTS = [*SOURCES, "Ünknown žluťoučký 漢字 text …", "a dog  sleeps"]


def write_own(folder: Path, **fields: Any) -> None:
    """A model with a SentencePiece vocabulary of this package."""
    tokenizer = train_sentencepiece_tokenizer(SOURCES * 5 + TARGETS * 5, 340)
    model = tiny_model(
        vocab_size=len(tokenizer),
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        unk_token_id=3,
        decoder_start_token_id=0,
        **fields,
    )
    model.generation_config.suppress_tokens = [0, 1, 3]
    model.save_pretrained(folder)
    save_tokenizers(folder, tokenizer)


def installed_package(file: Path, folder: Path) -> Path:
    """As `package.install_from_path` unpacks it."""
    with zipfile.ZipFile(file) as archive:
        assert all(
            name.startswith("translate-en_de-1_0/") and ".." not in name
            for name in archive.namelist()
        )
        archive.extractall(folder)
    return folder / "translate-en_de-1_0"


def translate(engine: Any, tokens: list[list[str]], beams: int, length: int = 12) -> list[Any]:
    """With Argos' settings."""
    return engine.translate_batch(
        tokens,
        replace_unknowns=True,
        beam_size=beams,
        length_penalty=0.2,
        max_decoding_length=length,
    )


def argos_translations(package: Path, texts: list[str], beams: int, length: int = 12) -> list[str]:
    """Translate as argostranslate 1.11's tokenizer.py and translate.py do, without its sentence splitter."""
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(package / "sentencepiece.model")
    )
    engine = ctranslate2.Translator(str(package / "model"), "cpu")
    tokens = [processor.encode(text, out_type=str) for text in texts]
    results = translate(engine, tokens, beams, length)
    decoded = (processor.decode_pieces(result.hypotheses[0]) for result in results)
    return [text.replace("▁", " ").replace("_", " ").strip() for text in decoded]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("kind", ["own", "opus"])
def test_argos_package_translates_like_the_model(kind: str, beams: int, tmp_path: Path) -> None:
    if kind == "own":
        write_own(tmp_path / "ours")
    else:
        write_opus_folder(tmp_path / "opus", decoder_attention_heads=4)
        converted("marian", tmp_path / "opus", tmp_path / "ours")
    export("argos", tmp_path / "ours", tmp_path / "en_de.argosmodel", languages=("en", "de"))
    package = installed_package(tmp_path / "en_de.argosmodel", tmp_path / "packages")
    # no folder `stanza`, `minisbd` or `spacy`: Argos would not fetch its own sentence splitter
    assert {path.name for path in package.iterdir()} == {
        "metadata.json",
        "model",
        "sentencepiece.model",
    }
    metadata = json.loads((package / "metadata.json").read_text())
    expected = {
        "from_code": "en",
        "to_code": "de",
        "type": "translate",
        "from_name": "English",
        "to_name": "German",
    }
    assert expected.items() <= metadata.items()
    export("ctranslate2", tmp_path / "ours", tmp_path / "ct2")
    source, target = load_tokenizers(tmp_path / "ours")
    engine = ctranslate2.Translator(str(tmp_path / "ct2"), "cpu")
    tokens = [source.convert_ids_to_tokens(source(text)["input_ids"]) for text in TEXTS]
    results = translate(engine, tokens, beams)
    rows = [target.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    texts = [text.strip() for text in target.batch_decode(rows, skip_special_tokens=True)]
    assert argos_translations(package, TEXTS, beams) == texts
    assert all(texts)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 2},
        {"no_repeat_ngram_size": 3},
        {"repetition_penalty": 1.2},
        {"bad_words_ids": [[5, 6]]},
        {"eos_token_id": [2, 7]},
        {"forced_bos_token_id": 5},
    ],
    ids=str,
)
def test_argos_refuses_a_search_that_it_does_not_have(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    write_own(tmp_path / "ours")
    path = tmp_path / "ours" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    file = tmp_path / "a.argosmodel"
    message = error_of(export, "argos", tmp_path / "ours", file, languages=("en", "de"))
    assert re.search("minimum|" + next(iter(settings)), message)
    assert not file.exists()


def test_argos_package_of_the_same_model_is_the_same_file(tmp_path: Path) -> None:
    write_own(tmp_path / "ours")
    files = [tmp_path / f"{number}.argosmodel" for number in (1, 2)]
    for file in files:
        export("argos", tmp_path / "ours", file, languages=("en", "de"), quantization="int8")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_argos_refuses_other_tokenizers_languages_and_outputs(tmp_path: Path) -> None:
    def refused(to: str, name: str, languages: tuple | None = ("en", "de")) -> str:
        return error_of(export, to, tmp_path / "ours", tmp_path / name, languages=languages)

    write_own(tmp_path / "ours")
    for languages in (None, ("en",), ("../x", "de"), ("en", "deutsch")):
        assert "languages=" in refused("argos", "a.argosmodel", languages)
    assert ".argosmodel" in refused("argos", "a.zip")
    assert "argos" in refused("marian", "a")
    (tmp_path / "a.argosmodel").touch()
    assert "a.argosmodel" in refused("argos", "a.argosmodel")
    save_tokenizers(tmp_path / "ours", train_tokenizer(CORPUS, vocab_size=320))
    assert "SentencePiece" in refused("argos", "b.argosmodel")
    assert not (tmp_path / "b.argosmodel").exists()


@pytest.mark.slow
def test_sentencepiece_tokenizer_is_exact_on_10000_lines(shared_data: Path, tmp_path: Path) -> None:
    """Its ids are those of the pieces that Argos computes, and its text is the one that Argos joins."""
    lines: list[str] = []
    for language in ("en", "de"):
        with gzip.open(shared_data / f"train.{language}.gz", "rt", encoding="utf-8") as file:
            lines += [line.rstrip("\n") for line in itertools.islice(file, 5000)]
    save_tokenizers(tmp_path, train_sentencepiece_tokenizer(lines[::2], 4000))
    tokenizer, _ = load_tokenizers(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    for line in [*lines, *UNSEEN[1:], "漢字 ▁ _ \u00a0 x"]:
        ids = tokenizer(line)["input_ids"]
        assert ids == [*processor.encode(line), tokenizer.eos_token_id], line
        assert (
            tokenizer.decode(ids, skip_special_tokens=True).strip()
            == processor.decode(ids[:-1]).strip()
        ), line
    assert len(lines) == 10_000
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"]) == [0, 1, 2, 3]
