"""Scores of translations: the formula of Papineni et al. 2002, other metrics beside, invalid texts, groups."""

import math
import re
from collections import Counter
from dataclasses import FrozenInstanceError

import numpy as np
import pandas
import pytest
import sacrebleu

from hf_vanilla_transformer.evaluation import example_translations, score_translations
from hf_vanilla_transformer.evaluation.bleu_tokenizers import check_tokenizer
from hf_vanilla_transformer.evaluation.metric_classes import (
    Bleu,
    FunctionMetric,
    TokenErrorRate,
)
from hf_vanilla_transformer.evaluation.metric_names import TITLES
from hf_vanilla_transformer.evaluation.metrics import (
    Groups,
    Scorer,
    Texts,
    compute_metric,
    inputs_of,
    longest,
    make_metrics,
    of_equal_length,
    reference_lists,
    score_names,
    signatures_of,
    text_list,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import error_of

HYPOTHESES = [
    "the the the cat sat on the mat",
    "a dog barks at the old red gate today",
    "yes it is",
]
REFERENCES = [
    "the cat sat on the mat by the big door",
    "a dog barks at the old gate",
    "yes it is so",
]


def ngrams(text, order):
    words = text.split()
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def papineni_bleu(hypotheses, references):
    """BP · exp(Σ log p_n / 4), p_n with counts clipped to the reference's (Papineni et al. 2002, §2.3), and BP."""
    logs = []
    for order in range(1, 5):
        pairs = [
            (ngrams(h, order), ngrams(r, order))
            for h, r in zip(hypotheses, references, strict=True)
        ]
        matched = sum((hypothesis & reference).total() for hypothesis, reference in pairs)
        logs.append(math.log(matched / sum(hypothesis.total() for hypothesis, _ in pairs)))
    c, r = (sum(len(text.split()) for text in texts) for texts in (hypotheses, references))
    brevity_penalty = min(1, math.exp(1 - r / c))
    return 100 * brevity_penalty * math.exp(sum(logs) / 4), brevity_penalty


def test_bleu_equals_the_formula_of_papineni():
    scores = score_translations(HYPOTHESES, REFERENCES, tokenize="none")
    bleu, brevity_penalty = papineni_bleu(HYPOTHESES, REFERENCES)
    assert brevity_penalty < 1  # so that the example covers it
    assert scores["bleu"] == pytest.approx(bleu, abs=1e-9)
    assert scores["brevity_penalty"] == pytest.approx(brevity_penalty, abs=1e-12)
    # by hand: 17 of 20 words match. The fourth "the" of the first line has none
    assert scores["precisions"][0] == pytest.approx(100 * (7 + 7 + 3) / 20)
    assert scores["hypothesis_length"] == 20
    assert scores["reference_length"] == 21
    assert scores["sentences"] == 3


def test_arguments_reach_the_metrics():
    names = ["bleu", "chrf", "token_error_rate"]
    scores = score_translations(
        ["A b C d"], ["a b c d"], metrics=names, tokenize="none", lowercase=True, split=list
    )
    version = sacrebleu.__version__
    assert (
        scores["bleu_signature"]
        == f"BLEU|nrefs:1|case:lc|eff:no|tok:none|smooth:exp|version:{version}"
    )
    assert (
        scores["chrf_signature"]
        == f"chrF2|nrefs:1|case:lc|eff:yes|nc:6|nw:0|space:no|version:{version}"
    )
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == scores["exact_match"] == 100
    assert score_translations(["ab"], ["ac"], metrics=names, split=list)["token_error_rate"] == 50


def test_defaults_are_bleu_and_chrf_with_case():
    scores = score_translations(["A b c d e"], ["a b c d e"])
    assert scores["bleu"] == sacrebleu.corpus_bleu(["A b c d e"], [["a b c d e"]]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(["A b c d e"], [["a b c d e"]]).score
    assert scores["exact_match"] == 0
    assert not scores.keys() & {"chrf++", "ter", "invalid"}


@pytest.mark.parametrize(
    ("reference", "hypothesis", "tokenize"),
    [
        (
            "两只狗在草地上奔跑，一个孩子在旁边看。",
            "两只狗在草地上跑步，一个孩子在旁边看。",
            "zh",
        ),
        ("两只狗 run in Beijing 的草地上奔跑。", "两只狗 run in 北京 的草地上奔跑。", "zh"),
        (
            "二匹の犬が芝生の上を走っています。",
            "二匹の犬が芝の上を走っている。",
            "ja-mecab",
        ),
        (
            "두 마리의 개가 잔디밭에서 달리고 있다.",
            "두 마리 개가 잔디밭에서 달린다.",
            "ko-mecab",
        ),
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
    assert scores["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu([hypothesis], [[reference]], tokenize=tokenize).score
    )
    assert f"tok:{tokenize}" in scores["bleu_signature"]


# What is given


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["a"] * 1000, ["a"] * 999, "1000 hypotheses, but 999 references: each needs one"),
        (["a"] * 2, ["a"] * 3, "2 hypotheses, but 3 references"),
        ([], [], "hypotheses.*nothing to score"),
        ("a text", ["a text"], "hypotheses: .*not one string"),
        (["a", None], ["a", "b"], "hypotheses: line 2 is None, not a string"),
        (["a"], [["a"], [7]], "references: line 1 is 7, not a string"),
        (["a"], [7], "references: line 1 is 7, not a string"),
        ({"a": ["b"]}, ["b"], "hypotheses: .*not a dict"),
        (["b"], {"a": ["b"]}, "references: .*not a dict"),
        (["b"], [{"a": ["b"]}], "references: .*not a dict"),
    ],
)
def test_invalid_texts_are_refused(hypotheses, references, message):
    with pytest.raises(UserError, match=f"^{message}"):
        score_translations(hypotheses, references)


@pytest.mark.parametrize("items", [1, 3])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("sources", lambda items: {"sources": ["a"] * items}),
        ("n_best", lambda items: {"n_best": [["a"]] * items}),
        ("labels", lambda items: {"groups": Groups(["x"] * items, False)}),
    ],
)
def test_lists_that_lack_an_item_or_have_one_more_are_refused(name, given, items):
    with pytest.raises(UserError, match=f"2 hypotheses, but {items} {name}"):
        score_translations(["a", "b"], ["a", "b"], **given(items))


