"""The languages of a model folder: of its card, of its tokenizer, or of an OPUS-MT model's name."""

import json

import pytest

from hf_vanilla_transformer.inference.languages import model_languages

CARD = "---\nlanguage:\n- {}\n- {}\n---\n"


@pytest.mark.parametrize(
    ("name", "card", "tokenizer", "languages"),
    [
        ("x", ("en", "de"), {"source_lang": "fr", "target_lang": "es"}, ("en", "de")),
        ("x_it_nl", None, {"source_lang": "eng", "target_lang": "deu"}, ("eng", "deu")),
        ("x", None, {"src_lang": "en_XX", "tgt_lang": "ro_RO"}, ("en", "ro-RO")),
        ("x", None, {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}, ("eng-Latn", "deu-Latn")),
        ("x", None, {"langs": ["en", "de"]}, ("en", "de")),
        ("x", ("de", "pt-BR"), {"source_lang": "pt_br", "target_lang": "de"}, ("pt-BR", "de")),
        ("x", ("de", "en"), {"langs": ["en", "de"]}, ("en", "de")),
        ("opus-mt-it-nl", None, {"source_lang": "en", "target_lang": "ROMANCE"}, ("it", "nl")),
        ("opus-mt-it-nl", None, {"langs": 3, "source_lang": None, "src_lang": {}}, ("it", "nl")),
        ("what_is_it", None, None, None),
        ("run-no-id", None, None, None),
        ("numbers_en_de", None, {}, None),
        ("opus-mt-en-fra", None, None, ("en", "fra")),
        ("my-new_run", None, None, None),
        ("x", None, {"source_lang": "en"}, None),
    ],
)
def test_languages_are_of_the_card_then_the_tokenizer_then_the_name(
    tmp_path, name, card, tokenizer, languages
):
    folder = tmp_path / name
    folder.mkdir()
    if card:
        (folder / "README.md").write_text(CARD.format(*card), encoding="utf-8")
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert model_languages(folder) == languages
