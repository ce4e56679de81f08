"""The scores as `evaluate.Metric`s: against jiwer, sacreBLEU and restated definitions, offline and without a file."""

import logging
import os
import random
import re
from pathlib import Path

import evaluate
import jiwer
import numpy as np
import pytest
import sacrebleu

from hf_vanilla_transformer.evaluation import score_translations
from hf_vanilla_transformer.evaluation.edit_distance import edit_distance
from hf_vanilla_transformer.evaluation.metric_classes import (
    CLASSES,
    Bleu,
    CharacterErrorRate,
    Chrf,
    ChrfPlusPlus,
    ExactMatch,
    FunctionMetric,
    SequenceErrorRate,
    Ter,
    TokenErrorRate,
    TopK,
    ratio,
    reference_columns,
)
from hf_vanilla_transformer.evaluation.metric_names import TITLES
from hf_vanilla_transformer.evaluation.metrics import Texts, compute_metric, make_metrics
from hf_vanilla_transformer.text.symbol_tokenizers import train_symbol_tokenizer
from hf_vanilla_transformer.text.token_kinds import token_splitter
from tests.model_helpers import error_of

HYPOTHESES = ["Hello, World!", "Ein kleiner Hund läuft über die Straße."]
REFERENCES = ["Hello, world!", "Ein Hund läuft über die Straße."]
OTHERS = ["hello world", "Ein kleiner Hund rennt über eine Straße."]
ROWS = [list(row) for row in zip(REFERENCES, OTHERS, strict=True)]


def random_texts(draw, count, least):
    return [
        "  ".join(draw.choice("abcdeé") for _ in range(draw.randint(least, 12)))
        for _ in range(count)
    ]


def plain_distance(first, second):
    """Wagner and Fischer 1974."""
    row = list(range(len(second) + 1))
    for index, symbol in enumerate(first, start=1):
        above = row[0]
        row[0] = index
        for place, other in enumerate(second, start=1):
            changed = above + (symbol != other)
            above = row[place]
            row[place] = min(above + 1, row[place - 1] + 1, changed)
    return row[-1]


def test_edit_distance_equals_the_matrix():
    draw = random.Random(0)
    for _ in range(300):
        first, second = (draw.choices("abc", k=draw.randint(0, 90)) for _ in range(2))
        assert edit_distance(first, second) == plain_distance(first, second)


# Scores of sacreBLEU


@pytest.mark.parametrize(
    ("metric", "judge"),
    [
        (Bleu("13a"), sacrebleu.BLEU()),
        (Bleu("13a", lowercase=True), sacrebleu.BLEU(lowercase=True)),
        (Bleu("char"), sacrebleu.BLEU(tokenize="char")),
        (Bleu("none"), sacrebleu.BLEU(tokenize="none", force=True)),
        (Bleu(), sacrebleu.BLEU()),
        (Chrf(), sacrebleu.CHRF()),
        (Chrf(lowercase=True), sacrebleu.CHRF(lowercase=True)),
        (ChrfPlusPlus(), sacrebleu.CHRF(word_order=2)),
        (ChrfPlusPlus(lowercase=True), sacrebleu.CHRF(word_order=2, lowercase=True)),
        (Ter(), sacrebleu.TER()),
        (Ter(lowercase=True), sacrebleu.TER()),
    ],
)
def test_score_and_signature_are_those_of_sacrebleu(metric, judge):
    found = metric.compute(predictions=HYPOTHESES, references=ROWS)
    expected = judge.corpus_score(HYPOTHESES, [REFERENCES, OTHERS])
    assert found[metric.key] == expected.score
    assert found[f"{metric.key}_signature"] == f"{expected.name}|{judge.get_signature()}"


def test_bleu_has_the_parts_of_its_formula():
    found = Bleu("13a").compute(predictions=HYPOTHESES, references=REFERENCES)
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert found["brevity_penalty"] == expected.bp
    assert found["precisions"] == expected.precisions
    assert found["hypothesis_length"] == expected.sys_len == 12
    assert found["reference_length"] == expected.ref_len == 11


@pytest.mark.parametrize(("tokenize", "warns"), [("13a", True), ("none", False)])
def test_text_that_looks_tokenised_is_named_unless_it_should(tokenize, warns, caplog):
    lines = ["a b ."] * 200
    with caplog.at_level(logging.WARNING, "sacrebleu"):
        Bleu(tokenize).compute(predictions=lines, references=lines)
    assert ("tokenized period" in caplog.text) is warns


def test_first_references_choose_the_tokenizer():
    rows = [["两只狗在奔跑", "two dogs run"], ["一只狗", None]]
    found = Bleu().compute(predictions=["两只狗", "狗"], references=rows)
    assert "tok:zh" in found["bleu_signature"]


