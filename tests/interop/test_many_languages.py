"""Converted models of many languages translate in every direction, as the engine that they come from."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, MarianTokenizer, PreTrainedTokenizerBase, pipeline

from hf_vanilla_transformer import TranslationPipeline, Translator
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.text.side_tokens import readable_tokens, side_tokens
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    converted,
    write_folder_of_languages,
    write_opus_folder,
)
from tests.interop.test_m2m100 import PEER
from tests.model_helpers import DIRECTIONS, assert_near, error_of, save_model_of_languages

SIDES = ("source", "target")
TEXT = [SOURCES[i % 3] for i in range(20)]
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 1},
    {"num_beams": 4, "length_penalty": 1.0, "early_stopping": False},
    {
        "num_beams": 4,
        "length_penalty": 0.3,
        "early_stopping": True,
        "no_repeat_ngram_size": 2,
    },
]


def pairs_of(kind: str) -> list[tuple[str, str]]:
    m2m100 = ("en", "de", "fr", "zh", "ar")
    nllb = ("eng_Latn", "deu_Latn", "fra_Latn", "zho_Hans", "ars_Arab")
    return list(permutations(m2m100 if kind == "m2m100" else nllb, 2))


def language_id(tokenizer: PreTrainedTokenizerBase, code: str) -> int:
    return tokenizer.convert_tokens_to_ids(
        getattr(tokenizer, "lang_code_to_token", {}).get(code, code)
    )


@pytest.fixture(scope="module", params=["m2m100", "nllb", "nllb legacy"])
def folders(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path, Path]:
    """The kind, transformers' model, its folder and the converted one."""
    folder = tmp_path_factory.mktemp("languages")
    theirs = write_folder_of_languages(folder / "theirs", request.param)
    converted("m2m100", folder / "theirs", folder / "ours")
    return request.param, theirs, folder / "theirs", folder / "ours"


@torch.no_grad()
def test_logits_of_all_directions_are_those_of_transformers(
    folders: Any, record_property: Record
) -> None:
    kind, theirs, folder, output = folders
    ours = Translator.from_pretrained(output).models[0].eval()
    peer = AutoTokenizer.from_pretrained(folder)
    largest = 0.0
    for text, (source, target) in zip(TEXT, pairs_of(kind), strict=True):
        peer.src_lang = source
        batch = peer(text, text_target=TARGETS[0], return_tensors="pt")
        ids = torch.tensor([[2, language_id(peer, target), *batch.pop("labels")[0].tolist()]])
        expected, logits = (
            model(**batch, decoder_input_ids=ids, use_cache=False).logits
            for model in (theirs, ours)
        )
        assert_near(logits, expected, 1e-5)
        largest = max(largest, (logits - expected).abs().max().item())
    record_property("logits", (PEER, largest))


@pytest.mark.covering(1)
@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams", "short beams"])
def test_mixed_directions_have_the_tokens_of_transformers(
    folders: Any, search: dict[str, Any], record_property: Record
) -> None:
    """There one sentence at a time, with `src_lang` and `forced_bos_token_id`."""
    kind, theirs, folder, output = folders
    translator = Translator.from_pretrained(output, workers=1)
    peer = AutoTokenizer.from_pretrained(folder)
    sources, targets = zip(*pairs_of(kind), strict=True)
    count = search["num_beams"]
    best = translator.translate_nbest(
        TEXT, count, source_lang=sources, target_lang=targets, probabilities=True, **search
    )
    lengths = set()
    for text, source, target, hypotheses in zip(TEXT, sources, targets, best, strict=True):
        peer.src_lang = source
        output = theirs.generate(
            **peer(text, return_tensors="pt"),
            **{
                "forced_bos_token_id": language_id(peer, target),
                "num_return_sequences": count,
                **search,
            },
            **{"return_dict_in_generate": True, "output_scores": True},
        )
        rows = [
            row[1 : row.index(2, 1) + 1] if 2 in row[1:] else row[1:]
            for row in output.sequences.tolist()
        ]
        assert [one.tokens for one in hypotheses] == [readable_tokens(peer, row) for row in rows]
        assert [one.text for one in hypotheses] == peer.batch_decode(
            [row[1:] for row in rows], skip_special_tokens=True
        )
        if count > 1:  # the token of the language counts for the length penalty
            assert [one.score for one in hypotheses] == pytest.approx(
                output.sequences_scores.tolist(), abs=1e-4
            )
        lengths |= set(map(len, rows))
    assert count == 1 or len(lengths) > 1
    record_property("tokens", "its `generate` with `forced_bos_token_id`")


def test_pipeline_takes_the_languages_of_transformers(folders: Any) -> None:
    """`tokenizer.src_lang` and `forced_bos_token_id`, as for a model of transformers."""
    kind, theirs, folder, output = folders
    translate = pipeline(model=str(output), pipeline_class=TranslationPipeline)
    peer = AutoTokenizer.from_pretrained(folder)
    source, target = pairs_of(kind)[7]
    translate.tokenizer.src_lang = peer.src_lang = source
    options = {"forced_bos_token_id": language_id(peer, target), "num_beams": 2}
    found = [one["translation_text"] for one in translate(SOURCES, **options)]
    rows = [theirs.generate(**peer(text, return_tensors="pt"), **options)[0] for text in SOURCES]
    assert found == peer.batch_decode(rows, skip_special_tokens=True)


