"""The scores of a trainer's predictions, of token ids, and the report of a test split."""

from types import SimpleNamespace

import numpy as np
import pytest
from transformers import EvalPrediction

from hf_vanilla_transformer.evaluation import (
    score_translations,
    trainer_metrics,
    translation_metrics,
)
from hf_vanilla_transformer.evaluation.metric_classes import FunctionMetric
from hf_vanilla_transformer.evaluation.metrics import Groups
from hf_vanilla_transformer.evaluation.trainer_metrics import _shown, score_test_split
from hf_vanilla_transformer.text.language_tokens import add_language_tokens
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from tests.model_helpers import SPECIAL_TOKENS, error_of, word_tokenizer

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "d", "E"]


@pytest.fixture
def tokenizer():
    return word_tokenizer(WORDS, **SPECIAL_TOKENS)


def predicted(predictions, labels):
    return EvalPrediction(predictions=np.array(predictions), label_ids=np.array(labels))


def test_ignored_labels_become_padding_in_a_copy(tokenizer):
    predictions = np.array([[0, 4, 5, 6, 7, 2], [0, 4, 4, 2, -100, -100]])
    labels = np.array([[4, 5, 6, 7, 2], [4, 5, 2, -100, -100]])
    kept = predictions.copy(), labels.copy()
    scores = translation_metrics(tokenizer, tokenize="none")(
        EvalPrediction(predictions=predictions, label_ids=labels)
    )
    expected = score_translations(["a b c d", "a a"], ["a b c d", "a b"], tokenize="none")
    assert scores == {
        "bleu": expected["bleu"],
        "chrf": expected["chrf"],
        "exact_match": 50.0,
        "gen_len": 5.0,  # (6 + 4) / 2: the start and end tokens count, as in run_translation.py
    }
    assert all(type(value) is float for value in scores.values())
    np.testing.assert_array_equal(predictions, kept[0])
    np.testing.assert_array_equal(labels, kept[1])


@pytest.mark.parametrize(
    ("predictions", "labels", "exact_match", "gen_len"),
    [
        # the source's padding, here a word of the target, follows the end
        ([0, 4, 2, 5, 5], [4, 2, 5], 100, 3),
        ([0, 4, 2, 5, 2], [4, 2], 100, 3),
        # the first token starts the translation, even if it is the end of a sentence
        ([2, 4, 5, 2, 6], [4, 5, 2], 100, 4),
        ([2, 2, 4], [2, 4], 100, 2),
        ([0, 4, 5], [4, 5], 100, 3),
        ([0, 4, 5, 2], [4, 2, 5, 2], 0, 4),
    ],
)
def test_what_follows_the_end_does_not_count(predictions, labels, exact_match, gen_len, tokenizer):
    scores = translation_metrics(tokenizer, metrics=["exact_match"])(
        predicted([predictions], [labels])
    )
    assert scores == {"exact_match": exact_match, "gen_len": gen_len}


def test_options_reach_the_scores(tokenizer):
    prediction = predicted([[8, 4]], [[8, 5]])
    plain = translation_metrics(tokenizer)(prediction)
    assert plain["chrf"] == score_translations(["E a"], ["E b"])["chrf"]
    lowered = translation_metrics(tokenizer, lowercase=True, metrics=["chrf"])(prediction)
    assert lowered["chrf"] == score_translations(["e a"], ["e b"])["chrf"]
    upper = word_tokenizer([*WORDS, "A"], **SPECIAL_TOKENS)
    assert translation_metrics(upper)(predicted([[4]], [[9]]))["exact_match"] == 0
    assert translation_metrics(upper, lowercase=True)(predicted([[4]], [[9]]))["exact_match"] == 100
    formed = translation_metrics(upper, normalize=str.upper)(predicted([[4]], [[9]]))
    assert (formed["exact_match"], formed["invalid"]) == (100, 0)