def test_rows_may_have_different_numbers_of_references():
    assert reference_columns(["a", ["b", "c", "d"], ["e", "f"]]) == [
        ["a", "b", "e"],
        [None, "c", "f"],
        [None, "d", None],
    ]
    rows = [REFERENCES[:1], ROWS[1]]
    found = Bleu().compute(predictions=HYPOTHESES, references=rows)["bleu"]
    assert found == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES, [None, OTHERS[1]]]).score


# Rates


@pytest.mark.parametrize(
    ("metric", "judge"),
    [(TokenErrorRate(), jiwer.wer), (CharacterErrorRate(), jiwer.cer)],
    ids=["tokens", "characters"],
)
def test_error_rates_equal_jiwer(metric, judge):
    draw = random.Random(1)
    for _ in range(30):
        references = random_texts(draw, 9, 1)
        hypotheses = random_texts(draw, 9, 0)
        score = metric.compute(predictions=hypotheses, references=references)[metric.key]
        assert score == pytest.approx(100 * judge(references, hypotheses), abs=1e-12)


@pytest.mark.parametrize(
    ("metric", "judge"),
    [("token_error_rate", jiwer.wer), ("character_error_rate", jiwer.cer)],
)
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


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        # of the nearest reference: 1 edit of 3 tokens, not 2 of 4; of two equally near ones the shorter
        (TokenErrorRate(), "a b c", ["a b x y", "a b d"], 100 / 3),
        (TokenErrorRate(), "a b", ["a b c", "a"], 100),
        (TokenErrorRate(), "A b", ["a b"], 50),
        (TokenErrorRate(lowercase=True), "A b", ["a b"], 0),
        (TokenErrorRate(split=list), " ab ", ["ac"], 50),
        (TokenErrorRate(lowercase=True, split=list), "AB", ["ac"], 50),
        (CharacterErrorRate(), " abcd ", ["abce"], 25),
        (CharacterErrorRate(), "ABCD", ["abce"], 100),
        (CharacterErrorRate(lowercase=True), "ABCD", ["abce"], 25),
        (ExactMatch(), " a ", ["x", "a"], 100),
        (ExactMatch(), "A", ["a"], 0),
        (ExactMatch(lowercase=True), "A", ["a"], 100),
        (SequenceErrorRate(), " a ", ["x", "a"], 0),
        (SequenceErrorRate(), "A", ["a"], 100),
        (SequenceErrorRate(lowercase=True), "A", ["a"], 0),
    ],
)
def test_rate_of_one_sentence(metric, prediction, references, score):
    assert metric.compute(predictions=[prediction], references=[references]) == {
        metric.key: pytest.approx(score)
    }


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        (ExactMatch(), 75),
        (SequenceErrorRate(), 25),
        (TokenErrorRate(), 100 * 1 / 5),  # the sum of edits by the sum of tokens
    ],
)
def test_rate_of_several_sentences(metric, score):
    predictions = ["a", "b", "c", " d e "]
    references = [["a", "x"], ["x", "b"], ["x", "y"], ["d e"]]
    assert metric.compute(predictions=predictions, references=references) == {
        metric.key: pytest.approx(score)
    }


@pytest.mark.parametrize("metric", [TokenErrorRate(), ExactMatch()])
def test_each_prediction_has_its_references(metric):
    with pytest.raises(ValueError):
        metric.counts(["a"], ["a", "b"])


@pytest.mark.parametrize(
    ("sums", "quotient"), [((3, 2), 1.5), ((3, 1), 3), ((3, 0), 3), ((0, 0), 0)]
)
def test_ratio_without_a_denominator_has_1(sums, quotient):
    assert ratio(np.array(sums)) == quotient


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
    split = token_splitter(train_symbol_tokenizer([(text, 1) for text in references], tokens))
    score = score_translations(hypotheses, references, metrics=["token_error_rate"], split=split)[
        "token_error_rate"
    ]
    wanted, predicted = (list(map(TOKENS_OF[tokens], texts)) for texts in (references, hypotheses))
    edits = sum(map(plain_distance, wanted, predicted))
    assert edits
    assert score == pytest.approx(100 * edits / sum(map(len, wanted)), abs=1e-9)


@pytest.mark.parametrize("tokens", ["chars", "bytes"])
def test_models_of_characters_have_no_tokens_to_count(tokens):
    assert token_splitter(train_symbol_tokenizer([("a b", 1)], tokens)) is None


# Lists, and functions of the user


