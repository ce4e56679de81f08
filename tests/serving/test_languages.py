"""The languages of a model folder: given, from its card, or from the name of a model of OPUS-MT."""

from pathlib import Path

import pytest

from hf_vanilla_transformer.serving.languages import model_folders
from hf_vanilla_transformer.utils.errors import UserError


@pytest.mark.parametrize(
    ("argument", "pair", "folder"),
    [
        ("en-de=runs/x", ("en", "de"), "runs/x"),
        ("en-de=x=y-z", ("en", "de"), "x=y-z"),
        ("en-pt-BR=x", ("en", "pt-BR"), "x"),
        ("pt_BR-en_US=x", ("pt-BR", "en-US"), "x"),
        ("zh-Hans-en=x", ("zh-Hans", "en"), "x"),
        ("opus-mt-en-fra/", ("en", "fra"), "opus-mt-en-fra"),
    ],
)
def test_languages_are_given_or_in_the_name(
    argument: str, pair: tuple[str, str], folder: str
) -> None:
    assert model_folders([argument]) == {pair: Path(folder)}


@pytest.mark.parametrize(
    ("languages", "pair"),
    [
        ("[en, de]", ("en", "de")),
        ("[no, en]", ("no", "en")),  # a boolean of YAML 1.1
        ("[on, off]", ("on", "off")),
        ("[en_US, pt_BR]", ("en-US", "pt-BR")),
    ],
)
def test_card_wins_over_the_name(tmp_path: Path, languages: str, pair: tuple[str, str]) -> None:
    folder = tmp_path / "opus-mt-is-it"
    folder.mkdir()
    (folder / "README.md").write_text(f"---\nlanguage: {languages}\n---\n# x\n", encoding="utf-8")
    assert model_folders([str(folder)]) == {pair: folder}


@pytest.mark.parametrize(
    "card", ["", "---", "---\nlanguage: en\n---", "---\n- [\n---", "---\nlanguage: [en]\n---\n"]
)
def test_card_without_two_languages_is_passed_over(tmp_path: Path, card: str) -> None:
    folder = tmp_path / "opus-mt-fr-es"
    folder.mkdir()
    (folder / "README.md").write_text(card, encoding="utf-8")
    assert model_folders([str(folder)]) == {("fr", "es"): folder}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/what_is_it"], "^runs/what_is_it: no such folder"),
        (["g2p"], "^g2p: no such folder; did you mean g2p_en"),
        (["pt-br-en=x"], "--model: pt-br-en= .* pt-BR-en=x"),
        (["en-de=a", "en-de=b"], "--model: a and b .*en-de"),
    ],
)
def test_languages_that_are_unclear_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_folders(arguments)


def test_folder_without_languages_is_asked_for_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--model: {tmp_path}: .* en-de={tmp_path}"):
        model_folders([str(tmp_path)])