def test_sources_and_groups_are_those_of_as_many_predictions(tokenizer):
    given = []

    def keep(sources, hypotheses, references):
        given.append(sources)
        return [1.0] * len(references)

    compute = translation_metrics(
        tokenizer,
        metrics=["exact_match", FunctionMetric("m:keep", keep)],
        sources=["s", "t"],
        groups=Groups(["x", "y"], False),
    )
    whole = compute(predicted([[4], [5]], [[4], [4]]))
    of_others = [compute(predicted([[4]] * size, [[4]] * size)) for size in (1, 3)]
    assert given == [["s"], ["t"], ["s", "t"], [""], ["", "", ""]]
    assert whole["exact_match"] == 50
    assert whole["exact_match_x"] == 100
    assert whole["exact_match_y"] == 0
    assert all(scores.keys() == {"exact_match", "m:keep", "gen_len"} for scores in of_others)


def test_trainer_scores_the_tokens_of_its_tokenizer():
    tokenizer = train_symbol_tokenizer([("BrCCO", 1)], "smiles")
    rows = [[tokenizer(text)["input_ids"]] for text in ("CCCO", "BrCCO")]
    scores = translation_metrics(tokenizer, metrics=["token_error_rate"])(predicted(*rows))
    assert scores["token_error_rate"] == 25


def test_any_metric_goes_into_a_trainer(length_metric, tokenizer):
    compute = translation_metrics(tokenizer, metrics=["token_error_rate", length_metric])
    scores = compute(predicted([[0, 4, 5, 2]], [[4, 4, 2]]))
    assert scores["token_error_rate"] == 50
    assert scores["length_longest"] == 3
    assert "bleu" not in scores


def test_logits_are_refused(tokenizer):
    logits = predicted(np.zeros((1, 3, 9), dtype=np.float32), [[4, 5, 2]])
    assert "predict_with_generate" in error_of(translation_metrics(tokenizer), logits)


def test_tokenizer_without_padding_is_refused(tokenizer):
    tokenizer.pad_token = None
    assert error_of(translation_metrics, tokenizer).startswith("tokenizer: it has no pad token")


# A test split


class Trainer:
    """What `score_test_split` uses of a trainer."""

    def __init__(self, tokenizer, predictions, beams=1, is_first=True):
        self.processing_class = tokenizer
        self.args = SimpleNamespace(generation_max_length=7)
        self.model = SimpleNamespace(generation_config=SimpleNamespace(num_beams=beams))
        self.predictions = predictions
        self.is_world_process_zero = lambda: is_first
        self.metrics = {
            "test_loss": 1.5,
            "test_bleu": -1.0,
            "test_bleu_of_another": -1.0,
            "eval_loss": 2.0,
        }

    def predict(self, dataset, metric_key_prefix, num_beams):
        self.asked = dataset, metric_key_prefix, num_beams, self.args.generation_max_length
        if self.predictions is None:
            raise KeyboardInterrupt
        return SimpleNamespace(predictions=np.array(self.predictions), metrics=self.metrics)


PAIRS = {"source": ["s", "t"], "target": ["a b c d", "a b"]}
PREDICTIONS = [[0, 4, 5, 6, 7, 2], [0, 4, 4, 2, -100, -100]]


