"""Metrics against the formula of Papineni et al. 2002 and sacreBLEU's functions, and token ids from a trainer."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import sacrebleu
from transformers import EvalPrediction

from hf_vanilla_transformer.evaluation import score_translations, translation_metrics
from hf_vanilla_transformer.evaluation.bleu_tokenizers import check_tokenizer
from hf_vanilla_transformer.evaluation.trainer_metrics import _shown, score_test_split
from hf_vanilla_transformer.text.language_tokens import add_language_tokens
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import SPECIAL_TOKENS, error_of, word_tokenizer

HYPOTHESES = ["the the the cat sat on the mat", "a dog barks at the old red gate today", "yes it is"]
REFERENCES = ["the cat sat on the mat by the big door", "a dog barks at the old gate", "yes it is so"]


def ngrams(text, order):
    words = text.split()
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def papineni_bleu(hypotheses, references):
    """BP · exp(Σ log p_n / 4), p_n with counts clipped to the reference's (Papineni et al. 2002, §2.3)."""
    logs = []
    for order in range(1, 5):
        pairs = [(ngrams(h, order), ngrams(r, order)) for h, r in zip(hypotheses, references, strict=True)]
        matched = sum((hypothesis & reference).total() for hypothesis, reference in pairs)
        logs.append(math.log(matched / sum(hypothesis.total() for hypothesis, _ in pairs)))
    c, r = (sum(len(text.split()) for text in texts) for texts in (hypotheses, references))
    return 100 * min(1, math.exp(1 - r / c)) * math.exp(sum(logs) / 4), min(1, math.exp(1 - r / c))


def test_bleu_equals_the_formula_of_papineni():
    scores = score_translations(HYPOTHESES, REFERENCES, tokenize="none")
    bleu, brevity_penalty = papineni_bleu(HYPOTHESES, REFERENCES)
    assert brevity_penalty < 1  # so that the example covers it
    assert scores["bleu"] == pytest.approx(bleu, abs=1e-9)
    assert scores["brevity_penalty"] == pytest.approx(brevity_penalty, abs=1e-12)
    # by hand: 17 of 20 words match. The fourth "the" of the first line has none
    assert scores["precisions"][0] == pytest.approx(100 * (7 + 7 + 3) / 20)
    assert (scores["hypothesis_length"], scores["reference_length"], scores["sentences"]) == (20, 21, 3)


@pytest.mark.parametrize(("tokenize", "lowercase"), [("13a", False), ("13a", True), ("intl", False), ("char", True)])
def test_scores_equal_sacrebleu(tokenize, lowercase):
    hypotheses = ["Hello, World!", "Ein kleiner Hund läuft über die Straße."]
    references = ["Hello, world!", "Ein Hund läuft über die Straße."]
    scores = score_translations(hypotheses, references, tokenize=tokenize, lowercase=lowercase)
    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize, lowercase=lowercase)
    assert scores["bleu"] == pytest.approx(bleu.score, abs=1e-12)
    if not lowercase:
        assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-12)
    assert scores["exact_match"] == (50 if lowercase else 0)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "tokenize"),
    [
        ("两只狗在草地上奔跑，一个孩子在旁边看。", "两只狗在草地上跑步，一个孩子在旁边看。", "zh"),
        ("两只狗 run in Beijing 的草地上奔跑。", "两只狗 run in 北京 的草地上奔跑。", "zh"),
        ("二匹の犬が芝生の上を走っています。", "二匹の犬が芝の上を走っている。", "ja-mecab"),
        ("두 마리의 개가 잔디밭에서 달리고 있다.", "두 마리 개가 잔디밭에서 달린다.", "ko-mecab"),
        ("สุนัขสองตัววิ่งอยู่บนสนามหญ้า", "สุนัขสองตัวกำลังวิ่งบนหญ้า", "char"),
        ("ឆ្កែពីរក្បាលកំពុងរត់", "ឆ្កែពីរកំពុងរត់", "char"),
        ("Две собаки бегут по траве (北京).", "Две собаки бегут по газону (北京).", "13a"),
        ("1 2 3 4 5", "1 2 3 4 6", "13a"),
    ],
)
def test_bleu_has_the_tokenizer_of_the_script(reference, hypothesis, tokenize, caplog):
    scores = score_translations([hypothesis], [reference])
    try:
        check_tokenizer(tokenize)
    except UserError:  # its package is not installed
        assert f"sacrebleu[{tokenize[:2]}]" in caplog.text
        tokenize = "char"
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu([hypothesis], [[reference]], tokenize=tokenize).score)
    assert f"tok:{tokenize}" in scores["bleu_signature"] and scores["chrf"] > 0


def test_line_of_scores_has_the_signature_of_bleu():
    scores, signatures = {"bleu": 34.1, "chrf": 60.2}, {"bleu_signature": "BLEU|x", "chrf_signature": "chrF2|x"}
    assert _shown(scores, signatures) == "BLEU 34.10 (BLEU|x), chrF 60.20"