def test_top_k_counts_lists_with_the_reference_among_the_first_k():
    draw = random.Random(2)
    lists = [draw.sample([f"text {n}" for n in range(80)], 50) for _ in range(200)]
    references = [f"text {draw.randrange(80)}" for _ in lists]
    scores = TopK().compute(predictions=lists, references=references)
    for k in (1, 3, 5, 10, 50):
        hits = [reference in texts[:k] for texts, reference in zip(lists, references, strict=True)]
        assert scores[f"top_{k}"] == pytest.approx(100 * np.mean(hits))


@pytest.mark.parametrize(
    ("metric", "lists", "references", "scores"),
    [
        (TopK(), [["a", "b", "c"], ["c"]], ["b", "c"], {"top_1": 50, "top_3": 100}),
        (TopK(), [["a", "b"]], ["b"], {"top_1": 0}),
        (TopK(), [[]], ["b"], {"top_1": 0}),
        (TopK(), [[" b "]], [["a", "b"]], {"top_1": 100}),
        (TopK(), [["B"]], ["b"], {"top_1": 0}),
        (TopK(lowercase=True), [["B"]], ["b"], {"top_1": 100}),
    ],
)
def test_top_k_goes_as_far_as_the_longest_list(metric, lists, references, scores):
    assert metric.compute(predictions=lists, references=references) == scores


def test_function_scores_each_sentence_with_its_first_reference():
    def counted(sources, predictions, references):
        assert (sources, predictions, references) == (
            ["s", "t"],
            ["a", "bb"],
            ["r", "first"],
        )
        return [1, 4]

    metric = FunctionMetric("m:f", counted)
    rows = [["r"], ["first", "second"]]
    assert metric.compute(sources=["s", "t"], predictions=["a", "bb"], references=rows) == {
        "m:f": 2.5
    }
    assert metric.statistics(["a", "bb"], rows, ["s", "t"])["m:f"].tolist() == [
        [1, 1],
        [4, 1],
    ]
    without_sources = FunctionMetric("m:f", lambda sources, *_: [len(sources)])
    assert without_sources.statistics(["a"], ["b"])["m:f"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"m:f: it returned shape (1,); one number for each of 2 is needed"),
        (
            [1.0, 2.0, 3.0],
            r"m:f: it returned shape (3,); one number for each of 2 is needed",
        ),
        (
            [[1.0], [2.0]],
            r"m:f: it returned shape (2, 1); one number for each of 2 is needed",
        ),
        ([1.0, float("nan")], "m:f: it returned nan for line 2"),
        ([float("inf"), float("nan")], "m:f: it returned inf for line 1"),
    ],
)
def test_function_that_returns_no_number_for_each_sentence_is_refused(returned, message):
    metric = FunctionMetric("m:f", lambda *_: returned)
    inputs = {"sources": ["", ""], "predictions": ["a", "b"], "references": [["a"], ["b"]]}
    assert error_of(metric.compute, **inputs) == message


# As metrics of the library


@pytest.mark.parametrize("name", TITLES)
def test_metric_computes_in_memory_what_a_score_is(name):
    n_best = [[text, "a b"] for text in HYPOTHESES]
    texts = Texts(HYPOTHESES, [REFERENCES, OTHERS], n_best=n_best)
    metric = make_metrics([name])[name]
    computed = metric.compute(
        predictions=n_best if name == "top_k" else HYPOTHESES, references=ROWS
    )
    scores, details = compute_metric(name, metric, texts)
    assert scores
    assert scores | details == computed
    assert metric.lowercase is False
    assert metric.keep_in_memory
    assert not Path(metric.data_dir, name).exists()


@pytest.mark.parametrize("name", TITLES)
def test_metric_describes_itself(name):
    metric = CLASSES[name]()
    several, one = metric.features
    assert metric.description.startswith(CLASSES[name].__doc__.splitlines()[0])
    assert several["references"].feature.dtype == one["references"].dtype == "string"


def test_scores_leave_no_file():
    home = Path(os.environ["HF_HOME"])
    before = set(home.rglob("*"))
    for name in TITLES:
        predictions = [["a b"]] if name == "top_k" else ["a b"]
        CLASSES[name]().compute(predictions=predictions, references=["a b"])
    assert set(home.rglob("*")) == before


def test_metrics_combine_with_others(length_metric):
    combined = evaluate.combine([Bleu("none"), Chrf(), evaluate.load(length_metric)])
    texts = {"predictions": ["a b c d e", "f g"], "references": ["a b c d e", "f h"]}
    scores = combined.compute(**texts)
    assert scores["bleu"] == Bleu("none").compute(**texts)["bleu"]
    assert scores["chrf"] == Chrf().compute(**texts)["chrf"]
    assert scores["longest"] == 9