@pytest.mark.parametrize("lists", [["a"], [["a", None]]])
def test_list_of_a_sentence_has_texts(lists):
    assert error_of(score_translations, ["a"], ["a"], metrics=["top_k"], n_best=lists).startswith(
        "n_best: "
    )


@pytest.mark.parametrize("kind", [tuple, iter, np.array, pandas.Series])
def test_texts_are_of_any_kind_of_list(kind):
    texts = ["a b", "c d"]
    others = ["f", "g"]
    assert text_list(kind(texts), "texts") == texts
    assert reference_lists(kind(texts)) == [texts]
    assert reference_lists([kind(texts), kind(others)]) == [texts, others]


def test_no_references_are_one_empty_list():
    assert reference_lists([]) == [[]]


@pytest.mark.parametrize(
    "given",
    [Texts(["a"], [["a"]]), Groups(["a"], False), Scorer({})],
    ids=lambda each: type(each).__name__,
)
def test_what_is_scored_cannot_be_changed(given):
    (field, *_) = vars(given)
    with pytest.raises(FrozenInstanceError):
        setattr(given, field, None)


def test_selected_texts_keep_what_there_is():
    texts = Texts(
        ["a", "b", "c"],
        [["d", "e", "f"], ["g", "h", "i"]],
        ["j", "k", "l"],
        [["a"], ["b", "x"], ["c"]],
    )
    expected = Texts(["c", "b"], [["f", "e"], ["i", "h"]], ["l", "k"], [["c"], ["b", "x"]])
    assert texts.select([2, 1]) == expected
    assert Texts(["a", "b"], [["c", "d"]]).select([1]) == Texts(["b"], [["d"]], None, None)


