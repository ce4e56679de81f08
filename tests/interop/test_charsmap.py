"""The rules of SentencePiece, as normalizers. SentencePiece itself gives the right text."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers

from hf_vanilla_transformer.interop import charsmap, vocabularies
from tests.interop.foreign import SOURCES
from tests.interop.test_vocabularies import side_of
from tests.model_helpers import error_of

FORMS = ("NFC", "NFD", "NFKC", "NFKD")
KNOWN = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")
TEXTS = [
    "ｶﾞﾗｽのﾄﾞｱ、ﾊﾟﾝとガラス",
    "한국어 문장 ㅎㅏㄴ 각 닭",
    "Tiếng Việt rất đẹp: ệ ệ ê\u0323 ẹ\u0302",
    "ᾴδω ΐ Ευρωπαΐνη Ἀθῆναι",
    "hāčky: ǰ Å Å Ǆ É e\u0301\u200d e\u0301\u0301 e\u0323\u0301",
    "लड़का लड\u093cका क्\u200dष কো ேகா",
    "שָּׁלוֹם ב\u05bc\u05b8 מֻחַמָّد ﻻ",
    "ไทย ทำ aำ ລາວ ຳ",
    "❤️ 👍🏽 ①\ufe0f ½\u200d👩\u200d👩\u200d👧 🇩🇪",
    "й ѐ й\u0301 ﬁ\u200d ㎏ ～ ゛が",
    "a\r\nb\x01c\x85 d\u2028",
    "\u0301a \ue001b\ue000",
]


def rules_of(**settings: Any) -> tuple[sentencepiece.SentencePieceNormalizer, bytes]:
    """SentencePiece's own normalizer, and the same rules as in a model."""
    flags = ("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces")
    normalizer = sentencepiece.SentencePieceNormalizer(**settings, **dict.fromkeys(flags, False))
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(normalizer.serialized_model_proto())
    return normalizer, proto.normalizer_spec.precompiled_charsmap


@pytest.mark.parametrize("rule_name", KNOWN)
def test_rules_give_the_text_of_sentencepiece(rule_name: str) -> None:
    expected, content = rules_of(rule_name=rule_name)
    normalizer = normalizers.Sequence(charsmap.charsmap_steps(content))
    for text in TEXTS:
        for form in ("", *FORMS):
            given = unicodedata.normalize(form, text) if form else text
            if form.endswith("D") and rule_name.endswith("cf"):
                given = given.replace("\u0345", "")  # the one that `changed_rule` names
            assert normalizer.normalize_str(given) == expected.normalize(given), (form, text)


@pytest.mark.slow
@pytest.mark.parametrize("rule_name", KNOWN)
def test_each_rule_of_sentencepiece_is_kept(rule_name: str) -> None:
    _, content = rules_of(rule_name=rule_name)
    rules = dict(charsmap.Charsmap(content))
    assert len(rules) > 220_000
    assert charsmap.changed_rule(content) is None
    normalizer = normalizers.Sequence(charsmap.charsmap_steps(content))
    other = [rule for rule, text in rules.items() if normalizer.normalize_str(rule) != text]
    assert len(other) < (1000 if rule_name.endswith("cf") else 30)


def test_characters_that_stand_alone_join_none() -> None:
    joined = {sequence[place] for sequence, _ in charsmap._compositions() for place in (1, -1)}
    alone = [c for c in map(chr, range(0x20000)) if charsmap.ALONE.fullmatch(c)]
    assert len(alone) > 40_000
    assert joined.isdisjoint(alone)
    assert {unicodedata.category(character)[0] for character in alone}.isdisjoint("M")


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        ({"a": "b", "b": "a", "ß": "ss", "é": "e"}, None),
        ({"e\u0301": "é", "a": "b"}, None),
        ({"oe": "ö"}, "oe"),
        ({"...": "…"}, "..."),
    ],
)
def test_own_rules_are_kept_or_refused(
    rules: dict[str, str], changed: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "rules.tsv"
    lines = [
        "\t".join(" ".join(f"{ord(c):X}" for c in text) for text in rule) for rule in rules.items()
    ]
    file.write_text("\n".join(lines) + "\n")
    expected, content = rules_of(rule_tsv=str(file))
    assert dict(charsmap.Charsmap(content)) == rules
    assert charsmap.changed_rule(content) == changed
    given = side_of(tmp_path / "spm.model", SOURCES, normalization_rule_tsv=str(file))
    if changed is not None:
        message = error_of(vocabularies.fast_sentencepiece_tokenizer, given)
        assert f"its normalisation replaces the sequence {changed!r}" in message
        return
    normalizer = normalizers.Sequence(charsmap.charsmap_steps(content))
    for text in ("abc Straße", "cafe\u0301 café e\u0301\u0301", "A\u0301"):
        assert normalizer.normalize_str(text) == expected.normalize(text)


@pytest.mark.parametrize("rule_name", ["identity", "nfkc", "nmt_nfkc"])
def test_only_spaces_go_at_the_ends(rule_name: str, tmp_path: Path) -> None:
    spm = tmp_path / "spm.model"
    given = side_of(spm, [*SOURCES, "a\ta \u3000\x85 a"], normalization_rule_name=rule_name)
    tokenizer = vocabularies.fast_sentencepiece_tokenizer(given)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    ids = {token: number for number, token in enumerate(given.tokens)}
    for edge in ("\x85", "\u3000", "\t", "\ue001", " ", "▁", "\u200b"):
        for text in (f"{edge}a dog", f"a dog{edge}", f"a{edge}dog", f"  {edge} a {edge}  "):
            expected = [ids.get(piece, 0) for piece in processor.encode(text, out_type=str)]
            assert tokenizer(text)["input_ids"] == [*expected, 3], text
