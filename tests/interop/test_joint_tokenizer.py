"""One tokenizer.json for two vocabularies encodes as the source's, with shifted ids, and decodes as the target's."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import MarianTokenizer

from hf_vanilla_transformer.interop.joint_tokenizer import joint_tokenizer
from hf_vanilla_transformer.text import train_tokenizer
from tests.interop.foreign import (
    ENGLISH,
    GERMAN,
    SOURCES,
    TARGETS,
    UNSEEN,
    train_sentencepiece,
    write_two_tokenizers,
)
from tests.model_helpers import error_of, tiny_config

TEXTS = [*ENGLISH[:2], "  Größe: 5 €  ", "naïve </s> 東京 \ue000!", "zweihundert"]


def backend(content: dict) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content))


def test_joint_tokenizer_encodes_as_the_source_and_decodes_as_the_target(
    tmp_path: Path,
) -> None:
    source, target = write_two_tokenizers(tmp_path)
    config = tiny_config(
        vocab_size=310, decoder_vocab_size=330, share_encoder_decoder_embeddings=False
    )
    content, settings, ids = joint_tokenizer(source, target, config)
    joint = backend(content)
    for text in TEXTS:
        encoded = joint.encode(text)
        if (
            "</s>" not in text
        ):  # which tokenizers takes for the special token where only tokenizer.json is known
            assert ids.to_model(torch.tensor(encoded.ids)).tolist() == source(text)["input_ids"]
        assert joint.decode(target(text)["input_ids"]) == text
    assert ids.vocab_size == 330 + 310
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["eos_token"] == "</s>"
    assert settings["clean_up_tokenization_spaces"] is False


def test_shared_tokenizer_is_unchanged() -> None:
    tokenizer = train_tokenizer([*ENGLISH, *GERMAN], vocab_size=320)
    content, settings, ids = joint_tokenizer(tokenizer, tokenizer, tiny_config(vocab_size=330))
    assert ids.offset == 0
    assert ids.vocab_size == 330
    assert settings["split_special_tokens"] is True
    assert backend(content).encode(TEXTS[0]).ids == tokenizer(TEXTS[0])["input_ids"]


def test_exported_tokenizer_has_no_bpe_dropout() -> None:
    tokenizer = train_tokenizer([*ENGLISH, *GERMAN], vocab_size=320)
    expected = tokenizer(TEXTS[0])["input_ids"]
    tokenizer.backend_tokenizer.model.dropout = 0.9
    content, _, _ = joint_tokenizer(tokenizer, tokenizer, tiny_config(vocab_size=330))
    assert content["model"]["dropout"] is None
    assert backend(content).encode(TEXTS[0]).ids == expected


EMOJI = [
    "™️ ☺️ 👨‍👩‍👧 漢字 ßß öß ß, n\u0303 ½ Ａ",
    ">>de<< a 漢字",
    "a </s> b <unk>",
    " a\u00a0 \u3000b…",
    "мир 한국어",
]
_PAIRS = [
    (side, kind)
    for side in ("joint", "separate")
    for kind in ({}, {"byte_fallback": True, "vocab_size": 340})
]


@pytest.mark.parametrize(("vocabularies", "settings"), _PAIRS, ids=str)
def test_marian_tokenizer_gets_a_tokenizer_json_of_the_same_tokens(
    vocabularies: str, settings: dict, tmp_path: Path
) -> None:
    """Some pieces have no id, and the target has tokens of characters that are unknown to the source's model."""
    tokenizer = write_marian_tokenizer(
        tmp_path, (SOURCES, TARGETS), vocabularies == "separate", **settings
    )
    assert_same_tokens(tokenizer, [*SOURCES, *TARGETS, *UNSEEN, *EMOJI])


@pytest.mark.slow
@pytest.mark.parametrize("languages", [("en", "de"), ("cs", "fr")])
def test_marian_tokenizer_json_is_exact_on_10_000_lines(
    languages: tuple[str, str], tmp_path: Path
) -> None:
    folder = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data/multi30k")
    corpus = {}
    for side in ("en", "de", "fr", "cs"):
        with gzip.open(folder / f"train.{side}.gz", "rt", encoding="utf-8") as file:
            corpus[side] = file.read().splitlines()[:7000]
    texts = tuple(corpus[side][:4000] for side in languages)
    tokenizer = write_marian_tokenizer(tmp_path, texts, vocab_size=3000)
    lines = [line for side in corpus.values() for line in side[4500:7000]]
    strange = [f"{EMOJI[i % len(EMOJI)]} {line}" for i, line in enumerate(lines[::10])]
    assert_same_tokens(tokenizer, lines + strange)


def write_marian_tokenizer(
    folder: Path, texts: tuple, separate: bool = False, **settings: Any
) -> MarianTokenizer:
    pieces = [
        train_sentencepiece(folder / f"{side}.spm", lines, **settings)
        for side, lines in zip(("source", "target"), texts, strict=True)
    ]
    rest = [[piece for piece in side if piece not in ("<s>", "</s>", "<unk>")] for side in pieces]
    rest[0] = [piece for number, piece in enumerate(rest[0]) if number % 37 != 5]
    sides = rest if separate else [sorted({*rest[0], *rest[1]})]
    files = {
        "source_spm": str(folder / "source.spm"),
        "target_spm": str(folder / "target.spm"),
    }
    for name, side in zip(("vocab", "target_vocab_file"), sides, strict=False):
        files[name] = str(folder / f"{name}.json")
        fill = [f"<fill{number}>" for number in range(max(map(len, sides)) - len(side))]
        tokens = ["</s>", "<unk>", ">>de<<", *side, *fill, "<pad>"]
        Path(files[name]).write_text(
            json.dumps({token: number for number, token in enumerate(tokens)})
        )
    return MarianTokenizer(**files, separate_vocabs=separate)


def assert_same_tokens(tokenizer: MarianTokenizer, lines: list[str]) -> None:
    size = len(tokenizer)
    content, _, ids = joint_tokenizer(
        tokenizer, tokenizer, tiny_config(vocab_size=size, decoder_vocab_size=size)
    )
    joint = backend(content)
    generator = torch.Generator().manual_seed(0)
    for line in lines:
        assert (
            ids.to_model(torch.tensor(joint.encode(line).ids)).tolist()
            == tokenizer(line)["input_ids"]
        ), line
        target = torch.randint(3, size, (9,), generator=generator).tolist()
        # a part of a character's bytes is read differently, and a control character is no space
        if not any(piece.startswith("<0x") for piece in tokenizer.convert_ids_to_tokens(target)):
            settings = {"skip_special_tokens": True}
            expected = tokenizer.decode(target, clean_up_tokenization_spaces=False, **settings)
            assert joint.decode(target, **settings) == expected


def test_special_tokens_with_different_ids_are_refused() -> None:
    source, target = (train_tokenizer(texts, vocab_size=300) for texts in (ENGLISH, GERMAN))
    source.add_special_tokens({"mask_token": "<mask>"})
    config = tiny_config(
        vocab_size=310, decoder_vocab_size=330, share_encoder_decoder_embeddings=False
    )
    assert "'<mask>'" in error_of(joint_tokenizer, source, target, config)


def test_joint_tokenizer_refuses_a_marian_tokenizer_with_a_bpe(tmp_path: Path) -> None:
    tokenizer = write_marian_tokenizer(tmp_path, (SOURCES, TARGETS), model_type="bpe")
    assert "a BPE" in error_of(joint_tokenizer, tokenizer, tokenizer, tiny_config())
