"""A model of many languages translates each sentence in its own direction, in any batch."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.text.language_tokens import Direction
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import DIRECTIONS, error_of, save_model, save_model_of_languages

HUNDREDS = ("seven", "eight", "nine hundred and nine")
UNITS = ("two", "ten", "three ten")
TEXT = [f"{hundreds} hundred and {units}" for hundreds in HUNDREDS for units in UNITS]
EACH = DIRECTIONS * 3
LANGUAGES: dict[str, Any] = {
    "source_lang": [source for source, _ in EACH],
    "target_lang": [target for _, target in EACH],
}


@pytest.fixture(scope="module", params=[True, False], ids=["source", "target"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_of_languages(
        tmp_path_factory.mktemp("model"), request.param, tie_word_embeddings=False
    )


@pytest.fixture
def translator(folder: Path) -> Translator:
    return Translator.from_pretrained(folder, workers=1)


def by_transformers(
    folder: Path,
    text: str,
    target: str,
    **settings: Any,
) -> list[int]:
    """The ids that plain transformers gives for a sentence, with the mark in the text or as a first token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    on_source = f">>{target}<<" in tokenizer.get_vocab()
    if not on_source:
        settings["forced_bos_token_id"] = tokenizer.convert_tokens_to_ids(f"__{target}__")
        settings["max_new_tokens"] += 1
    inputs = tokenizer(f">>{target}<< {text}" if on_source else text, return_tensors="pt")
    ids = model.generate(**inputs, **settings)[0].tolist()
    return ids[1 if on_source else 2 :]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 1}, {"num_beams": 3}, {"num_beams": 3, "batch_size": 2}, {"batch_size": 1}],
)
def test_mixed_directions_give_the_tokens_of_single_sentences(
    folder: Path,
    translator: Translator,
    settings: dict[str, Any],
) -> None:
    settings |= {"max_new_tokens": 12}
    mixed = translator.translate_nbest(
        TEXT,
        **LANGUAGES,
        probabilities=True,
        **settings,
    )
    mark = translator.directions.prefix_length
    settings.pop("batch_size", None)
    for text, (_, target), (best, *_) in zip(TEXT, EACH, mixed, strict=True):
        ids = translator.target_tokenizer.convert_tokens_to_ids(best.tokens[mark:])
        assert ids == by_transformers(folder, text, target, **settings)


def test_mixed_directions_of_an_ensemble(folder: Path, tmp_path: Path) -> None:
    on_source = ">>de<<" in AutoTokenizer.from_pretrained(folder).get_vocab()
    settings = {"num_beams": 2, "max_new_tokens": 8}
    other = save_model_of_languages(
        tmp_path / "other",
        on_source,
        seed=1,
        tie_word_embeddings=False,
    )
    translator = Translator.from_pretrained(folder, ensemble=[other], workers=1)
    mixed = translator.translate(
        TEXT,
        **LANGUAGES,
        batch_size=4,
        **settings,
    )
    for text, direction, translation in zip(TEXT, EACH, mixed, strict=True):
        assert [translation] == list(translator.directed(*direction).translate([text], **settings))


def test_marks_are_no_words(translator: Translator) -> None:
    ((best,),) = translator.translate_nbest(
        TEXT[:1],
        target_lang="de",
        alignment=True,
        max_new_tokens=8,
    )
    sources, targets = zip(*best.alignment, strict=True)
    assert max(sources) < len(TEXT[0].split())
    assert max(targets) < max(1, len(best.text.split()))


def test_prefixes_follow_the_mark(translator: Translator) -> None:
    prefix = "siebenhundert"
    for text in translator.translate(
        TEXT,
        **LANGUAGES,
        prefixes=[prefix] * len(TEXT),
        max_new_tokens=5,
    ):
        assert text.startswith(prefix)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "target_lang"),
        ({"target_lang": "xx"}, "target_lang"),
        ({"source_lang": "xx", "target_lang": "de"}, "source_lang"),
        ({"target_lang": ["de", "fr"]}, "target_lang"),
        ({"target_lang": ["de"] * 100}, "target_lang"),
    ],
)
def test_unknown_and_missing_languages_are_refused(
    translator: Translator,
    arguments: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        list(translator.translate(TEXT, max_new_tokens=2, **arguments))
    assert "target_lang" in error_of(translator.directed, "en", "xx")


def test_model_of_one_direction_has_no_other(tmp_path: Path) -> None:
    translator = Translator.from_pretrained(save_model(tmp_path, TEXT))
    assert "target_lang" in error_of(translator.translate, TEXT, target_lang="fr")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (">>th<< seven", r"line 2: >>th<<: the model has no language th; it has de, "),
        (" >>DE<<seven", r"line 2: >>DE<<: the model does not read this mark; give target_lang"),
    ],
)
def test_mark_of_a_language_that_the_model_lacks_is_refused(
    translator: Translator,
    text: str,
    message: str,
) -> None:
    settings: dict[str, Any] = {"target_lang": "de", "max_new_tokens": 2}
    with pytest.raises(UserError, match=message):
        list(translator.translate(["seven", text], **settings))
    # In the middle of a text it is text.
    assert len(list(translator.translate([f"seven {text}"], **settings))) == 1


@pytest.mark.parametrize("text", ["seven >>fr<< eight", "seven eight >>fr<<", ">>fr<< seven eight"])
def test_mark_in_the_text_does_not_choose_the_language(tmp_path: Path, text: str) -> None:
    translator = Translator.from_pretrained(save_model_of_languages(tmp_path / "model"))
    marks = translator.directions.source.ids
    ids = translator.directed("en", "de").encode(text)
    assert ids[0] == marks["de"]
    assert not {*marks.values()}.intersection(ids[1:]) - {marks["de"]}


def test_codes_may_be_spelt_in_another_way(translator: Translator) -> None:
    """Also that of a source language, which has no token if the source is marked with its target."""
    expected = list(
        translator.translate(
            TEXT,
            source_lang="en",
            target_lang="de",
            max_new_tokens=4,
        )
    )
    assert list(translator.directed("EN", "De").translate(TEXT, max_new_tokens=4)) == expected


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        ((None, "en"), ("de", "en")),
        ((None, "FR"), ("en", "fr")),
        (("de", None), ("de", "en")),
        (("en", None), ("en", None)),  # of two pairs
        ((None, None), (None, None)),
        (("fr", "de"), ("fr", "de")),  # an untrained pair that is named whole
    ],
)
def test_missing_code_is_that_of_the_only_pair(
    translator: Translator,
    given: Direction,
    completed: Direction,
) -> None:
    directions = translator.directions
    assert directions.completed(*given) == completed
    assert directions.changed(*given).default == completed
    assert next(directions.each(*given)) == completed
