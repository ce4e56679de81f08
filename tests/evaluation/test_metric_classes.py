"""The scores as `evaluate.Metric`s: against jiwer and restated definitions, offline and without a file."""

import os
import random
import re
from pathlib import Path

import evaluate
import jiwer
import numpy as np
import pytest
from transformers import EvalPrediction

from hf_vanilla_transformer.evaluation import metric_classes, score_translations, translation_metrics
from hf_vanilla_transformer.evaluation.comparison import scores_by_group
from hf_vanilla_transformer.evaluation.edit_distance import edit_distance
from hf_vanilla_transformer.evaluation.metric_classes import Bleu, CharacterErrorRate, Chrf, TokenErrorRate, TopK
from hf_vanilla_transformer.evaluation.metric_names import TITLES, default_metrics
from hf_vanilla_transformer.evaluation.metrics import Groups, Texts, compute_metric, make_metrics, score_names
from hf_vanilla_transformer.evaluation.score_tables import group_table, render
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.text.token_kinds import token_splitter
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import SPECIAL_TOKENS, error_of, word_tokenizer


def random_texts(draw, count, least):
    return ["  ".join(draw.choice("abcdeé") for _ in range(draw.randint(least, 12))) for _ in range(count)]


def plain_distance(first, second):
    """Wagner and Fischer 1974."""
    row = list(range(len(second) + 1))
    for index, symbol in enumerate(first, start=1):
        above, row[0] = row[0], index
        for place, other in enumerate(second, start=1):
            above, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, above + (symbol != other))
    return row[-1]


def test_edit_distance_equals_the_matrix():
    draw = random.Random(0)
    for _ in range(300):
        first, second = (draw.choices("abc", k=draw.randint(0, 90)) for _ in range(2))
        assert edit_distance(first, second) == plain_distance(first, second)


@pytest.mark.parametrize(
    ("metric", "judge"),
    [(TokenErrorRate(), jiwer.wer), (CharacterErrorRate(), jiwer.cer)],
    ids=["tokens", "characters"],
)
def test_error_rates_equal_jiwer(metric, judge):
    draw = random.Random(1)
    for _ in range(30):
        references, hypotheses = random_texts(draw, 9, 1), random_texts(draw, 9, 0)
        score = metric.compute(predictions=hypotheses, references=references)[metric.key]
        assert score == pytest.approx(100 * judge(references, hypotheses), abs=1e-12)


def test_top_k_counts_lists_with_the_reference_among_the_first_k():
    draw = random.Random(2)
    lists = [draw.sample([f"text {n}" for n in range(80)], 50) for _ in range(200)]
    references = [f"text {draw.randrange(80)}" for _ in lists]
    scores = TopK().compute(predictions=lists, references=references)
    for k in (1, 3, 5, 10, 50):
        hits = [reference in texts[:k] for texts, reference in zip(lists, references, strict=True)]
        assert scores[f"top_{k}"] == pytest.approx(100 * np.mean(hits))
    assert list(TopK().compute(predictions=[["a", "b", "c"]], references=["b"])) == ["top_1", "top_3"]


def test_names_and_classes_agree():
    assert list(metric_classes.CLASSES) == list(TITLES)


@pytest.mark.parametrize("name", TITLES)
def test_scores_of_texts_are_those_of_compute(name):
    hypotheses, references = ["a b c d", "F g"], [["a b c e", "f g"], ["a b", "x"]]
    n_best = [[text, "a b"] for text in hypotheses]
    texts = Texts(hypotheses, references, n_best=n_best)
    metric = make_metrics([name])[name]
    predictions = n_best if name == "top_k" else hypotheses
    computed = metric.compute(predictions=predictions, references=[list(row) for row in zip(*references, strict=True)])
    scores, details = compute_metric(name, metric, texts)
    assert scores | details == computed and scores


def test_metrics_combine_with_others(tmp_path):
    (tmp_path / "length.py").write_text(LENGTH, encoding="utf-8")
    other = evaluate.load(str(tmp_path / "length.py"))
    combined = evaluate.combine([Bleu("none"), Chrf(), other])
    scores = combined.compute(predictions=["a b c d e", "f g"], references=["a b c d e", "f h"])
    expected = score_translations(["a b c d e", "f g"], ["a b c d e", "f h"], tokenize="none")
    assert scores["bleu"] == expected["bleu"] and scores["chrf"] == expected["chrf"] and scores["longest"] == 9
    assert scores["bleu_signature"] == expected["bleu_signature"]


