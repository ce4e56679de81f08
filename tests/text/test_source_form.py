"""The form of a source text: recorded in training, applied once wherever the model is used, and whose code runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import Translator, pipeline_vanilla_transformer
from hf_vanilla_transformer.inference.candidates import translate_candidates
from hf_vanilla_transformer.inference.file_translation import translated_lines
from hf_vanilla_transformer.inference.line_warnings import LineWarnings
from hf_vanilla_transformer.inference.scoring import score_translations_of
from hf_vanilla_transformer.pipeline_vanilla_transformer import TranslationPipeline
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.text.smiles import canonical
from hf_vanilla_transformer.text.source_form import FORMS, SourceForm, form_note
from hf_vanilla_transformer.text.source_text import spelling
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.text.token_kinds import recorded_form
from hf_vanilla_transformer.utils.errors import UserError
from hf_vanilla_transformer.utils.shipped_models import model_folder
from tests.model_helpers import randomise, tiny_model
from tests.trainer_helpers import run_tiny

CANONICAL, SPELLING, _ = FORMS

#: of somebody: it is not idempotent, refuses a text, and says when it is imported
OWN = """
from pathlib import Path

Path("imported").touch()


def tagged(text):
    if "?" in text:
        raise ValueError(text)
    return "#" + text.lower()
