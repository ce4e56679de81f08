"""Comparison of systems: sacreBLEU's own command is the judge of scores, intervals and p-values."""

import itertools
import operator
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from random import Random

import jiwer
import numpy as np
import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from hf_vanilla_transformer.evaluation import (
    compare_systems,
    comparison,
    score_translations,
)
from hf_vanilla_transformer.evaluation.comparison import (
    largest_differences,
    length_labels,
    scores_by_group,
)
from hf_vanilla_transformer.evaluation.metric_classes import FunctionMetric
from hf_vanilla_transformer.evaluation.metrics import Groups, make_metrics
from hf_vanilla_transformer.text.perturbations import PERTURBATIONS, perturb_all, perturb_test_set
from tests.model_helpers import error_of

WORDS = [
    "ein",
    "kleiner",
    "großer",
    "Hund",
    "läuft",
    "springt",
    "über",
    "die",
    "Straße",
    "und",
    "bellt",
    "laut",
    ".",
]
SAMPLES = comparison.SAMPLES
TRIALS = comparison.TRIALS


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    monkeypatch.setattr(comparison, "SAMPLES", 200)
    monkeypatch.setattr(comparison, "TRIALS", 200)


def corrupted(text, share, draw):
    return " ".join(draw.choice(WORDS) if draw.random() < share else word for word in text.split())


@pytest.fixture(scope="module")
def texts():
    """References, others, and three systems, of which the second is better and the third as good as the first."""
    draw = Random(1)
    references = [" ".join(draw.choices(WORDS, k=draw.randint(4, 25))) for _ in range(40)]
    second = [corrupted(text, 0.2, draw) for text in references]
    systems = {
        f"system {share}": [corrupted(text, share, draw) for text in references]
        for share in (0.4, 0.3, 0.41)
    }
    return references, second, systems


# Significance


def printed_scores(folder, names, kind):
    """The rows of sacreBLEU's command: for each system the cells of BLEU and chrF."""
    arguments = [
        sys.executable,
        "-m",
        "sacrebleu",
        "r1",
        "r2",
        "-i",
        *names,
        "-m",
        "bleu",
        "chrf",
    ]
    arguments += [f"--paired-{kind}", f"--paired-{kind}-n", "200", "-w", "6", "-f", "latex"]
    printed = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    rows = [
        line.split("&")[1:] for line in printed.splitlines() if "system-" in line and "&" in line
    ]
    return [[list(map(float, re.findall(r"\d+\.\d+", cell))) for cell in cells] for cells in rows]


def test_scores_and_p_values_are_those_of_sacrebleu(tmp_path, texts):
    references, second, systems = texts
    names = [name.replace(" ", "-") for name in systems]
    for name, lines in zip(
        ["r1", "r2", *names], [references, second, *systems.values()], strict=True
    ):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    compared = compare_systems(systems, [references, second])
    kinds = {
        "bs": ("score", "mean", "interval", "p_bootstrap"),
        "ar": ("score", "p_randomization"),
    }
    for kind, fields in kinds.items():
        rows = printed_scores(tmp_path, names, kind)
        for cells, results in zip(rows, compared["systems"].values(), strict=True):
            for numbers, result in zip(cells, results.values(), strict=True):
                expected = [result[name] for name in fields if name in result]
                assert numbers == pytest.approx(expected, abs=5.1e-5)
    assert list(compared["signatures"]) == ["bleu", "chrf"]
    assert compared["signatures"]["bleu"].startswith("BLEU|nrefs:2|")
    assert compared["signatures"]["chrf"].startswith("chrF2|nrefs:2|")


def test_numbers_of_samples_are_those_of_sacrebleu():
    plain = [("a", ["a b"])], {"": sacrebleu.CHRF()}, [["a b"]]
    assert PairedTest(*plain, test_type="bs").n_samples == SAMPLES
    assert PairedTest(*plain, test_type="ar").n_samples == TRIALS


EXACT_SYSTEMS = {
    "equal": ([1, 0, 2, 5, 3, 3], [1, 0, 2, 5, 3, 3]),
    "one of six": ([1, 0, 2, 5, 3, 3], [1, 0, 2, 5, 3, 4]),
    "one less": ([0.1] * 9 + [0.3], [0.1] * 9 + [0.2]),
    "rounded": ([0.1, 0.2, 0.3, 0.4, 0.7, 0.9], [0.3, 0.4, 0.5, 0.6, 0.9, 0.8]),
    "two ways": ([3, 1, 4, 1, 5, 9, 2, 6], [4, 1, 2, 1, 6, 9, 3, 8]),
    "better": (list(range(10)), list(range(1, 11))),
    "zero": ([0] * 4, [0] * 4),
}