LENGTH = """
import datasets
import evaluate


class Length(evaluate.Metric):
    def _info(self):
        features = datasets.Features(predictions=datasets.Value("string"), references=datasets.Value("string"))
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        lengths = [len(text) for text in predictions]
        return {"longest": max(lengths), "shortest": min(lengths), "all": lengths}
"""


def test_metric_of_a_folder_joins_the_built_in_ones(tmp_path):
    folder = tmp_path / "length"
    folder.mkdir()
    (folder / "length.py").write_text(LENGTH, encoding="utf-8")
    scores = score_translations(["abc", "d"], ["abc", "e"], metrics=["chrf", str(folder)])
    assert scores["length_longest"] == 3 and scores["length_shortest"] == 1 and scores["exact_match"] == 50
    names = score_names(make_metrics(["chrf", str(folder)]))
    assert names == ["chrf", "length_longest", "length_shortest", "exact_match"]


def test_metric_that_cannot_be_loaded_is_a_one_line_error(tmp_path):
    (tmp_path / "needs.py").write_text("import no_such_package\n" + LENGTH, encoding="utf-8")
    for name in ("no-such-metric-anywhere", str(tmp_path / "needs.py")):
        with pytest.raises(UserError, match="^metrics: ") as error:
            make_metrics([name])
        assert "\n" not in str(error.value)
    assert "did you mean bleu" in error_of(make_metrics, ["bleuu"])


def test_scores_leave_no_file():
    names = ["bleu", "chrf", "ter", "token_error_rate"]
    score_translations(["a b"], ["a b"], metrics=names)
    left = [path for path in Path(os.environ["HF_HOME"]).rglob("*") if path.name in names]
    assert left == []


def upper_or_invalid(text):
    if text == "raise":
        raise RuntimeError("no text")
    return None if text == "none" else text.upper()


def test_invalid_texts_are_counted_and_equal_nothing():
    hypotheses, references = ["a", "none", "raise", "B"], ["A", "none", "x", "b"]
    scores = score_translations(
        hypotheses, references, metrics=["top_k"], n_best=[[text] for text in hypotheses], normalize=upper_or_invalid
    )
    assert scores["exact_match"] == scores["top_1"] == 50 and scores["invalid"] == 50


def test_any_metric_goes_into_a_trainer(tmp_path):
    (tmp_path / "length.py").write_text(LENGTH, encoding="utf-8")
    tokenizer = word_tokenizer(["<s>", "<pad>", "</s>", "<unk>", "a", "b"], **SPECIAL_TOKENS)
    compute = translation_metrics(tokenizer, metrics=["token_error_rate", str(tmp_path / "length.py")])
    prediction = EvalPrediction(predictions=np.array([[0, 4, 5, 2]]), label_ids=np.array([[4, 4, 2]]))
    scores = compute(prediction)
    assert scores["token_error_rate"] == 50 and scores["length_longest"] == 3 and "bleu" not in scores


def test_invalid_hypothesis_does_not_equal_an_empty_reference():
    references = ["", "a", ""]
    lists = [["none"], ["none", "a"], ["none", ""]]
    scores = score_translations(
        ["none", "raise", ""], references, metrics=["top_k"], n_best=lists, normalize=upper_or_invalid
    )
    assert scores["exact_match"] == pytest.approx(100 / 3) and scores["invalid"] == pytest.approx(200 / 3)
    assert scores["top_1"] == 0
    assert score_translations(["", "a"], ["", "b"])["exact_match"] == 50


@pytest.mark.parametrize("form", [5, True, b"text", ["text"], object()])
def test_normaliser_that_returns_no_text_is_refused(form):
    with pytest.raises(UserError, match="^normalize: it returned .*, neither a text nor None$"):
        score_translations(["a"], ["a"], normalize=lambda text: form)


@pytest.mark.parametrize(("metric", "judge"), [("token_error_rate", jiwer.wer), ("character_error_rate", jiwer.cer)])
@pytest.mark.parametrize(
    ("references", "hypotheses"),
    [
        (["", ""], ["a", "b c"]),
        (["", ""], ["", ""]),
        (["a", ""], ["a", "b c"]),
        (["a b"], [""]),
        (["a\u00a0b\tc  d"], ["a b\tc d\x00"]),
        (["ผู้ชาย", "👨‍👩‍👧"], ["ผูชาย", "👨‍👩‍👦"]),
    ],
)
def test_error_rates_of_odd_texts_equal_jiwer(metric, judge, references, hypotheses):
    score = score_translations(hypotheses, references, metrics=[metric])[metric]
    assert score == pytest.approx(100 * judge(references, hypotheses), abs=1e-12)