@pytest.mark.parametrize("beams", [1, 4])
def test_ctranslate2_gives_the_same_translations(folders: Any, beams: int, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip(
        "ctranslate2", reason="the extra `ctranslate2` is not installed"
    )
    kind, _, _, output = folders
    assert "target_prefix" in export("ctranslate2", output, tmp_path / "exported")
    translator = Translator.from_pretrained(output, workers=1)
    directions = [pairs_of(kind)[i % 20] for i in range(50)]
    lines = [" ".join(SOURCES[i % 3].split()[: 2 + i % 7]) for i in range(50)]
    names = side_tokens(translator.target_tokenizer, translator.model.config.vocab_size, "target")
    rows, prefixes = (
        [[names[i] for i in ids] for ids in map(encode, lines, [1] * 50, directions)]
        for encode in (
            translator.encode,
            lambda _, *place: translator.encode_prefix("", *place),
        )
    )
    engine = ctranslate2.Translator(str(tmp_path / "exported"), "cpu", intra_threads=1)
    # its beams treat an end differently: all get the same length, by a token that is excluded before the softmax
    shortest = 1 if beams == 1 else 11
    settings = {
        "beam_size": beams,
        "max_decoding_length": 11,
        "min_decoding_length": shortest,
    }
    results = engine.translate_batch(rows, target_prefix=prefixes, **settings)
    sources, targets = zip(*directions, strict=True)
    search = {
        "num_beams": beams,
        "min_new_tokens": shortest - 1,
        "max_new_tokens": 10,
        "max_length": None,
    }
    search |= {
        "early_stopping": False,
        "probabilities": True,
        "renormalize_logits": beams > 1,
    }
    found = translator.translate_nbest(lines, source_lang=sources, target_lang=targets, **search)
    unended = [[token for token in best.tokens if token != "</s>"] for best, *_ in found]
    # rows of the embedding without a token
    named = [
        ["<unk>" if token.startswith("<unused") else token for token in result.hypotheses[0]]
        for result in results
    ]
    assert unended == named


@pytest.mark.parametrize("on_source", [True, False], ids=["source", "target"])
def test_exports_are_checked_in_a_direction(on_source: bool, tmp_path: Path) -> None:
    folder = save_model_of_languages(tmp_path / "model", on_source, tie_word_embeddings=False)
    assert "; checked with" in export("marian", folder, tmp_path / "out")
    assert Translator.from_pretrained(folder).directions.pairs == DIRECTIONS


@pytest.mark.parametrize(("target_format", "on_source"), [("argos", True), ("onnx", False)])
def test_exports_without_a_place_for_languages_are_refused(
    target_format: str, on_source: bool, tmp_path: Path
) -> None:
    folder = save_model_of_languages(tmp_path / "model", on_source)
    options = {"languages": ("en", "de")} if target_format == "argos" else {}
    output = tmp_path / ("out.argosmodel" if target_format == "argos" else "out")
    with pytest.raises(UserError, match=f"{target_format}.*languages"):
        export(target_format, folder, output, **options)


@pytest.mark.parametrize("is_separate", [False, True], ids=["joint", "separate vocabularies"])
def test_opus_directions_are_marks_in_the_text(is_separate: bool, tmp_path: Path) -> None:
    theirs = write_opus_folder(tmp_path / "theirs", codes=("deu", "fra", "cmn_Hans", "ca@valencia"))
    peer = MarianTokenizer.from_pretrained(tmp_path / "theirs")
    if is_separate:
        vocabulary = str(tmp_path / "theirs" / "vocab.json")
        settings = {
            "separate_vocabs": True,
            "target_vocab_file": vocabulary,
            "source_lang": "eng",
        }
        peer = MarianTokenizer(
            *(str(tmp_path / "theirs" / f"{side}.spm") for side in SIDES),
            vocabulary,
            **settings,
        )
        peer.save_pretrained(tmp_path / "theirs")
    converted("marian", tmp_path / "theirs", tmp_path / "ours")
    translator = Translator.from_pretrained(tmp_path / "ours", workers=1)
    codes = ["deu", "fra", "cmn_Hans", "ca@valencia"] * 3
    lines = [SOURCES[i % 3] for i in range(len(codes))]
    expected = []
    for line, code in zip(lines, codes, strict=True):
        (ids,) = theirs.generate(**peer(f">>{code}<< {line}", return_tensors="pt"), num_beams=3)
        expected.append(peer.decode(ids, skip_special_tokens=True))
    assert list(translator.translate(lines, target_lang=codes, num_beams=3)) == expected
    marked = [f">>{code}<< {line}" for line, code in zip(lines, codes, strict=True)]
    assert list(translator.translate(marked, num_beams=3)) == expected
    assert "target_lang" in error_of(lambda: list(translator.translate(lines)))
    if is_separate:
        assert translator.directions.pairs == [("eng", code) for code in codes[:4]]
        list(
            translator.translate(lines[:1], source_lang="eng", target_lang="deu", max_new_tokens=2)
        )


@pytest.mark.parametrize(
    ("codes", "language"), [(("deu",), None), (("cmn_Hans", "cmn_Hant"), "zh")]
)
def test_opus_model_of_one_target_needs_no_mark(
    codes: Any, language: str | None, tmp_path: Path
) -> None:
    """opus-mt-en-zh has a token for each script. transformers translates text without one."""
    theirs = write_opus_folder(tmp_path / "theirs", codes=codes)
    peer = MarianTokenizer.from_pretrained(tmp_path / "theirs", target_lang=language)
    peer.save_pretrained(tmp_path / "theirs")
    converted("marian", tmp_path / "theirs", tmp_path / "ours")
    translator = Translator.from_pretrained(tmp_path / "ours")
    for text, options in (
        (SOURCES[0], {}),
        (f">>{codes[0]}<< {SOURCES[0]}", {"target_lang": codes[0]}),
    ):
        (ids,) = theirs.generate(**peer(text, return_tensors="pt"))
        assert next(translator.translate([SOURCES[0]], **options)) == peer.decode(
            ids, skip_special_tokens=True
        )