def test_shorter_lists_are_filled_up_with_what_equals_nothing():
    assert longest([]) == 0
    assert longest([["a"], ["b", "c"]]) == 2
    assert of_equal_length([["a"], ["b", "c"]], 2) == [["a", "\uffff"], ["b", "c"]]


# Metrics by name


def test_metrics_have_the_names_that_are_given():
    of_user = FunctionMetric("m:f", lambda *_: [1.0])
    assert make_metrics(["chrf", of_user]).keys() == {"chrf", "m:f"}
    mapping = {"mine": of_user}
    made = make_metrics(mapping)
    assert made == mapping
    assert made is not mapping


@pytest.mark.parametrize("name", TITLES)
def test_metric_of_a_name_has_the_options(name):
    plain = make_metrics([name])[name]
    (made,) = make_metrics([name], "none", True, list).values()
    assert (plain.key, plain.lowercase, made.lowercase) == (name, False, True)
    if isinstance(made, Bleu):
        assert (plain.tokenize, made.tokenize) == (None, "none")
    if type(made) is TokenErrorRate:
        assert (plain.split, made.split) == (None, list)


def test_function_of_a_module_is_a_metric(own_modules):
    (own_modules / "my_scores.py").write_text(
        "def ones(sources, hypotheses, references):\n    return [1, 3]\n"
    )
    scores = score_translations(["a", "b"], ["a", "b"], metrics=["my_scores:ones"])
    assert scores["my_scores:ones"] == 2
    assert "metrics" in error_of(make_metrics, ["my_scores:twos"])


def test_metric_of_a_folder_joins_the_built_in_ones(length_metric):
    scores = score_translations(["abc", "d"], ["abc", "e"], metrics=["chrf", length_metric])
    assert scores["length_longest"] == 3
    assert scores["length_shortest"] == 1
    assert scores["exact_match"] == 50
    assert "length_all" not in scores
    names = score_names(make_metrics(["chrf", length_metric]))
    assert names == ["chrf", "length_longest", "length_shortest", "exact_match"]


def test_names_of_scores_are_known_before_they_are_computed():
    metrics = make_metrics(["exact_match", "top_k", "bleu"])
    assert score_names(metrics) == [
        "exact_match",
        "top_1",
        "top_3",
        "top_5",
        "top_10",
        "top_50",
        "bleu",
    ]


def test_metric_that_cannot_be_loaded_is_a_one_line_error(length_metric, tmp_path):
    (tmp_path / "needs.py").write_text("import no_such_package\n", encoding="utf-8")
    for name in ("no-such-metric-anywhere", str(tmp_path / "needs.py")):
        message = error_of(make_metrics, [name])
        assert message.startswith(f"metrics: {name!r}: ")
        assert "built in are bleu, chrf" in message
    assert "did you mean bleu" in error_of(make_metrics, ["bleuu"])


class Given:
    """A metric of `evaluate.load` that returns what it is told, and keeps its inputs."""

    name = "given"

    def __init__(self, results, features=("predictions", "references")):
        self.results = results
        self.features = dict.fromkeys(features)

    def compute(self, **inputs):
        self.inputs = inputs
        if isinstance(self.results, Exception):
            raise self.results
        return self.results


@pytest.mark.parametrize(
    ("name", "results", "scores"),
    [
        ("given", {"given": 1}, {"given": 1.0}),
        ("some/given.py", {"f1": np.float32(0.5), "note": "x"}, {"given": 0.5}),
        ("given", 0.25, {"given": 0.25}),
        ("rouge", {"rouge1": 1, "rougeL": 2.5, "n": [1]}, {"rouge1": 1.0, "rougeL": 2.5}),
        ("given", {"a": 1, "b": 2}, {"given_a": 1.0, "given_b": 2.0}),
        ("m:f", {"m:f": 1.5, "note": "x"}, {"m:f": 1.5}),
    ],
)
def test_numbers_of_a_metric_have_names(name, results, scores):
    found = compute_metric(name, Given(results), Texts(["a"], [["b"]]))
    assert found.scores == scores
    assert found.details == ({"note": "x"} if name == "m:f" else {})