"""
PAIRS = [("Ab", "b"), ("bA", "a"), ("aB", "ba"), ("B?", "b")] * 3


@pytest.fixture
def own_form(own_modules: Path) -> str:
    (own_modules / "own_source_form.py").write_text(OWN, encoding="utf-8")
    return "own_source_form:tagged"


@pytest.fixture
def without_rdkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)


def rows_of(folder: Path) -> str:
    table = folder / "train.tsv"
    table.write_text(
        "source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS), encoding="utf-8"
    )
    return str(table)


def trained(folder: Path, output: str, **flags: Any) -> Path:
    settings = {
        "vocab_size": None,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "generation_max_length": 8,
    }
    run_tiny(folder / output, train=rows_of(folder), **settings | flags)
    return folder / output


def test_named_functions_are_those_of_the_package() -> None:
    assert FORMS[CANONICAL] is canonical and FORMS[SPELLING] is spelling
    assert all(name.startswith("hf_vanilla_transformer.text.") for name in FORMS)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("don’t", "don't"),
        ("O‘Neill", "O'Neill"),
        (" hello\t", "hello"),
        ("ﬁt", "fit"),
        ("ｃａｔ", "cat"),
        ("a‐b", "a-b"),
    ],
)
def test_spellings_have_plain_signs(text: str, form: str) -> None:
    assert spelling(text) == form == spelling(form)


def test_code_of_somebody_runs_only_if_it_is_trusted(
    tmp_path: Path, own_form: str, in_tmp_path: Any
) -> None:
    form = SourceForm(own_form)
    assert (
        form("Ab?") == ("Ab?", None)
        and own_form in str(form.problem)
        and "\n" not in str(form.problem)
    )
    assert not Path("imported").exists() and "own_source_form" not in sys.modules
    form = SourceForm(own_form, trusted=True)
    assert Path("imported").exists() and form.problem is None
    assert form("Ab") == ("#ab", None)
    text, fault = form("Ab?")
    assert text == "Ab?" and own_form in str(fault)
    with pytest.raises(UserError, match="^source_form: no_module:f: "):
        SourceForm("no_module:f", trusted=True)
    tokenizer = train_symbol_tokenizer([("ab", 1)], "chars")
    tokenizer.init_kwargs["source_form"] = ["x"]
    with pytest.raises(UserError, match="^source_form: "):
        recorded_form(tokenizer)


def test_training_records_the_form_and_applies_it_once(
    tmp_path: Path, own_form: str, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    first = trained(tmp_path, "first", tokens="chars", source_form=own_form)
    assert f"train: {own_form} has changed 9 of 12 sources" in capsys.readouterr().out
    tokenizer, _ = load_tokenizers(first)
    assert recorded_form(tokenizer) == own_form and own_form in form_note(tokenizer)
    vocabulary = set("".join(tokenizer.get_vocab()))
    assert {"#", "a", "b", "B", "?"} <= vocabulary and "A" not in vocabulary  # "B?" stays as it is
    assert f"form of the training text, `{own_form}`" in (first / "README.md").read_text(
        encoding="utf-8"
    )

    untrusted = Translator.from_pretrained(first, device="cpu")
    assert own_form in caplog.text
    ids = tokenizer("#ab")["input_ids"]
    assert untrusted.encode("aB") == tokenizer("aB")["input_ids"] != ids
    caplog.clear()
    translator = Translator.from_pretrained(first, device="cpu", trust_remote_code=True)
    assert translator.encode("aB") == ids and not caplog.records
    assert translator.unknown_in("aZ") == ["z"]
    (scored,) = score_translations_of(translator, [("AB", "a")])
    (same,) = score_translations_of(untrusted, [("#ab", "a")])
    assert scored.log_probabilities == same.log_probabilities
    assert list(translator.translate(["Ab", "B?"])) == list(untrusted.translate(["#ab", "B?"]))
    refused = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert len(refused) == 1 and refused[0].endswith("(line 2)")

    with pytest.raises(UserError, match="^source_form: the tokenizer names own_source_form:tagged"):
        trained(tmp_path, "refused", model_name_or_path=str(first))
    second = trained(tmp_path, "second", model_name_or_path=str(first), source_form=own_form)
    assert recorded_form(load_tokenizers(second)[0]) == own_form
    with pytest.raises(UserError, match="^source_form: .*bidirectional"):
        trained(tmp_path, "third", tokens="chars", source_form=own_form, bidirectional=True)


def test_pipeline_says_that_it_applies_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        pipeline_vanilla_transformer.logger,
        "warning",
        lambda text, *values: warnings.append(text % values),
    )
    tokenizer = train_symbol_tokenizer([("ab", 1)], "chars")
    model = tiny_model(vocab_size=len(tokenizer))
    TranslationPipeline(model=model, tokenizer=tokenizer)
    assert not warnings
    tokenizer.init_kwargs["source_form"] = SPELLING
    TranslationPipeline(model=model, tokenizer=tokenizer)
    assert len(warnings) == 1 and SPELLING in warnings[0]


def test_shipped_models_name_their_forms() -> None:
    forms = {"retrosynthesis": CANONICAL, "g2p_en": SPELLING}
    for name, form in forms.items():
        assert recorded_form(load_tokenizers(model_folder(name))[0]) == form
        assert form.rpartition(":")[2] in (Path(model_folder(name)) / "README.md").read_text(
            encoding="utf-8"
        )


def test_molecule_has_one_answer_however_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    chem = pytest.importorskip("rdkit.Chem", reason="needs the extra `chemistry`")
    translator = Translator.from_pretrained(
        model_folder("retrosynthesis"), device="cpu", dtype="float32"
    )
    product = "CC(=O)Nc1ccc(O)cc1"
    kekule, numbered = (chem.MolFromSmiles(product) for _ in range(2))
    chem.Kekulize(kekule, clearAromaticFlags=True)
    for atom in numbered.GetAtoms():
        atom.SetAtomMapNum(atom.GetIdx() + 1)
    spelled = [
        product,
        chem.MolToSmiles(kekule, kekuleSmiles=True),
        chem.MolToSmiles(numbered),
        "Oc1ccc(NC(C)=O)cc1",
        f" {product} ",
    ]
    answers = list(translator.translate(spelled, num_beams=1))
    assert set(answers) == {answers[0]} and not caplog.records
    # spellings that are asked for stay
    found = list(translate_candidates(translator, spelled[:4], 2, spellings=2, num_beams=2))
    assert [one.text for one in found[0]] != [one.text for one in found[1]]
    caplog.clear()
    # [Na+] is not in the vocabulary, and the second line is no SMILES
    list(translator.translate(["[Na+].CC(=O)[O-]", "C1CC"], num_beams=1, max_new_tokens=3))
    unknown, refused = [each.getMessage() for each in caplog.records]
    assert "'[Na+]' (line 1)" in unknown and refused == (
        f"source_form: {CANONICAL} refuses the text, which is read as it is (line 2)"
    )


def test_without_rdkit_the_input_must_be_canonical(
    without_rdkit: None, caplog: pytest.LogCaptureFixture
) -> None:
    translator = Translator.from_pretrained(
        model_folder("retrosynthesis"), device="cpu", dtype="float32"
    )
    (said,) = [each.getMessage() for each in caplog.records]
    assert "canonical SMILES" in said and "[chemistry]" in said and "\n" not in said
    caplog.clear()
    texts = ["CC(=O)Nc1ccc(O)cc1", "CC(=O)NC1=CC=C(O)C=C1", "C1=CC=CC=C1"]
    list(translator.translate(texts, num_beams=1, max_new_tokens=3))
    (seen,) = [each.getMessage() for each in caplog.records]
    assert "Kekulé" in seen and seen.endswith("(2 lines: 2-3)")


def test_surrounding_white_space_is_a_symbol_only_if_the_vocabulary_has_it() -> None:
    for texts, expected in ((["ab", "ba"], "ab"), ([" ab", "b "], " ab ")):
        tokenizer = train_symbol_tokenizer([(text, 1) for text in texts], "chars")
        translator = Translator(randomise(tiny_model(vocab_size=len(tokenizer))), tokenizer)
        assert translator.source_line(" ab ") == expected
        assert translator.encode(" ab\t") == tokenizer(expected.rstrip())["input_ids"]
        assert translator.unknown_in(" ab\u3000") == [] and translator.unknown_in("a日 ") == ["日"]


def test_warnings_have_all_line_numbers() -> None:
    tokenizer = train_symbol_tokenizer([("ab", 1)], "chars")
    lines = [1, 5, 9, 10, 11, 12, 12, 40]
    parts = LineWarnings(), LineWarnings()
    for number in lines:
        parts[number > 10].check("source", tokenizer, "xa", tokenizer("xa")["input_ids"], number)
        parts[number > 10].add_fault("it did not end", number)
    total = LineWarnings()
    for part in parts:
        total.add(part)
    assert total.warnings() == [
        "source: symbols that the model does not know, read as <unk>, such as 'x' (7 lines: 1, 5, 9-12, 40)",
        "it did not end (7 lines: 1, 5, 9-12, 40)",
    ]


def test_outputs_without_an_end_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_symbol_tokenizer([("ab", 1)], "chars")
    model = randomise(tiny_model(vocab_size=len(tokenizer)))
    model.lm_head.bias = None
    model.generation_config.suppress_tokens = [tokenizer.eos_token_id]
    list(Translator(model, tokenizer).translate(["ab", "", "a", "b"], num_beams=1))
    (record,) = caplog.records
    assert (
        record.getMessage().endswith("(3 lines: 1, 3-4)")
        and "no_repeat_ngram_size" not in record.getMessage()
    )


def test_lists_say_what_was_checked_and_what_is_unknown() -> None:
    tokenizer = train_symbol_tokenizer([("ab", 1)], "chars")
    translator = Translator(randomise(tiny_model(vocab_size=len(tokenizer))), tokenizer)
    settings: dict[str, Any] = {"n_best": 2, "num_beams": 2, "max_new_tokens": 3}
    for normalize, valid in ((None, None), (str.upper, True), (lambda text: None, False)):
        lines = translated_lines(
            translator, ["a日b本", "a"], n_best_format="jsonl", normalize=normalize, **settings
        )
        rows = [json.loads(line) for line in lines]
        assert [row["unknown"] for row in rows] == [["日", "本"], []]
        assert {one["valid"] for row in rows for one in row["candidates"]} == {valid}
    cells = [
        line.split("\t")
        for line in translated_lines(translator, ["a日b本", "a"], n_best_format="tsv", **settings)
    ]
    assert {(row[0], row[5]) for row in cells} == {("1", "日 本"), ("2", "")}