@pytest.mark.parametrize("name", EXACT_SYSTEMS)
def test_p_value_is_the_share_of_all_exchanges(monkeypatch, name):
    """The truth is the permutation test over all 2^n exchanges of the two outputs of a sentence."""
    monkeypatch.setattr(comparison, "TRIALS", 4000)
    first, second = EXACT_SYSTEMS[name]
    differences = [Fraction(str(b)) - Fraction(str(a)) for a, b in zip(first, second, strict=True)]
    sums = [
        abs(sum(map(operator.mul, signs, differences)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    exact = sum(each >= abs(sum(differences)) for each in sums) / len(sums)
    systems = {"a": list(map(str, first)), "b": list(map(str, second))}
    metric = FunctionMetric("m:value", lambda _, texts, __: list(map(float, texts)))
    compared = compare_systems(systems, systems["a"], metrics=[metric])["systems"]["b"]["m:value"]
    assert compared["p_randomization"] == pytest.approx(exact, abs=0.03)
    if exact == 1:
        assert compared["p_randomization"] == 1


@pytest.mark.parametrize("metric", ["bleu", "chrf", "ter", "exact_match", "token_error_rate"])
def test_equal_systems_do_not_differ(texts, metric):
    """A system does not differ from itself, nor by one sentence, which any exchange leaves as different as it is."""
    references, _, systems = texts
    outputs = systems["system 0.3"]
    row = next(row for row, text in enumerate(outputs) if text != references[row])
    other = [*outputs[:row], references[row], *outputs[row + 1 :]]
    compared = compare_systems(
        {"a": outputs, "same": outputs, "other": other}, references, metrics=[metric]
    )["systems"]
    same, other = compared["same"][metric], compared["other"][metric]
    assert same["p_bootstrap"] == same["p_randomization"] == other["p_randomization"] == 1
    assert other["score"] != compared["a"][metric]["score"] == same["score"]


def test_options_reach_the_scores():
    systems = {"one": ["A b c d e"], "two": ["a b c d x"]}
    names = ["bleu", "chrf", "exact_match"]
    compared = compare_systems(
        systems, ["a b c d e"], metrics=names, tokenize="char", lowercase=True
    )
    assert compared["systems"]["one"]["exact_match"]["score"] == 100
    assert re.search("case:lc.*tok:char", compared["signatures"]["bleu"])
    plain = compare_systems(systems, ["a b c d e"], metrics=names)
    assert plain["systems"]["one"]["exact_match"]["score"] == 0
    assert re.search("case:mixed.*tok:13a", plain["signatures"]["bleu"])
    upper = compare_systems(systems, ["a b c d e"], metrics=names, normalize=str.upper)
    assert upper["systems"]["one"]["bleu"]["score"] == pytest.approx(100)


def test_metric_of_ones_own_is_tested_like_the_others(texts):
    references, _, systems = texts

    def overlap(sources, hypotheses, references):
        assert sources == references  # what the caller passed as sources
        pairs = zip(hypotheses, references, strict=True)
        return [sum(map(str.__eq__, h.split(), r.split())) / len(r.split()) for h, r in pairs]

    metrics = [FunctionMetric("m:overlap", overlap)]
    compared = compare_systems(systems, references, sources=references, metrics=metrics)
    baseline, better, equal = (each["m:overlap"] for each in compared["systems"].values())
    assert baseline["score"] == pytest.approx(
        np.mean(overlap(references, systems["system 0.4"], references))
    )
    assert "p_bootstrap" not in baseline
    assert max(better["p_bootstrap"], better["p_randomization"]) < 0.05
    assert min(equal["p_bootstrap"], equal["p_randomization"]) > 0.05
    assert compared["signatures"]["m:overlap"].startswith("m:overlap|nrefs:1|")


def test_numbers_that_are_undefined_are_refused(texts):
    """Comparisons with NaN would find every difference significant."""
    references, _, systems = texts
    undefined = FunctionMetric("m:nan", lambda _, texts, __: [float("nan")] * len(texts))
    assert error_of(compare_systems, systems, references, metrics=[undefined]).startswith(
        "m:nan: it returned nan"
    )


def test_comet_of_the_guide_scores_each_sentence(texts, tmp_path, in_tmp_path):
    guide = (Path(__file__).parents[2] / "scripts" / "docs" / "your_data.md").read_text(
        encoding="utf-8"
    )
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", guide, re.S) if "comet" in block
    )
    # a stand-in for unbabel-comet 2.2.7 in its environment, which prints before the scores as the real one does
    (tmp_path / "comet.py").write_text(
        "class Model:\n"
        "    def predict(self, samples, batch_size=16, gpus=1, progress_bar=True):\n"
        "        from types import SimpleNamespace\n"
        "        return SimpleNamespace(scores=[float(row['mt'] == row['ref'] != row['src']) for row in samples])\n"
        "def download_model(name):\n    print('downloading', name)\n    return name\n"
        "def load_from_checkpoint(path):\n    return Model()\n"
    )
    python = tmp_path / "comet-env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "comet_metric.py").write_text(code, encoding="utf-8")
    references, _, systems = texts
    metrics = make_metrics(["bleu", "comet_metric:scores"])
    compared = compare_systems(
        systems, references, sources=["x"] * len(references), metrics=metrics
    )["systems"]
    for name, hypotheses in systems.items():
        equal = np.mean([a == b for a, b in zip(hypotheses, references, strict=True)])
        assert compared[name]["comet_metric:scores"]["score"] == pytest.approx(equal)
        assert "bleu" in compared[name]


def test_metric_without_scores_of_sentences_has_no_interval(length_metric):
    systems = {"one": ["abc", "d"], "two": ["abcd", "d"]}
    compared = compare_systems(systems, ["a", "b"], metrics=[length_metric])
    assert compared["systems"] == {
        "one": {"length_longest": {"score": 3}, "length_shortest": {"score": 1}},
        "two": {"length_longest": {"score": 4}, "length_shortest": {"score": 1}},
    }
    assert compared["signatures"] == dict.fromkeys(
        ["length_longest", "length_shortest"], length_metric
    )


def test_rates_are_compared_by_their_sums(texts):
    """An error rate is the ratio of two sums, and its interval that of resampled sums."""
    references, _, systems = texts
    compared = compare_systems(systems, references, metrics=["token_error_rate"])["systems"]
    for name, hypotheses in systems.items():
        expected = 100 * jiwer.wer(references, hypotheses)
        assert compared[name]["token_error_rate"]["score"] == pytest.approx(expected, abs=1e-9)
    baseline, better, equal = (each["token_error_rate"] for each in compared.values())
    assert max(better["p_bootstrap"], better["p_randomization"]) < 0.05
    assert min(equal["p_bootstrap"], equal["p_randomization"]) > 0.05
    assert abs(baseline["mean"] - baseline["score"]) < baseline["interval"]


def test_lists_are_compared_as_single_outputs_are(texts):
    """The first of a list is right exactly if it equals a reference."""
    references, _, systems = texts
    outputs = {
        name: [reference if row % place else text for row, (text, reference) in enumerate(pairs)]
        for place, (name, each) in enumerate(systems.items(), start=2)
        for pairs in [zip(each, references, strict=True)]
    }
    lists = {name: [[text, "x", text] for text in each] for name, each in outputs.items()}
    compared = compare_systems(outputs, references, metrics=["top_k", "exact_match"], n_best=lists)
    for results in compared["systems"].values():
        assert results["top_1"] == results["exact_match"] == results["top_3"]
    assert "p_bootstrap" in results["top_1"]
    assert compared["signatures"].keys() == {"top_1", "top_3", "exact_match"}
    upper = {
        name: [[text.upper() for text in each] for each in of_system]
        for name, of_system in lists.items()
    }
    normalized = compare_systems(
        outputs, references, metrics=["top_k"], n_best=upper, normalize=str.casefold
    )
    scores = [each["systems"]["system 0.4"]["top_1"]["score"] for each in (normalized, compared)]
    assert scores[0] >= scores[1] > 0


def test_systems_of_other_lengths_are_refused(texts):
    references, _, systems = texts
    message = error_of(compare_systems, systems | {"short": references[1:]}, references)
    assert message.startswith("39 hypotheses, but 40 references")
    assert error_of(compare_systems, {"one": ["a", None]}, ["a", "b"]).startswith(
        "systems: line 2 is None"
    )


# Groups


@pytest.mark.parametrize(
    ("count", "label"),
    [
        (1, "1–10 words"),
        (10, "1–10 words"),
        (11, "11–20 words"),
        (20, "11–20 words"),
        (21, "21–30 words"),
        (30, "21–30 words"),
        (31, "31–50 words"),
        (50, "31–50 words"),
        (51, "over 50 words"),
    ],
)
def test_text_has_the_group_of_its_length(count, label):
    assert length_labels(["a " * count]) == [label]


def test_groups_are_scored_apart(texts):
    references, second, systems = texts
    labels = length_labels(references)
    groups = scores_by_group(systems, [references, second], labels)
    assert list(groups) == list(dict.fromkeys(labels))
    assert {label: group["sentences"] for label, group in groups.items()} == {
        label: labels.count(label) for label in labels
    }
    rows = [row for row, label in enumerate(labels) if label == "11–20 words"]
    hypotheses, *chosen = [
        [texts[row] for row in rows] for texts in (systems["system 0.3"], references, second)
    ]
    group = groups["11–20 words"]
    assert group.keys() == {"sentences", "signatures", "systems"}
    assert list(group["systems"]) == list(systems)
    assert group["systems"]["system 0.3"] == {
        "bleu": sacrebleu.corpus_bleu(hypotheses, chosen).score,
        "chrf": sacrebleu.corpus_chrf(hypotheses, chosen).score,
    }
    assert group["signatures"].keys() == {"bleu", "chrf"}
    assert "39 hypotheses, but 40 references" in error_of(
        scores_by_group, {"a": references[1:]}, references, labels[1:]
    )
    assert "40 hypotheses, but 39 labels" in error_of(
        scores_by_group, systems, references, labels[1:]
    )


def test_options_reach_the_scores_of_groups():
    systems = {"one": ["A b", "c d"]}
    arguments = systems, ["a b", "c d"], ["x", "y"]
    plain = scores_by_group(*arguments, metrics=["exact_match"])
    assert plain["x"]["systems"]["one"] == {"exact_match": 0}
    for options in ({"lowercase": True}, {"normalize": str.lower}):
        groups = scores_by_group(*arguments, metrics=["exact_match"], **options)
        assert groups["x"]["systems"]["one"] == {"exact_match": 100}
    of_characters = scores_by_group(*arguments, tokenize="char")
    assert "tok:char" in of_characters["y"]["signatures"]["bleu"]
    given = FunctionMetric(
        "m:f", lambda sources, hypotheses, _: [float(sources == ["t"])] * len(hypotheses)
    )
    scored = scores_by_group(*arguments, metrics=[given], sources=["s", "t"])
    assert [scored[label]["systems"]["one"]["m:f"] for label in "xy"] == [0, 1]


def test_each_group_has_the_tokenizer_of_its_language(texts):
    """The Chinese sentences are the fewer ones and come last, so that a tokenizer of the whole table would be 13a."""
    german, _, systems = texts
    chinese = [
        "一个男人在公园里遛狗，旁边有两个孩子。",
        "两只狗在雪地里奔跑，天气很冷。",
    ] * 4
    thai = ["ผู้ชายในสวน", "สุนัขวิ่งบนถนนสายยาว"] * 4
    references = [*german, *chinese, *thai]
    changed = [
        *systems["system 0.3"],
        *(text.replace("在", "正在") for text in chinese),
        *thai,
    ]
    labels = ["de"] * len(german) + ["zh"] * 8 + ["th"] * 8
    groups = scores_by_group({"a": changed}, references, labels)
    apart = score_translations(changed, references, groups=Groups(labels, True))
    for label, tokenize in (("de", "13a"), ("zh", "zh"), ("th", "char")):
        rows = [row for row, each in enumerate(labels) if each == label]
        hypotheses, chosen = ([texts[row] for row in rows] for texts in (changed, references))
        expected = sacrebleu.corpus_bleu(hypotheses, [chosen], tokenize=tokenize).score
        assert (
            groups[label]["systems"]["a"]["bleu"]
            == apart[f"bleu_{label}"]
            == pytest.approx(expected, abs=1e-9)
        )
        assert f"tok:{tokenize}" in groups[label]["signatures"]["bleu"]


def test_lists_of_unequal_lengths_have_the_top_of_the_longest():
    lists = {"one": [["x", "a"], ["b"], ["x", "x", "c"]], "two": [["x"], ["x"], ["c"]]}
    hypotheses = {name: [texts[0] for texts in each] for name, each in lists.items()}
    groups = scores_by_group(
        hypotheses, ["a", "b", "c"], ["l", "m", "l"], metrics=["top_k"], n_best=lists
    )
    assert groups["l"]["systems"]["one"] == {"top_1": 0, "top_3": 100}
    assert groups["m"]["systems"]["one"] == {"top_1": 100, "top_3": 100}
    assert groups["l"]["systems"]["two"] == {"top_1": 50, "top_3": 50}
    assert groups["m"]["systems"]["two"] == {"top_1": 0, "top_3": 0}


# Differences


def test_largest_differences_are_those_of_chrf(texts):
    references, second, systems = texts
    differences = largest_differences(systems, [references, second])
    assert [each["system"] for each in differences] == ["system 0.3"] * 10 + ["system 0.41"] * 10
    values = [each["difference"] for each in differences[:10]]
    assert values == sorted(values, reverse=True)
    assert values[4] > 0 > values[5]
    baseline = systems["system 0.4"]
    other = systems["system 0.3"]

    def score(text, row):
        return sacrebleu.sentence_chrf(text, [references[row], second[row]]).score

    expected = sorted(score(other[row], row) - score(baseline[row], row) for row in range(40))
    assert values == pytest.approx(expected[:-6:-1] + expected[4::-1])
    best = differences[0]
    row = best["line"] - 1
    assert best == {
        "system": "system 0.3",
        "line": row + 1,
        "reference": references[row],
        "baseline": baseline[row],
        "hypothesis": other[row],
        "difference": pytest.approx(score(other[row], row) - score(baseline[row], row)),
    }


SEQUENCES = ["abcd", "efgh", "", "ijkl"]
SYSTEMS = {"one": ["abcx", "efgh", "y", "ijkl"], "two": ["abcd", "exxh", "", "ijkl"]}


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [(3, 100), (2, -50)]),  # an edit where no character is
        (2, [(3, 100), (1, 25), (2, -50)]),  # but not the line without a difference
        (9, [(3, 100), (1, 25), (2, -50)]),
    ],
)
def test_differences_of_sequences_are_those_of_the_error_rate(count, expected):
    sources = ["s", "t", "u", "v"]
    found = largest_differences(SYSTEMS, SEQUENCES, sources, count, "sequence")
    assert [(each["line"], each["difference"]) for each in found] == expected
    assert [each["source"] for each in found] == [sources[line - 1] for line, _ in expected]