@pytest.mark.parametrize(
    ("name", "columns", "references"),
    [
        ("given", [["a", "b"]], ["a", "b"]),
        ("given", [["a"], ["b"]], [["a", "b"]]),
        ("m:f", [["a"]], [["a"]]),
    ],
)
def test_one_reference_stands_alone_for_a_metric_of_the_library(name, columns, references):
    metric = Given({name: 1})
    compute_metric(name, metric, Texts(["a"] * len(columns[0]), columns))
    assert metric.inputs["references"] == references


def test_metric_gets_sources_and_lists_if_it_needs_them():
    with_sources = Given({}, ("sources", "predictions", "references"))
    texts = Texts(["a"], [["b"]], ["c"], [["a", "d"]])
    plain = {"predictions": ["a"], "references": [["b"]]}
    assert inputs_of("given", Given({}), texts) == plain
    assert inputs_of("given", with_sources, texts) == plain | {"sources": ["c"]}
    assert inputs_of("top_k", Given({}), texts) == plain | {"predictions": [["a", "d"]]}
    without = Texts(["a"], [["b"]])
    assert "given needs the sources" in error_of(inputs_of, "given", with_sources, without)
    assert "n_best" in error_of(inputs_of, "top_k", Given({}), without)
    function = FunctionMetric("m:f", lambda *_: [1.0])
    assert inputs_of("m:f", function, without)["sources"] == [""]


@pytest.mark.parametrize(
    ("name", "error", "raised", "message"),
    [
        ("given", ValueError("two\nlines"), UserError, "^metrics: given: two lines$"),
        ("given", UserError("as it is"), UserError, "^as it is$"),
        ("bleu", ValueError("of this package"), ValueError, "^of this package$"),
        ("given", KeyError("other"), KeyError, "other"),
    ],
)
def test_refusal_of_a_metric_names_it(name, error, raised, message):
    with pytest.raises(raised, match=message) as caught:
        compute_metric(name, Given(error), Texts(["a"], [["b"]]))
    assert type(caught.value) is raised


def test_built_in_metrics_are_computed_without_a_table():
    metric = make_metrics(["chrf"])["chrf"]
    metric.compute = None
    assert compute_metric("chrf", metric, Texts(["a"], [["a"]])).scores == {"chrf": 100}


# Invalid texts


def upper_or_invalid(text):
    if text == "raise":
        raise RuntimeError("no text")
    return None if text == "none" else text.upper()


@pytest.mark.parametrize(
    ("hypotheses", "references", "lists", "exact_match", "top_1", "invalid"),
    [
        (
            ["a", "none", "raise", "B"],
            ["A", "none", "x", "b"],
            [["a"], ["none"], ["raise"], ["B"]],
            50,
            50,
            50,
        ),
        # an invalid hypothesis does not equal an empty reference
        (
            ["none", "raise", ""],
            ["", "a", ""],
            [["none"], ["none", "a"], ["none", ""]],
            100 / 3,
            0,
            200 / 3,
        ),
    ],
)
def test_invalid_texts_are_counted_and_equal_nothing(
    hypotheses, references, lists, exact_match, top_1, invalid
):
    scores = score_translations(
        hypotheses,
        references,
        metrics=["top_k"],
        n_best=lists,
        normalize=upper_or_invalid,
    )
    assert scores["exact_match"] == pytest.approx(exact_match)
    assert scores["invalid"] == pytest.approx(invalid)
    assert scores["top_1"] == top_1


@pytest.mark.parametrize(
    ("texts", "top_1", "top_3"),
    [
        (["x", "x", "c"], 0, 100),
        (["x", "x", "x"], 0, 0),
        (["c"], 100, None),
        (["x", "X", "c"], 0, 100),
    ],
)
def test_equal_texts_are_one_place_of_a_list(texts, top_1, top_3):
    scores = score_translations(
        ["x"], ["c"], metrics=["top_k"], n_best=[texts], normalize=str.lower
    )
    assert scores["top_1"] == top_1
    assert scores.get("top_3") == top_3