def test_signatures_contain_the_settings():
    scores = score_translations(["a b c d"], ["a b c d"], tokenize="none", lowercase=True)
    version = sacrebleu.__version__
    assert scores["bleu_signature"] == f"BLEU|nrefs:1|case:lc|eff:no|tok:none|smooth:exp|version:{version}"
    assert scores["chrf_signature"] == f"chrF2|nrefs:1|case:lc|eff:yes|nc:6|nw:0|space:no|version:{version}"
    assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == 100 and scores["exact_match"] == 100


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a"] * 1000, ["a"] * 999, "1000.* 999 "),
        ([], [], "hypotheses|score"),
        ("a text", ["a text"], "hypotheses|string"),
        (["a", None], ["a", "b"], "line 2.*None"),
        ({"a": ["b"]}, ["b"], "hypotheses: .*not a dict"),
        (["b"], {"a": ["b"]}, "references: .*not a dict"),
        (["b"], [{"a": ["b"]}], "references: .*not a dict"),
    ],
)
def test_invalid_texts_are_refused(hypotheses, references, message):
    with pytest.raises(UserError, match=message):
        score_translations(hypotheses, references)


@pytest.mark.parametrize("kind", [tuple, iter, np.array, pandas.Series])
def test_texts_are_of_any_kind_of_list(kind):
    hypotheses, references, others = ["a b", "c d"], ["a b", "c e"], ["f", "g"]
    for columns in ([references], [references, others]):
        expected = score_translations(hypotheses, columns)
        assert score_translations(kind(hypotheses), [kind(column) for column in columns]) == expected
    assert score_translations(kind(hypotheses), kind(references)) == score_translations(hypotheses, references)


def test_tokenizer_that_cannot_be_loaded_is_a_one_line_error(monkeypatch):
    def missing(name):
        raise RuntimeError("\nPlease install\n\n    pip install extra\n")

    check_tokenizer.cache_clear()
    monkeypatch.setattr("sacrebleu.metrics.bleu._get_tokenizer", missing)
    with pytest.raises(UserError) as error:
        check_tokenizer("ja-mecab")
    check_tokenizer.cache_clear()
    assert "pip install extra" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def tokenizer():
    return word_tokenizer(["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "d", "E"], **SPECIAL_TOKENS)


def test_ignored_labels_become_padding_in_a_copy(tokenizer):
    predictions = np.array([[0, 4, 5, 6, 7, 2], [0, 4, 4, 2, -100, -100]])
    labels = np.array([[4, 5, 6, 7, 2], [4, 5, 2, -100, -100]])
    kept = predictions.copy(), labels.copy()
    scores = translation_metrics(tokenizer, tokenize="none")(EvalPrediction(predictions=predictions, label_ids=labels))
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


def test_token_ids_are_decoded_to_the_text_of_a_translation():
    """Without the spaces that decoding may clean up, and without the token of its language."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "oh", "no", "."]
    tokenizer = word_tokenizer(words, clean_up_tokenization_spaces=True, **SPECIAL_TOKENS)
    add_language_tokens(tokenizer, [("en", "de")], on_source=False)
    predictions, labels = np.array([[0, 7, 4, 5, 6, 2, -100]]), np.array([[7, 4, 5, 5, 2]])
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        args=SimpleNamespace(generation_max_length=None),
        model=SimpleNamespace(generation_config=SimpleNamespace(num_beams=1)),
        is_world_process_zero=lambda: False,
        predict=lambda *_, **__: SimpleNamespace(predictions=predictions, metrics={}),
    )
    pairs = {"source": ["ach nein ."], "target": ["oh no ."]}
    scores = score_test_split(trainer, pairs["source"], pairs, "test", {"tokenize": "none"})
    assert scores["test_exact_match"] == 100 and scores["test_examples"] == [["ach nein .", "oh no .", "oh no ."]]
    scores = translation_metrics(tokenizer, tokenize="none")(EvalPrediction(predictions=predictions, label_ids=labels))
    assert scores["chrf"] == score_translations(["oh no ."], ["oh no no"])["chrf"] and scores["gen_len"] == 6


def test_lowercase_is_passed_to_the_score(tokenizer):
    prediction = EvalPrediction(predictions=np.array([[8]]), label_ids=np.array([[8]]))
    assert translation_metrics(tokenizer, lowercase=True)(prediction)["exact_match"] == 100


def test_logits_are_refused(tokenizer):
    logits = EvalPrediction(predictions=np.zeros((1, 3, 9), dtype=np.float32), label_ids=np.array([[4, 5, 2]]))
    assert "predict_with_generate" in error_of(lambda: translation_metrics(tokenizer)(logits))


def test_tokenizer_without_padding_is_refused(tokenizer):
    tokenizer.pad_token = None
    assert "pad token" in error_of(translation_metrics, tokenizer)