# restated: the tokens of each kind, white space at the ends left out
TOKENS_OF = {
    "words": lambda text: text.strip().split(" "),
    "smiles": lambda text: re.findall(r"\[[^\]]+\]|Br|Cl|[^\s]", text),
    "tagged": lambda text: re.findall(r"\[[^\[\]]+\]|[\s\S]", text.strip()),
    "[a-z]+|.": lambda text: re.findall(r"[a-z]+|.", text.strip()),
}
PREDICTED = {
    "words": (["a b ɑ̃ d", "k k s"], ["a ɑ̃ d ", "k z s s"]),
    "smiles": (["BrCC[C@@H](Cl)O", "c1ccccc1"], ["ClCC[C@H](Cl)O", "c1ccccc1[Na+]"]),
    "tagged": (["[V][PST]ran", "[N]two words"], ["[V][PRS]ran", "[N]twoword"]),
    "[a-z]+|.": (["cos(x)**2", "sin(x)"], ["sin(x)**2", "sin(xy)*"]),
}


@pytest.mark.parametrize("tokens", TOKENS_OF)
def test_token_error_rate_counts_the_tokens_of_the_model(tokens):
    references, hypotheses = PREDICTED[tokens]
    tokenizer = train_symbol_tokenizer([(text, 1) for text in references], tokens)
    split = token_splitter(tokenizer)
    assert default_metrics("sequence", split) == ("exact_match", "token_error_rate")
    score = score_translations(hypotheses, references, metrics=["token_error_rate"], split=split)["token_error_rate"]
    wanted, predicted = (list(map(TOKENS_OF[tokens], texts)) for texts in (references, hypotheses))
    edits = sum(map(plain_distance, wanted, predicted))
    assert edits and score == pytest.approx(100 * edits / sum(map(len, wanted)), abs=1e-9)


@pytest.mark.parametrize("tokens", ["chars", "bytes"])
def test_models_of_characters_are_scored_by_characters(tokens):
    split = token_splitter(train_symbol_tokenizer([("a b", 1)], tokens))
    assert split is None and default_metrics("sequence", split) == ("exact_match", "character_error_rate")


def test_trainer_scores_the_tokens_of_its_tokenizer():
    tokenizer = train_symbol_tokenizer([("BrCCO", 1)], "smiles")
    labels = np.array([tokenizer("BrCCO")["input_ids"]])
    predicted = np.array([tokenizer("CCCO")["input_ids"]])
    scores = translation_metrics(tokenizer, metrics=["token_error_rate"])(EvalPrediction(predicted, labels))
    assert scores["token_error_rate"] == 25


def test_lists_of_unequal_lengths_have_the_top_of_the_longest():
    references = ["a", "b", "c"]
    lists = {"one": [["x", "a"], ["b"], ["x", "x", "c"]], "two": [["x"], ["x"], ["c"]]}
    hypotheses = {name: [texts[0] for texts in each] for name, each in lists.items()}
    groups = scores_by_group(hypotheses, references, ["l", "m", "l"], metrics=["top_k"], n_best=lists)
    assert groups["l"]["one"] == {"top_1": 0, "top_3": 100} and groups["m"]["one"] == {"top_1": 100, "top_3": 100}
    assert groups["m"]["two"] == {"top_1": 0, "top_3": 0} and groups["l"]["two"]["top_1"] == 50
    render(group_table("part", groups))
    # the three equal texts are one place of a list of three
    scores = score_translations(["x"], ["c"], metrics=["top_k"], n_best=[["x", "x", "x"]])
    assert scores["top_1"] == scores["top_3"] == 0


@pytest.mark.parametrize("lists", [["a"], [["a", None]]])
def test_list_of_a_sentence_has_texts(lists):
    assert error_of(score_translations, ["a"], ["a"], metrics=["top_k"], n_best=lists).startswith("n_best: ")


@pytest.mark.parametrize("lists", [{"sources": ["a"]}, {"n_best": [["a"]]}, {"groups": Groups(["x"], False)}])
def test_lists_that_lack_an_item_are_refused(lists):
    with pytest.raises(UserError, match="2 hypotheses, but 1 (sources|n_best|labels)"):
        score_translations(["a", "b"], ["a", "b"], **lists)


def test_sequence_error_rate_counts_what_equals_no_reference() -> None:
    predictions = ["a", "b", "c", " d "]
    references = [["a", "x"], ["x", "b"], ["x", "y"], ["d"]]
    assert metric_classes.SequenceErrorRate().compute(predictions=predictions, references=references) == {
        "sequence_error_rate": 25.0
    }
