"""Tokenizers of other toolkits' vocabularies: their parts, and the files that they are made of.

The judges are SentencePiece and subword-nmt. Whole vocabularies of each toolkit are in the tests of its format.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer.interop import vocabularies
from hf_vanilla_transformer.interop.vocabularies import (
    PRETOKENIZED,
    SEQUENCES,
    SPLIT_AT_SPACES,
    TextSide,
)
from tests.interop.foreign import SOURCES, TARGETS, UNSEEN, learnt_codes, train_sentencepiece
from tests.model_helpers import error_of, tiny_model

SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
NAMES = list(SPECIAL.values())


def side(*tokens: str, **fields: Any) -> TextSide:
    return TextSide([*NAMES, *tokens], SPECIAL, **fields)


def test_each_token_has_one_id() -> None:
    assert vocabularies.ids_by_token(["b", "a"]) == {"b": 0, "a": 1}
    assert vocabularies.ids_by_token([]) == {}
    assert (
        error_of(vocabularies.ids_by_token, ["a", "b", "b", "a"], "f.txt")
        == "f.txt: 'a' occurs twice"
    )
    assert (
        error_of(vocabularies.ids_by_token, ["a", "b", "b"]) == "the vocabulary: 'b' occurs twice"
    )


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (None, None, []),
        ("", "", []),
        ("a", None, ["a", "a"]),
        (None, "b", ["b", "b"]),
        ("a", "b", ["a", "b"]),
    ],
)
def test_one_file_may_serve_both_sides(
    source: str | None, target: str | None, expected: list[str]
) -> None:
    assert vocabularies.both_sides(source, target) == list(map(Path, expected))


def test_raw_text_needs_sentencepiece_or_codes() -> None:
    a, b = map(Path, "ab")
    assert vocabularies.raw_text([], []) == [{}, {}]
    assert vocabularies.raw_text([a, b], []) == [{"spm": a}, {"spm": b}]
    assert vocabularies.raw_text([], [a, b]) == [{"codes": a}, {"codes": b}]
    assert (
        error_of(vocabularies.raw_text, [a, a], [b, b])
        == "codes=b, sentencepiece=a: give one of them"
    )


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        ({"a": 0, "b": 1}, ["a", "b"]),
        ({"b": "1", 7: 0}, ["7", "b"]),
        ({}, []),
        ({"a": 1}, None),
        ({"a": 0, "b": 2}, None),
        ({"a": 0, "b": 0}, None),
        ({"a": -1, "b": 0}, None),
    ],
)
def test_ids_of_tokens_count_from_zero(ids: dict[str, Any], tokens: list[str] | None) -> None:
    if tokens is None:
        assert (
            error_of(vocabularies.tokens_by_id, ids, "no vocabulary")
            == "no vocabulary: its ids do not count from 0"
        )
    else:
        assert vocabularies.tokens_by_id(ids, "no vocabulary") == tokens


@pytest.mark.parametrize("number", ["x", None, [1]])
def test_ids_of_tokens_are_numbers(number: object) -> None:
    assert error_of(vocabularies.tokens_by_id, {"a": number}, "no vocabulary").startswith(
        "no vocabulary ("
    )


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\n\n", ["a", ""]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        ("é\u2028x\n".encode(), ["é\u2028x"]),
        (b"", [""]),
    ],
)
def test_lines_of_a_vocabulary(content: bytes, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(content)
    assert vocabularies.vocabulary_lines(tmp_path / "v") == lines


def test_lines_of_a_vocabulary_are_utf8(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(b"\xff\n")
    assert f"{tmp_path / 'v'}: no UTF-8 text" in error_of(
        vocabularies.vocabulary_lines, tmp_path / "v"
    )
    assert "no such file" in error_of(vocabularies.vocabulary_lines, tmp_path / "w")


@pytest.mark.parametrize(
    ("fields", "text", "ids"),
    [
        ({}, "a  b@@\tx </s>", [4, 5, 0, 3, 3]),
        ({}, "", [3]),
        ({"ends": False}, "a b@@", [4, 5]),
        ({"lowercase": True}, "A B@@ C", [4, 5, 6, 3]),
        ({"lowercase": False}, "A c", [0, 6, 3]),
    ],
)
def test_tokenized_text_is_split_at_white_space(
    fields: dict[str, Any], text: str, ids: list[int]
) -> None:
    tokenizer = vocabularies.whitespace_tokenizer(side("a", "b@@", "c", **fields))
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.unk_token_id == 0
    assert tokenizer.pad_token_id == 1


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([4, 5, 6], "a bc"),
        ([5], "b@@"),
        ([6, 4], "c a"),
        ([5, 5, 4, 6], "bba c"),
        ([], ""),
    ],
)
def test_pieces_of_words_are_joined(ids: list[int], text: str) -> None:
    tokenizer = vocabularies.whitespace_tokenizer(side("a", "b@@", "c"))
    assert tokenizer.decode(ids).removesuffix("@@") == text.removesuffix("@@")
    assert tokenizer.decode([*ids, 3], skip_special_tokens=True).removesuffix(
        "@@"
    ) == text.removesuffix("@@")


def both(source: TextSide, target: TextSide) -> Any:
    sizes = {"vocab_size": len(source.tokens), "share_encoder_decoder_embeddings": False}
    model = tiny_model(**sizes, decoder_vocab_size=len(target.tokens))
    return vocabularies.with_tokenizers(model, source, target)


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({}, True),
        ({"origin": "b.txt", "language": "de"}, True),
        ({"tokens": [*NAMES, "b"]}, False),
        ({"ends": False}, False),
        ({"lowercase": True}, False),
        ({"is_tokenized": False}, False),
    ],
)
def test_one_tokenizer_serves_sides_that_are_the_same(
    changes: dict[str, Any], is_one: bool
) -> None:
    source = TextSide([*NAMES, "a"], SPECIAL)
    target = TextSide(**{"tokens": [*NAMES, "a"], "special": SPECIAL, **changes})
    found = both(source, target)
    assert (found.tokenizer is found.target_tokenizer) is is_one
    assert found.notes == [PRETOKENIZED]


def test_text_that_is_only_split_needs_no_note() -> None:
    raw = side("a", is_tokenized=False)
    assert both(raw, raw).notes == []
    assert both(raw, side("a")).notes == [PRETOKENIZED]
    assert both(side("a"), raw).notes == [PRETOKENIZED]


@pytest.mark.parametrize(
    ("more", "which"),
    [
        ((1, 0), "s.txt"),
        ((0, 1), "t.txt"),
        ((-1, 0), "s.txt"),
    ],
)
def test_vocabulary_has_as_many_tokens_as_the_model(more: tuple[int, int], which: str) -> None:
    model = tiny_model(vocab_size=6)
    sides = [
        side(*"abc"[: 2 + count], origin=origin)
        for count, origin in zip(more, ("s.txt", "t.txt"), strict=True)
    ]
    size = 6 + sum(more)
    message = error_of(vocabularies.with_tokenizers, model, *sides)
    assert message == f"{which}: {size} tokens with the special ones, but the model has 6"


@pytest.mark.parametrize(
    ("atoms", "words", "is_sequence"),
    [
        ("C N O Cl", "", True),
        ("C N O Cl Br", "the", True),  # five of six
        ("C N O Cl", "the", False),  # four of five are no more than the share
        ("C N", "the of", False),
        ("", "the of", False),
    ],
)
def test_tokens_of_smiles_are_sequences(atoms: str, words: str, is_sequence: bool) -> None:
    chemical = side(*atoms.split(), *words.split())
    found = both(chemical, chemical)
    assert (SEQUENCES in found.notes) is is_sequence
    assert (found.tokenizer.init_kwargs.get("task") == "sequence") is is_sequence
    assert SEQUENCES not in both(chemical, side("the", "of")).notes
    assert SEQUENCES not in both(side("the", "of"), chemical).notes


def write_tokenizer(path: Path, tokens: list[str]) -> Path:
    ids = {token: number for number, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(ids, unk_token=tokens[0])).save(str(path))
    return path


@pytest.mark.parametrize(("starts", "first"), [(True, [2]), (False, [])])
def test_given_tokenizer_ends_a_text_and_starts_it_if_wanted(
    starts: bool, first: list[int], tmp_path: Path
) -> None:
    file = write_tokenizer(tmp_path / "t.json", [*NAMES, "a"])
    ids = {"unk_token": 0, "pad_token": None, "bos_token": 2, "eos_token": 3}
    tokenizer = vocabularies.given_tokenizer(file, ids, starts)
    assert tokenizer("a")["input_ids"] == [*first, 4, 3]
    assert tokenizer.pad_token is None
    assert tokenizer.eos_token == "</s>"


@pytest.mark.parametrize(("number", "is_there"), [(0, True), (4, True), (5, False), (-1, False)])
def test_given_tokenizer_has_the_ids_of_the_model(
    number: int, is_there: bool, tmp_path: Path
) -> None:
    file = write_tokenizer(tmp_path / "t.json", [*NAMES, "a"])
    ids = {"bos_token": 2, "eos_token": 3, "pad_token": number}
    if is_there:
        assert vocabularies.given_tokenizer(file, ids, True).pad_token_id == number
    else:
        message = f"pad_token_id={number}: {file} has 5 tokens"
        assert error_of(vocabularies.given_tokenizer, file, ids, True) == message


@pytest.mark.parametrize(
    ("own", "of_model", "expected"),
    [
        ("<pad>", 4, "<pad>"),
        (None, 4, "a"),
        (None, None, None),
        (None, 0, "<unk>"),
    ],
)
def test_folder_of_a_tokenizer_gets_the_padding_of_the_model(
    own: str | None, of_model: int | None, expected: str | None, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "t.json", [*NAMES, "a"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "t.json"), pad_token=own, unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path / "folder")
    found = vocabularies.given_tokenizer(tmp_path / "folder", {"pad_token": of_model}, False)
    assert found.pad_token == expected


RAW = [
    *SOURCES,
    *TARGETS,
    *UNSEEN,
    "ﬁne ½ ①  \u3000 x\u00a0y ",
    "…   Ａ１",
    "<s> </s> <unk>",
    "❤️ ab",
    " a",
    "漢 字漢",
]


def side_of(spm: Path, lines: list[str], **settings: Any) -> TextSide:
    """Train a SentencePiece model, whose pieces are the tokens."""
    pieces = train_sentencepiece(spm, lines, **settings)
    return side(*(piece for piece in pieces if piece not in NAMES), spm=spm)


IDENTITY = {"normalization_rule_name": "identity"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": False, **IDENTITY},
        {"byte_fallback": True, "vocab_size": 340},
        {"model_type": "bpe"},
        {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
        {"model_type": "bpe", "byte_fallback": True, "vocab_size": 340, **IDENTITY},
        {"model_type": "bpe", "user_defined_symbols": ["l", "ll", "%)"]},
        {"user_defined_symbols": ["th", "ein"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("ends", [True, False])
def test_sentencepiece_pieces_have_the_ids_of_the_toolkit(
    settings: dict, ends: bool, tmp_path: Path
) -> None:
    spm = tmp_path / "spm.model"
    pieces = [
        piece
        for piece in train_sentencepiece(
            spm,
            SOURCES + TARGETS,
            **settings,
        )
        if piece not in NAMES
    ]
    assert vocabularies.sentencepiece_pieces(spm)[3:] == [*dict.fromkeys(pieces)]
    # a token of several unknown characters, and one that no text contains
    tokens = [*NAMES, *pieces[::-1], "漢", "unseen"]
    tokenizer = vocabularies.fast_sentencepiece_tokenizer(
        TextSide(tokens, SPECIAL, spm=spm, ends=ends)
    )
    ids = {token: number for number, token in enumerate(tokens)}
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    for text in [*RAW, " one", "   two", "▁one", " ▁two"]:
        expected = [ids.get(piece, 0) for piece in processor.encode(text, out_type=str)]
        assert tokenizer(text)["input_ids"] == expected + [3] * ends, text
    for text in SOURCES[:2] + TARGETS[:2]:
        written = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
        assert written == processor.decode(processor.encode(text))


@pytest.mark.parametrize(
    ("settings", "lacks", "is_read"),
    [
        ({}, "d", True),
        ({}, "▁", True),
        ({}, "▁a", False),
        ({"model_type": "bpe"}, "d", False),
    ],
)
def test_vocabulary_of_a_unigram_may_lack_single_characters(
    settings: dict, lacks: str, is_read: bool, tmp_path: Path
) -> None:
    spm = tmp_path / "spm.model"
    pieces = train_sentencepiece(spm, SOURCES + TARGETS, **settings)
    assert lacks in pieces
    given = side(*(piece for piece in pieces if piece not in [*NAMES, lacks]), spm=spm)
    if is_read:
        assert vocabularies.fast_sentencepiece_tokenizer(given)("a")["input_ids"][-1] == 3
    else:
        message = error_of(vocabularies.fast_sentencepiece_tokenizer, given)
        assert message.startswith(f"{spm}: the vocabulary lacks {lacks!r}")


@pytest.mark.parametrize("model_type", ["word", "char"])
def test_sentencepiece_model_is_a_unigram_or_a_bpe(model_type: str, tmp_path: Path) -> None:
    spm = tmp_path / "spm.model"
    given = side_of(spm, SOURCES, model_type=model_type)
    message = error_of(vocabularies.fast_sentencepiece_tokenizer, given)
    assert message.startswith(
        f"{spm}: no SentencePiece model (it is neither a unigram model nor a BPE"
    )


def test_normalisation_leaves_the_symbols_of_a_model(tmp_path: Path) -> None:
    """SentencePiece does not normalise its own symbols, a tokenizer.json does."""
    spm = tmp_path / "spm.model"
    given = side_of(spm, SOURCES, user_defined_symbols=["①"])
    assert "changes its symbol '①'" in error_of(vocabularies.fast_sentencepiece_tokenizer, given)


def test_sentencepiece_with_spaces_at_the_ends_of_words_is_refused(tmp_path: Path) -> None:
    spm = tmp_path / "spm.model"
    given = side_of(spm, SOURCES, treat_whitespace_as_suffix=True)
    assert "neither a unigram model nor a BPE" in error_of(
        vocabularies.fast_sentencepiece_tokenizer, given
    )
    for name, content in (("damaged", b"x" * 50), ("absent", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert str(tmp_path / name) in error_of(vocabularies.sentencepiece_pieces, tmp_path / name)


def test_marian_tokenizer_is_of_one_vocabulary_or_of_two(tmp_path: Path) -> None:
    english = side_of(tmp_path / "en.spm", SOURCES)
    german = side_of(tmp_path / "de.spm", TARGETS)
    for target, is_separate in ((english, False), (german, True)):
        tokenizer = vocabularies.sentencepiece_tokenizer(english, target)
        assert tokenizer.separate_vocabs is is_separate
        ids = {token: number for number, token in enumerate(target.tokens)}
        processor = sentencepiece.SentencePieceProcessor(model_file=str(target.spm))
        for text in (TARGETS[0], "ein </s> und <unk><pad> <s>"):
            expected = [ids.get(piece, 0) for piece in processor.encode(text, out_type=str)]
            assert tokenizer(text_target=text)["input_ids"] == [*expected, 3]
        assert tokenizer.model_max_length == 10**9
    bad = TextSide(NAMES, SPECIAL, spm=tmp_path / "none.spm")
    assert "none.spm: no such file" in error_of(vocabularies.sentencepiece_tokenizer, bad, bad)


CODES = "#version: 0.2\nt h\nth e</w>\na n\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CODES, None),
        (CODES.replace("0.2", "0.3"), None),
        (CODES.replace("0.2", "0.9"), None),
        (CODES.replace("#version: 0.2", "#version:0.2 "), None),
        ("t h 5\nth e</w> 4\na n 3\n", None),
        (CODES.replace("0.2", "0.1"), "codes of subword-nmt 0.1 end words differently"),
        (CODES.replace("0.2", "1.2"), "codes of subword-nmt 1.2 end words differently"),
        ("t h\nth e</w>\n", "codes of subword-nmt 0.1 end words differently"),
        ("t h 5\nth e</w>\n", "codes of subword-nmt 0.1 end words differently"),
        (f"{CODES}x\n", "line 4 of the merges is no pair of tokens"),
        (f"{CODES}x y z w\n", "line 4 of the merges is no pair of tokens"),
        ("#version: 0.2\na\n", "line 1 of the merges is no pair of tokens"),
        ("#version: 0.2\na b\n\nc d\n", "line 2 of the merges is no pair of tokens"),
    ],
)
def test_codes_are_those_of_subword_nmt_or_fastbpe(
    text: str, message: str | None, tmp_path: Path
) -> None:
    codes = tmp_path / "codes"
    codes.write_text(text)
    given = side(
        "the",
        "an@@",
        "t@@",
        "h",
        "e",
        "d",
        ends=False,
        codes=codes,
    )
    if message is not None:
        assert error_of(vocabularies.endless_bpe_tokenizer, given).startswith(f"{codes}: {message}")
        return
    tokenizer = vocabularies.endless_bpe_tokenizer(given)
    assert tokenizer("the and th")["input_ids"] == [4, 5, 9, 6, 7]
    assert tokenizer.model_max_length == 10**9
    merges = [" ".join(pair) for pair in sorted(tokenizer.bpe_ranks, key=tokenizer.bpe_ranks.get)]
    assert merges == ["t h", "th e</w>", "a n"]


def test_codes_of_both_sides_give_one_class_that_ends_or_none(tmp_path: Path) -> None:
    bpe = learnt_codes(tmp_path / "codes", SOURCES)
    pieces = sorted({piece for line in SOURCES for piece in bpe.process_line(line).split()})
    ids = {token: number for number, token in enumerate([*NAMES, *pieces])}
    line = SOURCES[0]
    expected = [ids[piece] for piece in bpe.process_line(line).split()]
    ended = side(*pieces, codes=tmp_path / "codes", language="de")
    found = both(ended, ended)
    assert found.notes == []
    assert found.tokenizer is not found.target_tokenizer
    for tokenizer in (found.tokenizer, found.target_tokenizer):
        assert type(tokenizer).__name__ == "FSMTTokenizer"
        assert tokenizer(line)["input_ids"] == [*expected, 3]
        assert {1, 2, 3}.isdisjoint(tokenizer("</s> <pad> <s>")["input_ids"][:-1])
        assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("de", "de")
        assert tokenizer.bos_token_id == 2
        assert tokenizer.sep_token == "</s>"
        assert tokenizer.model_max_length == 10**9
    endless = side(*pieces, codes=tmp_path / "codes", ends=False)
    found = both(endless, ended)
    assert found.notes == [SPLIT_AT_SPACES]
    assert found.tokenizer(line)["input_ids"] == expected
    assert found.tokenizer("</s>")["input_ids"] != [3]
    assert found.target_tokenizer(bpe.process_line(line))["input_ids"] == [*expected, 3]


def test_raw_text_that_does_not_end_has_a_tokenizer_of_each_side(tmp_path: Path) -> None:
    spm = tmp_path / "spm.model"
    target = side_of(spm, SOURCES + TARGETS)
    found = both(replace(target, ends=False), target)
    assert isinstance(found.tokenizer, PreTrainedTokenizerFast)
    ids = found.tokenizer("a dog")["input_ids"]
    assert found.target_tokenizer("a dog")["input_ids"] == [*ids, 3]
    ended = both(target, target)
    assert ended.target_tokenizer is None
    assert ended.tokenizer("a dog")["input_ids"] == [*ids, 3]


def test_pieces_that_marian_lacks_have_ids_after_all_others(tmp_path: Path) -> None:
    spm = tmp_path / "spm.model"
    pieces = [piece for piece in train_sentencepiece(spm, SOURCES) if piece not in NAMES]
    tokens = [*NAMES, *pieces[2:]]
    backend, missing = vocabularies.sentencepiece_backend(
        spm.read_bytes(), tokens, SPECIAL, of_marian=True
    )
    assert missing == pieces[:2]
    assert [backend.id_to_token(len(tokens) + number) for number in (0, 1)] == missing
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    ids = {token: number for number, token in enumerate([*tokens, *missing])}
    for text in SOURCES:
        assert backend.encode(text).ids == [
            ids[piece] for piece in processor.encode(text, out_type=str)
        ]
    assert (
        backend.decode(
            [
                ids["▁"],
                ids["▁"],
                *backend.encode("a dog").ids,
                ids["▁"],
            ]
        )
        == "a dog"
    )
    plain, missing_too = vocabularies.sentencepiece_backend(spm.read_bytes(), tokens, SPECIAL)
    assert missing_too == missing
    assert plain.get_vocab_size() == len(tokens)
    train_sentencepiece(spm, SOURCES, model_type="bpe")
    with pytest.raises(RuntimeError, match=re.escape("it is a BPE")):
        vocabularies.sentencepiece_backend(spm.read_bytes(), tokens, SPECIAL, of_marian=True)