def test_split_is_scored_and_reported(tokenizer, monkeypatch):
    lines = []

    def show(line, flush):
        assert flush  # at once, also into a pipe
        lines.append(line)

    monkeypatch.setattr(trainer_metrics, "print", show, raising=False)
    clock = iter([100.0, 107.5])
    monkeypatch.setattr(trainer_metrics, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer = Trainer(tokenizer, PREDICTIONS, beams=4)
    dataset = range(1234)
    found = score_test_split(
        trainer, dataset, PAIRS, "test", {"tokenize": "none"}, Groups(["x", "y"], False)
    )
    assert trainer.asked == (dataset, "test", 4, None)
    assert trainer.args.generation_max_length == 7
    expected = score_translations(
        ["a b c d", "a a"],
        PAIRS["target"],
        tokenize="none",
        groups=Groups(["x", "y"], False),
    )
    assert found == {
        "test_loss": 1.5,
        **{f"test_{name}": value for name, value in expected.items()},
        "test_seconds": 7.5,
        "test_examples": [["s", "a b c d", "a b c d"], ["t", "a b", "a a"]],
    }
    first, whole, *of_groups = lines
    assert first == "test: translating 1,234 sentences, 4 beams"
    signature = expected["bleu_signature"]
    assert (
        whole
        == f"test: BLEU {expected['bleu']:.2f} ({signature}), chrF {expected['chrf']:.2f}, exact match 50.00"
    )
    assert of_groups == [
        f"  {name}: BLEU {expected[f'bleu_{name}']:.2f}, chrF {expected[f'chrf_{name}']:.2f}, exact match {match}"
        for name, match in (("x", "100.00"), ("y", "0.00"))
    ]


def test_line_of_all_has_no_scores_of_groups(tokenizer, capsys, own_modules):
    """Also not those of a metric of the user's own."""
    (own_modules / "own_length.py").write_text(
        "def words(sources, hypotheses, references):\n    return [float(len(text.split())) for text in hypotheses]\n"
    )
    options = {"metrics": ["own_length:words", "exact_match"]}
    groups = Groups(["x", "y"], False)
    score_test_split(Trainer(tokenizer, PREDICTIONS), range(2), PAIRS, "test", options, groups)
    _, whole, *of_groups = capsys.readouterr().out.splitlines()
    assert whole == "test: own_length:words 3.00, exact match 50.00"
    assert of_groups == [
        "  x: own_length:words 4.00, exact match 100.00",
        "  y: own_length:words 2.00, exact match 0.00",
    ]


def test_other_processes_report_nothing(tokenizer, capsys):
    trainer = Trainer(tokenizer, PREDICTIONS, beams=None, is_first=False)
    score_test_split(trainer, range(2), PAIRS, "test", {})
    assert trainer.asked[2] == 1
    assert capsys.readouterr().out == ""


def test_predictions_of_sequences_are_called_so(capsys):
    tokenizer = train_symbol_tokenizer([("CCO", 1)], "smiles")
    trainer = Trainer(tokenizer, [tokenizer("CCO")["input_ids"]])
    pairs = {"source": ["O"], "target": ["CCO"]}
    score_test_split(trainer, range(1), pairs, "valid", {"metrics": ["exact_match"]})
    assert capsys.readouterr().out.splitlines() == [
        "valid: 1 predictions, 1 beam",
        "valid: exact match 100.00",
    ]


def test_limit_of_evaluations_returns_after_an_interruption(tokenizer):
    trainer = Trainer(tokenizer, None)
    with pytest.raises(KeyboardInterrupt):
        score_test_split(trainer, range(2), PAIRS, "test", {})
    assert trainer.args.generation_max_length == 7


def test_token_ids_are_decoded_to_the_text_of_a_translation():
    """Without the spaces that decoding may clean up, and without the token of its language."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "oh", "no", "."]
    tokenizer = word_tokenizer(words, clean_up_tokenization_spaces=True, **SPECIAL_TOKENS)
    add_language_tokens(tokenizer, [("en", "de")], on_source=False)
    predictions = [[0, 7, 4, 5, 6, 2, -100]]
    trainer = Trainer(None, predictions)
    trainer.target_tokenizer = tokenizer
    pairs = {"source": ["ach nein ."], "target": ["oh no ."]}
    scores = score_test_split(trainer, pairs["source"], pairs, "test", {"tokenize": "none"})
    assert scores["test_exact_match"] == 100
    assert scores["test_examples"] == [["ach nein .", "oh no .", "oh no ."]]
    scores = translation_metrics(tokenizer, tokenize="none")(
        predicted(predictions, [[7, 4, 5, 5, 2]])
    )
    assert scores["chrf"] == score_translations(["oh no ."], ["oh no no"])["chrf"]
    assert scores["gen_len"] == 6


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        ({"bleu": 34.1, "chrf": 60.2}, "BLEU 34.10 (BLEU|x), chrF 60.20"),
        ({"top_1": 1.0, "mine": 3.126}, "top 1 1.00, mine 3.13"),
    ],
)
def test_line_of_scores_has_their_titles(scores, line):
    signatures = {"bleu_signature": "BLEU|x", "chrf_signature": "chrF2|x"}
    assert _shown(scores, signatures) == line
