"""A token is that of a language because a class or a record says so. One that only looks like it is text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    EvalPrediction,
    M2M100Tokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as M2M100_CODES
from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES as MBART_CODES
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as MBART50_CODES
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB_CODES

from hf_vanilla_transformer.evaluation import translation_metrics
from hf_vanilla_transformer.inference.directions import Directions
from hf_vanilla_transformer.interop.joint_tokenizer import joint_tokenizer
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers
from hf_vanilla_transformer.text.language_tokens import (
    add_language_tokens,
    decode_targets,
    language_tokens,
    token_ids,
)
from tests.interop.foreign import SOURCES, write_m2m100_folder, write_opus_folder
from tests.model_helpers import error_of, tiny_config


def foreign(special: list[str], added: list[str]) -> PreTrainedTokenizerBase:
    """A tokenizer with padding, start, end and unknown token of these names, and added tokens that are text."""
    pad, bos, eos, unk = special
    vocabulary = {token: number for number, token in enumerate([*special, "one", "two", "three"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, 2)]
    )
    names = {"pad_token": pad, "bos_token": bos, "eos_token": eos, "unk_token": unk}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_tokens(added)
    return tokenizer


PLAIN = ["<pad>", "<s>", "</s>", "<unk>"]
FOREIGN = {
    "ParlAI": (["__null__", "__start__", "__end__", "__unk__"], ["__p1__", "__sil__"]),
    "SELFIES": (
        ["[PAD]", "[START]", "[END]", "[UNK]"],
        ["[C]", "[=Branch1]", "[Ring1]", "[Ring2]", "[nop]"],
    ),
    "Keras": (["[PAD]", "[START]", "[END]", "[UNK]"], ["[START2]", "[en_XX]"]),
    "control codes": (PLAIN, ["<sep>", "__sep__", "__eou__", "[nop]", ">>cat<<", "<2de>"]),
    "names of NLLB": (PLAIN, ["dog_Bark", "deu_Latn", "__de__"]),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_tokenizers_of_other_people_have_no_language(kind: str, tmp_path: Path) -> None:
    special, added = FOREIGN[kind]
    foreign(special, added).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert language_tokens(tokenizer) is None and language_tokens(tokenizer, "target") is None
    directions = Directions(tokenizer, tokenizer)
    assert (directions.pairs, directions.prefix_length, directions.needs_target) == ([], 0, False)
    for token in added:
        ids = tokenizer(f"one {token} two")["input_ids"]
        assert directions.mark(ids, (None, None), 1) == ids and len(ids) == 4
        assert decode_targets(tokenizer, [ids]) == [f"one {token} two"]


@pytest.mark.parametrize("token", ["[Ring1]", "__sep__", "deu_Latn"])
def test_text_without_a_token_is_no_exact_match(token: str) -> None:
    tokenizer = foreign(PLAIN, [token])
    predictions = tokenizer(["one two"], padding="max_length", max_length=4)["input_ids"]
    labels = tokenizer([f"one {token} two"])["input_ids"]
    scores = translation_metrics(tokenizer, metrics=["exact_match"])(
        EvalPrediction(predictions, labels)
    )
    assert scores["exact_match"] == 0.0


def test_predictions_are_the_first_of_several_outputs() -> None:
    ids = np.array([[5, -100], [4, 6]])
    others = np.zeros((2, 2, 3), int)
    assert token_ids((ids, others), 0).tolist() == [[5, 0], [4, 6]]
    for wrong in (others, ids[0], ids * 1.0):
        assert "token ids (N, T) are needed" in error_of(token_ids, wrong, 0)


def of_marian(folder: Path) -> tuple[PreTrainedTokenizerBase, list[str]]:
    write_opus_folder(folder / "marian", codes=("deu", "fra", "cmn_Hans"))
    return MarianTokenizer.from_pretrained(folder / "marian"), ["deu", "fra", "cmn_Hans"]


def of_m2m100(folder: Path) -> tuple[PreTrainedTokenizerBase, list[str]]:
    write_m2m100_folder(folder / "m2m")
    return M2M100Tokenizer.from_pretrained(folder / "m2m"), M2M100_CODES["m2m100"]


def of_class(kind: type[Any], codes: list[str], **options: Any) -> Any:
    def made(folder: Path) -> tuple[PreTrainedTokenizerBase, list[str]]:
        kind(**options).save_pretrained(folder / "made")
        return AutoTokenizer.from_pretrained(folder / "made"), codes

    return made


REAL = {
    "Marian": of_marian,
    "M2M-100": of_m2m100,
    "NLLB": of_class(NllbTokenizer, NLLB_CODES),
    "NLLB legacy": of_class(NllbTokenizer, NLLB_CODES, legacy_behaviour=True),
    "mBART": of_class(MBartTokenizer, MBART_CODES),
    "mBART-50": of_class(MBart50Tokenizer, MBART50_CODES),
}


@pytest.mark.parametrize("kind", REAL)
def test_class_of_the_tokenizer_knows_its_languages(kind: str, tmp_path: Path) -> None:
    tokenizer, codes = REAL[kind](tmp_path)
    words = ["__sep__", "[Ring1]", "dog_Bark"]
    if kind != "M2M-100":  # it gives added tokens the ids of its languages
        tokenizer.add_tokens(words)
    languages = language_tokens(tokenizer)
    assert languages is not None and [*languages.ids] == codes
    assert len({*languages.ids.values()} - {*tokenizer.all_special_ids[:4]}) == len(codes)
    first, last = codes[0], codes[-1]
    if kind == "Marian":
        expected = tokenizer(f">>{last}<< {SOURCES[0]}")["input_ids"]
        assert languages.source(tokenizer(SOURCES[0])["input_ids"], (None, last)) == expected
        return
    # The class itself marks a source by `src_lang`.
    tokenizer.src_lang = last
    expected = tokenizer(SOURCES[0])["input_ids"]
    tokenizer.src_lang = first
    assert languages.source(tokenizer(SOURCES[0])["input_ids"], (last, first)) == expected
    assert languages.target((first, last)) == [expected[-1 if languages.at_end else 0]]


@pytest.mark.parametrize("on_source", [True, False])
@pytest.mark.parametrize("is_old", [False, True])
def test_added_languages_are_recorded(on_source: bool, is_old: bool, tmp_path: Path) -> None:
    """Models that were trained before the record have the directions and the sides of the marks."""
    tokenizer = foreign(PLAIN, ["__sep__", ">>cat<<"])
    assert add_language_tokens(tokenizer, [("en", "de"), ("de", "pt_BR")], on_source) == [
        "de",
        "pt_BR",
    ]
    save_tokenizers(tmp_path, tokenizer)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    form = ">>{}<<" if on_source else "__{}__"
    assert settings["language_tokens"] == {code: form.format(code) for code in ("de", "pt_BR")}
    if is_old:
        del settings["language_tokens"]
        file.write_text(json.dumps(settings), encoding="utf-8")
    loaded, _ = load_tokenizers(tmp_path)
    languages = language_tokens(loaded)
    assert languages is not None
    assert languages.ids == {
        code: loaded.get_vocab()[form.format(code)] for code in ("de", "pt_BR")
    }
    assert (languages.source_mark, languages.target_mark) == (
        ("target", False) if on_source else (None, True)
    )
    assert add_language_tokens(loaded, [("en", "fr")]) == ["fr"]
    more = language_tokens(loaded)
    assert more is not None and [*more.ids] == ["de", "pt_BR", "fr"]


@pytest.mark.parametrize(
    ("kind", "code", "token"), [("NLLB", "tyv_Cyrl", "tyv_Cyrl"), ("Marian", "es", ">>es<<")]
)
def test_language_that_a_class_lacks_is_recorded(
    kind: str, code: str, token: str, tmp_path: Path
) -> None:
    tokenizer, codes = REAL[kind](tmp_path)
    assert add_language_tokens(tokenizer, [(codes[0], code)]) == [code]
    save_tokenizers(tmp_path / "saved", tokenizer)
    loaded, _ = load_tokenizers(tmp_path / "saved")
    languages = language_tokens(loaded)
    assert languages is not None and {*languages.ids} == {*codes, code}
    assert languages.ids[code] == loaded.get_added_vocab()[token]


def test_record_names_tokens_of_any_look() -> None:
    tokenizer = foreign(PLAIN, ["<2de>", "French:"])
    tokenizer.init_kwargs |= {"language_tokens": {"de": "<2de>", "fr": "French:"}}
    assert "language_marks" in error_of(language_tokens, tokenizer)
    tokenizer.init_kwargs["language_marks"] = ["target", False]
    languages = language_tokens(tokenizer)
    assert languages is not None and languages.ids == {"de": 7, "fr": 8}
    ids = tokenizer("one two")["input_ids"]
    assert languages.source(ids, (None, "fr")) == tokenizer("French: one two")["input_ids"]
    content, _, _ = joint_tokenizer(
        tokenizer, foreign(PLAIN, []), tiny_config(vocab_size=10, decoder_vocab_size=10)
    )
    assert {"<2de>", "French:"} <= {token["content"] for token in content["added_tokens"]}


@pytest.mark.parametrize("token", ["<2fr>", "</s>", "<unk>"])
def test_record_of_no_language_token_is_refused(token: str) -> None:
    tokenizer = foreign(PLAIN, ["<2de>"])
    tokenizer.init_kwargs |= {
        "language_tokens": {"de": "<2de>", "fr": token},
        "language_marks": ["target", False],
    }
    assert f"fr: {token}" in error_of(language_tokens, tokenizer)