def test_differences_need_a_reference_for_each_hypothesis():
    with pytest.raises(ValueError):
        largest_differences({"one": ["a"], "two": ["b"]}, ["a", "b"])


# Perturbed text


PAIRS = [
    ("Look at www.x.org {name} now.", "Sieh jetzt auf www.x.org {name} nach."),
    ("two dogs", "zwei Hunde"),
]
PERTURBED = {
    "upper": ("TWO DOGS", "ZWEI HUNDE"),
    "title": ("Two Dogs", "Zwei Hunde"),
    "end_punctuation": ("two dogs.", "zwei Hunde."),
    "merge": (f"two dogs {PAIRS[0][0]}", f"zwei Hunde {PAIRS[0][1]}"),
    "copy": ("zwei Hunde", "zwei Hunde"),
}


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_perturbations_are_drawn_once_and_keep_addresses(name):
    perturbed = perturb_all(name, PAIRS * 20)
    assert perturbed == perturb_all(name, PAIRS * 20)
    assert perturbed != PAIRS * 20
    assert all("www.x.org {name}" in text for pair in perturbed[::2] for text in pair)
    assert perturbed[1] == PERTURBED.get(name, perturbed[1])


def test_typos_are_of_the_source():
    assert {target for _, target in perturb_all("typos", PAIRS * 20)} == {
        target for _, target in PAIRS
    }


def test_noise_is_the_same_on_both_sides():
    for source, target in perturb_all("noise", PAIRS * 20)[1::2]:
        assert set(source.split()) - {"two", "dogs"} == set(target.split()) - {
            "zwei",
            "Hunde",
        }


OTHER_REFERENCES = ["Schau nun auf www.x.org {name}!", "2 Hunde"]


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_all_references_are_perturbed_alike(name):
    sources, first = map(list, zip(*PAIRS, strict=True))
    perturbed, columns = perturb_test_set(name, sources, [first, OTHER_REFERENCES])
    assert list(zip(perturbed, columns[0], strict=True)) == perturb_all(name, PAIRS)
    _, [alone] = perturb_test_set(name, sources, [OTHER_REFERENCES])
    assert columns[1] == alone


def test_reference_of_another_source_stays():
    """Without a mark in the first reference, the source keeps its own, and so do the others."""
    sources, columns = perturb_test_set("end_punctuation", ["A dog."], [["Ein Hund"], ["Hund."]])
    assert (sources, columns) == (["A dog."], [["Ein Hund"], ["Hund."]])
