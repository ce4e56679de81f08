"""An export tests itself: it finds faults that are planted in its files, and leaves nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer.interop import ctranslate2
from hf_vanilla_transformer.interop import self_test as module
from hf_vanilla_transformer.interop.exporting import export
from hf_vanilla_transformer.interop.self_test import Probe, _start, _text, self_test
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.exports import write_model
from tests.interop.two_vocabularies import MODELS
from tests.model_helpers import SPECIAL_TOKENS, error_of, tiny_model, word_tokenizer

pytest.importorskip("ctranslate2", reason="the extra `ctranslate2` is not installed")


def swapped_tokens(config: Any, *tokenizers: Any) -> list[list[str]]:
    """The source's tokens on the target's side: the result of `get_vocab()`."""
    sizes = config.vocab_size, config.target_vocab_size
    tokens = [{number: token for token, number in one.get_vocab().items()} for one in tokenizers]
    return [
        [of_side.get(i, f"<unused_{i}>") for i in range(size)]
        for of_side, size in zip(tokens, sizes, strict=True)
    ]


def test_export_with_a_swapped_vocabulary_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["marian"](tmp_path)
    monkeypatch.setattr(ctranslate2, "tokens_of_sides", swapped_tokens)
    for name, options in (("ctranslate2", {}), ("argos", {"languages": ("en", "de")})):
        with pytest.raises(UserError, match=name):
            export(name, model, tmp_path / "out.argosmodel", **options)
    assert not (tmp_path / "out.argosmodel").exists()


LEARNED = {"position_encoding_type": "learned", "max_position_embeddings": 6}


@pytest.mark.parametrize(
    ("target_format", "fields", "settings"),
    [("ctranslate2", LEARNED, {}), ("marian", {}, {"do_sample": True})],
)
def test_export_of_few_positions_or_of_sampling_is_checked(
    target_format, fields, settings, tmp_path
):
    model = write_model(tmp_path / "model", **fields)
    model.generation_config.update(**settings)
    model.generation_config.save_pretrained(tmp_path / "model")
    assert "; checked with" in export(target_format, tmp_path / "model", tmp_path / "out")


# The pair that is scored

LETTERS = "abcdefghijklmnop"
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "7", *LETTERS]


def probe_of(settings: dict[str, Any], exact: bool = True, **fields: Any) -> Probe:
    """A model of 21 words, one for each letter, and the pair that it scores."""
    tokenizer = word_tokenizer(WORDS, ends=True, **SPECIAL_TOKENS)
    model = tiny_model(vocab_size=len(WORDS), **fields)
    model.generation_config = GenerationConfig(
        **{"eos_token_id": 2, "decoder_start_token_id": 0, **settings}
    )
    return Probe(model, (tokenizer, tokenizer), exact)


@pytest.mark.parametrize(
    ("settings", "fields", "text", "target"),
    [
        (
            {},
            {},
            "p o n m l k j i",
            "ponmlkj",
        ),  # eight words, and seven tokens with the end
        (
            {"suppress_tokens": [20, 19], "bad_words_ids": [[18]]},
            {},
            "p o n m l k j i",
            "mlkjihg",
        ),
        ({"max_new_tokens": 5}, {}, "p o n m l k j i", "ponm"),
        ({"max_length": 5}, {}, "p o n m l k j i", "pon"),
        (
            {},
            {"position_encoding_type": "learned", "max_position_embeddings": 6},
            "p o n m l",
            "ponml",
        ),
    ],
)
def test_pair_has_words_of_the_vocabulary(settings, fields, text, target):
    probe = probe_of(settings, **fields)
    assert probe.text == text
    assert probe.ids == [*(WORDS.index(word) for word in text.split()), 2]
    assert probe.target == [WORDS.index(letter) for letter in target]
    assert (
        [probe.names[i] for i in probe.target]
        == [probe.target_names[i] for i in probe.target]
        == list(target)
    )
    assert probe.end == 2


@pytest.mark.parametrize(
    ("settings", "end"), [({"eos_token_id": [7, 2]}, 7), ({"eos_token_id": None}, 2)]
)
def test_end_of_the_pair_is_that_of_the_search(settings, end):
    assert probe_of(settings).end == end


def test_text_of_a_vocabulary_without_words():
    tokenizer = word_tokenizer(WORDS[:5], **SPECIAL_TOKENS)
    assert _text(tokenizer, 50) == "a b"
    assert _text(tokenizer, 1) == "a"


@pytest.mark.parametrize(("of_search", "start"), [(9, 9), (0, 0), (None, 3)])
def test_start_is_that_of_the_search(of_search, start):
    model = tiny_model(decoder_start_token_id=3)
    model.generation_config.decoder_start_token_id = of_search
    assert _start(model) == start


def test_scores_are_log_probabilities_without_the_forbidden_tokens():
    probe = probe_of({"suppress_tokens": [5, 99]})
    logits = torch.randn(8, len(WORDS))
    allowed = [number for number in range(len(WORDS)) if number != 5]
    expected = [
        (row[label] - row[allowed].exp().sum().log()).item()
        for row, label in zip(logits, [*probe.target, 2], strict=True)
    ]
    kept = logits.clone()
    torch.testing.assert_close(probe.scores(logits), torch.tensor(expected))
    assert logits.equal(kept)


def test_scores_of_the_model_are_those_of_its_logits():
    probe = probe_of({})
    with torch.no_grad():
        logits = probe.model(
            torch.tensor([probe.ids]), decoder_input_ids=torch.tensor([[0, *probe.target]])
        ).logits
    expected = logits[0].log_softmax(-1)[range(8), [*probe.target, 2]]
    scores = probe.scores_of(probe.model, probe.ids)
    torch.testing.assert_close(scores, expected)
    assert not scores.requires_grad


# The comparison


def compared(
    monkeypatch: pytest.MonkeyPatch, differences: list[float], exact: bool, **settings: Any
) -> str:
    """The note about an engine whose log-probabilities differ so."""
    known = probe_of(settings)

    def engine(probe: Probe, written: Path) -> torch.Tensor:
        assert probe.model.dtype == (torch.float32 if exact else torch.float64)
        scores = known.scores_of(known.model, known.ids).double()
        return scores + torch.tensor([*differences, *[0.0] * (len(scores) - len(differences))])

    monkeypatch.setitem(module._ENGINES, "marian", ("transformers", engine))
    tokenizer = word_tokenizer(WORDS, ends=True, **SPECIAL_TOKENS)
    return self_test("marian", known.model.double(), (tokenizer, tokenizer), Path("unused"), exact)


@pytest.mark.parametrize(
    ("differences", "exact", "shown"),
    [
        ([0.0, -9e-4], True, "9e-04"),
        ([0.1], False, "1e-01"),
        ([0.0, 0.0, -2.0], False, "2e+00"),
    ],
)
def test_difference_is_told(differences, exact, shown, monkeypatch):
    note = compared(monkeypatch, differences, exact)
    assert note.startswith("; checked with transformers ")
    assert note.endswith(f": log-probabilities differ by at most {shown}")


@pytest.mark.parametrize(
    ("differences", "shown"),
    [([1.1e-3], "0.0011"), ([0.0, -2.5], "2.5"), ([float("nan")], "nan")],
)
def test_exact_export_that_differs_is_not_used(differences, shown, monkeypatch):
    message = error_of(compared, monkeypatch, differences, True)
    assert message == (
        f"marian: the export is not used, because transformers computes log-probabilities that differ by {shown}"
    )


def test_end_that_is_never_chosen_is_not_compared(monkeypatch):
    assert "checked with" in compared(monkeypatch, [], True, suppress_tokens=[2])


@pytest.mark.parametrize(
    ("error", "missing"),
    [(ImportError(name="onnxscript"), "onnxscript"), (ImportError(), "x")],
)
def test_library_that_is_missing_is_named(error, missing, monkeypatch):
    def engine(*_: Any) -> torch.Tensor:
        raise error

    monkeypatch.setitem(module._ENGINES, "onnx", ("x", engine))
    probe = probe_of({})
    tokenizer = word_tokenizer(WORDS, ends=True, **SPECIAL_TOKENS)
    note = self_test("onnx", probe.model, (tokenizer, tokenizer), Path("unused"))
    assert note == f"; not checked, because {missing} is not installed"