@pytest.mark.parametrize("form", [5, True, b"text", ["text"], object()])
def test_normaliser_that_returns_no_text_is_refused(form):
    with pytest.raises(UserError, match="^normalize: it returned .*, neither a text nor None$"):
        score_translations(["a"], ["a"], normalize=lambda text: form)


# Groups


GROUPS = ["x", "y", "x"]


def test_groups_have_their_rows_in_the_order_of_the_first():
    assert Groups(["b", "a", "b"], True).rows() == {"b": [0, 2], "a": [1]}


@pytest.mark.parametrize(("mean", "exact_match"), [(False, 200 / 3), (True, (50 + 100) / 2)])
def test_groups_are_scored_apart(mean, exact_match):
    hypotheses = ["a b c d e", "f g h i", "x"]
    references = ["a b c d e", "f g h i", "k l"]
    scores = score_translations(hypotheses, references, groups=Groups(GROUPS, mean))
    assert scores["exact_match"] == pytest.approx(exact_match)
    assert (scores["exact_match_x"], scores["exact_match_y"]) == (50, 100)
    of_x = sacrebleu.corpus_bleu(["a b c d e", "x"], [["a b c d e", "k l"]]).score
    assert scores["bleu_x"] == of_x
    whole = sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert scores["bleu"] == pytest.approx((of_x + 100) / 2 if mean else whole)
    assert scores["sentences"] == 3
    assert ("precisions" in scores) is not mean  # a mean of corpora has none


def test_mean_has_the_signatures_of_all_groups_and_their_common_scores():
    references = ["两只狗在草地上奔跑", "a dog", "两只狗"]
    lists = [["x", "y", "z"], ["x"], ["x"]]
    scores = score_translations(
        references,
        references,
        metrics=["bleu", "chrf", "top_k"],
        n_best=lists,
        groups=Groups(GROUPS, True),
    )
    first, second = scores["bleu_signature"].split("; ")
    assert "tok:zh" in first
    assert "tok:13a" in second
    assert ";" not in scores["chrf_signature"]
    assert {"top_1", "top_3", "top_3_x", "top_3_y"} <= scores.keys()
    apart = (
        Scorer.of(["top_k"])
        .score(Texts(references, [references], None, lists), Groups(GROUPS, True))
        .scores
    )
    assert "top_3_x" in apart
    assert not apart.keys() & {"top_3", "top_3_y"}


@pytest.mark.parametrize(
    ("options", "names"),
    [({}, {"bleu", "chrf"}), ({"metrics": ["ter", "exact_match"]}, {"ter"})],
)
def test_signatures_are_known_before_a_translation(options, names):
    signatures = signatures_of(REFERENCES, options)
    assert signatures.keys() == {f"{name}_signature" for name in names}
    scores = score_translations(HYPOTHESES, REFERENCES, **options)
    assert all(scores[name] == signature for name, signature in signatures.items())


def test_signatures_have_the_options_of_the_scores():
    options = {"tokenize": "char", "lowercase": True}
    groups = Groups(GROUPS, True)
    signatures = signatures_of(REFERENCES, options, groups)
    assert re.search(r"case:lc.*tok:char", signatures["bleu_signature"])
    assert "case:mixed" in signatures_of(REFERENCES, {})["bleu_signature"]
    references = ["两只狗在草地上奔跑", "a dog", "两只狗"]
    assert ";" in signatures_of(references, {}, groups)["bleu_signature"]


@pytest.mark.parametrize(
    ("size", "options", "rows"),
    [
        (0, {}, []),
        (3, {}, [0, 1, 2]),
        (10, {}, [0, 2, 4, 6, 8]),
        (11, {}, [0, 2, 4, 6, 8]),
        (11, {"count": 3}, [0, 3, 7]),
    ],
)
def test_examples_are_at_even_distances(size, options, rows):
    texts = [
        [f"{side}{row}" for row in range(size)] for side in ("source ", "reference ", "hypothesis ")
    ]
    assert example_translations(*texts, **options) == [
        [side[row] for side in texts] for row in rows
    ]
