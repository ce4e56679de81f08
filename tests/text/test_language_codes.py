"""Codes of languages may be spelled in other ways than the tokenizer has them."""

from hf_vanilla_transformer.text.language_tokens import LanguageTokens
from tests.model_helpers import error_of


def test_case_and_sign_of_a_code_may_differ():
    languages = LanguageTokens({"th": 5, "pt_BR": 6, "de": 7}, "target", False)
    assert (
        languages.check("TH", "target_lang") == "th"
        and languages.check("pt-br", "target_lang") == "pt_BR"
    )
    assert languages.source([1, 2], (None, "PT-BR")) == [6, 1, 2]
    assert "target_lang" in error_of(languages.check, "fr", "target_lang")
