"""Comparison of systems: sacreBLEU's own command is the judge of scores, intervals and p-values."""

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import jiwer
import numpy as np
import pytest
import sacrebleu

from hf_vanilla_transformer.evaluation import compare_systems, comparison, score_translations
from hf_vanilla_transformer.evaluation.comparison import largest_differences, length_labels, scores_by_group
from hf_vanilla_transformer.evaluation.metric_classes import FunctionMetric
from hf_vanilla_transformer.evaluation.metrics import Groups, make_metrics
from hf_vanilla_transformer.evaluation.score_tables import comparison_table, group_signatures, group_table, render
from hf_vanilla_transformer.text.perturbations import PERTURBATIONS, perturb_all
from hf_vanilla_transformer.utils.errors import UserError

WORDS = ["ein", "kleiner", "großer", "Hund", "läuft", "springt", "über", "die", "Straße", "und", "bellt", "laut", "."]


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    monkeypatch.setattr(comparison, "SAMPLES", 200)
    monkeypatch.setattr(comparison, "TRIALS", 200)


def corrupted(text, share, draw):
    return " ".join(draw.choice(WORDS) if draw.random() < share else word for word in text.split())


@pytest.fixture(scope="module")
def texts():
    draw = Random(1)
    references = [" ".join(draw.choices(WORDS, k=draw.randint(4, 25))) for _ in range(40)]
    second = [corrupted(text, 0.2, draw) for text in references]
    systems = {f"system {share}": [corrupted(text, share, draw) for text in references] for share in (0.4, 0.3, 0.41)}
    return references, second, systems


def test_scores_and_p_values_are_those_of_sacrebleu(tmp_path, texts):
    references, second, systems = texts
    files = {"r1": references, "r2": second} | {name.replace(" ", "-"): lines for name, lines in systems.items()}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    compared = compare_systems(systems, [references, second])["systems"].values()
    for kind in ("bs", "ar"):
        test = [f"--paired-{kind}", f"--paired-{kind}-n", "200", "-w", "6", "-f", "latex"]
        arguments = [
            sys.executable,
            "-m",
            "sacrebleu",
            "r1",
            "r2",
            "-i",
            *list(files)[2:],
            "-m",
            "bleu",
            "chrf",
            *test,
        ]
        printed = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        rows = [line.split("&")[1:] for line in printed.splitlines() if "system-" in line and "&" in line]
        for cells, results in zip(rows, compared, strict=True):
            for cell, result in zip(cells, results.values(), strict=True):
                numbers = [float(number) for number in re.findall(r"\d+\.\d+", cell)]
                names = ("score", "mean", "interval", "p_bootstrap") if kind == "bs" else ("score", "p_randomization")
                assert numbers == [pytest.approx(result[name], abs=5.1e-5) for name in names if name in result]


def test_several_references_are_those_of_sacrebleu(texts):
    references, second, systems = texts
    hypotheses = systems["system 0.4"]
    scores = score_translations(hypotheses, [references, second], metrics=("bleu", "chrf", "chrf++", "ter"))
    both = [references, second]
    assert scores["bleu"] == sacrebleu.corpus_bleu(hypotheses, both).score and "nrefs:2" in scores["bleu_signature"]
    assert scores["chrf++"] == sacrebleu.corpus_chrf(hypotheses, both, word_order=2).score
    assert scores["ter"] == sacrebleu.corpus_ter(hypotheses, both).score
    assert score_translations(["b"], [["a"], ["b"]])["exact_match"] == 100


def test_metric_of_ones_own_is_tested_like_the_others(texts):
    references, _, systems = texts

    def overlap(sources, hypotheses, references):
        assert sources == references  # what the caller passed as sources
        pairs = zip(hypotheses, references, strict=True)
        return [sum(a == b for a, b in zip(h.split(), r.split(), strict=True)) / len(r.split()) for h, r in pairs]

    compared = compare_systems(systems, references, sources=references, metrics=[FunctionMetric("m:overlap", overlap)])
    baseline, better, equal = (each["m:overlap"] for each in compared["systems"].values())
    assert baseline["score"] == pytest.approx(np.mean(overlap(references, systems["system 0.4"], references)))
    assert better["p_bootstrap"] < 0.05 and better["p_randomization"] < 0.05 and "p_bootstrap" not in baseline
    assert equal["p_bootstrap"] > 0.05 and equal["p_randomization"] > 0.05
    with pytest.raises(UserError, match="m:one"):
        compare_systems(systems, references, metrics=[FunctionMetric("m:one", lambda *_: [1.0])])
    # comparisons with NaN would find every difference significant
    undefined = FunctionMetric(
        "m:nan", lambda _, texts, __: [{6: float("nan"), 8: float("inf")}.get(n, 1.0) for n in range(len(texts))]
    )
    with pytest.raises(UserError, match="m:nan: it returned nan for line 7"):
        compare_systems(systems, references, metrics=[undefined])


def test_comet_of_the_guide_scores_each_sentence(texts, tmp_path, in_tmp_path):
    guide = (Path(__file__).parents[2] / "scripts" / "docs" / "your_data.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", guide, re.S) if "comet" in block)
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
    metrics = make_metrics(["bleu", "comet_metric:scores"])
    references, _, systems = texts
    compared = compare_systems(systems, references, sources=["x"] * len(references), metrics=metrics)["systems"]
    for name, hypotheses in systems.items():
        equal = np.mean([a == b for a, b in zip(hypotheses, references, strict=True)])
        assert compared[name]["comet_metric:scores"]["score"] == pytest.approx(equal) and "bleu" in compared[name]


def test_groups_and_differences(texts):
    references, _, systems = texts
    labels = length_labels(references)
    groups = scores_by_group(systems, references, labels)
    assert sum(group["sentences"] for group in groups.values()) == 40
    rows = [row for row, label in enumerate(labels) if label == "11–20 words"]
    chosen = [[texts[row] for row in rows] for texts in (systems["system 0.3"], references)]
    assert groups["11–20 words"]["system 0.3"]["bleu"] == sacrebleu.corpus_bleu(chosen[0], [chosen[1]]).score
    assert length_labels(["a", "a " * 10, "a " * 11, "a " * 50, "a " * 51]) == [
        *("1–10 words", "1–10 words", "11–20 words", "31–50 words", "over 50 words")
    ]
    differences = largest_differences(systems, references, count=3)
    values = [each["difference"] for each in differences if each["system"] == "system 0.3"]
    assert len(values) == 6 and values == sorted(values, reverse=True) and values[0] > 0 > values[-1]
    best = differences[0]
    scores = [sacrebleu.sentence_chrf(best[name], [best["reference"]]).score for name in ("hypothesis", "baseline")]
    assert best["difference"] == pytest.approx(scores[0] - scores[1])
    assert render(group_table("length", groups)).count("\n") == len(groups)


def test_each_group_has_the_tokenizer_of_its_language(texts):
    """The Chinese sentences are the fewer ones and come last, so that a tokenizer of the whole table would be 13a."""
    german, _, systems = texts
    chinese = ["一个男人在公园里遛狗，旁边有两个孩子。", "两只狗在雪地里奔跑，天气很冷。"] * 4
    thai = ["ผู้ชายในสวน", "สุนัขวิ่งบนถนนสายยาว"] * 4
    references = [*german, *chinese, *thai]
    changed = [*systems["system 0.3"], *(text.replace("在", "正在") for text in chinese), *thai]
    labels = ["de"] * len(german) + ["zh"] * 8 + ["th"] * 8
    groups = scores_by_group({"a": changed}, references, labels)
    apart = score_translations(changed, references, groups=Groups(labels, True))
    for label, tokenize in (("de", "13a"), ("zh", "zh"), ("th", "char")):
        rows = [row for row, each in enumerate(labels) if each == label]
        sides = [[texts[row] for row in rows] for texts in (changed, references)]
        expected = sacrebleu.corpus_bleu(sides[0], [sides[1]], tokenize=tokenize).score
        assert groups[label]["a"]["bleu"] == apart[f"bleu_{label}"] == pytest.approx(expected, abs=1e-9)
        assert f"tok:{tokenize}" in groups[label]["signatures"]["bleu"]
    shown = group_signatures(groups)
    assert [line for line in shown if line.startswith("zh: BLEU") and "tok:zh" in line]
    assert [line for line in shown if line.startswith("chrF2|")]  # one for all labels


def test_rates_are_compared_by_their_sums(texts):
    """An error rate is the ratio of two sums, and its interval that of resampled sums."""
    references, _, systems = texts
    compared = compare_systems(systems, references, metrics=["token_error_rate", "exact_match"])["systems"]
    for name, hypotheses in systems.items():
        expected = 100 * jiwer.wer(references, hypotheses)
        assert compared[name]["token_error_rate"]["score"] == pytest.approx(expected, abs=1e-9)
    baseline, better, equal = (each["token_error_rate"] for each in compared.values())
    assert better["p_bootstrap"] < 0.05 < equal["p_bootstrap"] and better["p_randomization"] < 0.05
    assert abs(baseline["mean"] - baseline["score"]) < baseline["interval"]


def test_lists_are_compared_as_single_outputs_are(texts):
    """The first of a list is right exactly if it equals a reference."""
    references, _, systems = texts
    outputs = {
        name: [r if n % (len(name) - 8) else h for n, (h, r) in enumerate(zip(each, references, strict=True))]
        for name, each in systems.items()
    }
    lists = {name: [[text, "x", text] for text in each] for name, each in outputs.items()}
    compared = compare_systems(outputs, references, metrics=["top_k", "exact_match"], n_best=lists)
    for results in compared["systems"].values():
        assert results["top_1"] == results["exact_match"] == results["top_3"]
    assert "p_bootstrap" in results["top_1"] and {"top_1", "top_3"} <= compared["signatures"].keys()
    upper = {name: [[text.upper() for text in each] for each in of_system] for name, of_system in lists.items()}
    normalized = compare_systems(outputs, references, metrics=["top_k"], n_best=upper, normalize=str.casefold)[
        "systems"
    ]
    assert normalized["system 0.4"]["top_1"]["score"] >= compared["systems"]["system 0.4"]["top_1"]["score"]


def test_systems_of_other_lengths_are_refused(texts):
    references, _, systems = texts
    with pytest.raises(UserError, match="39 hypotheses, but 40 references"):
        compare_systems(systems | {"short": references[1:]}, references)


def test_table_has_a_row_for_each_system(texts):
    references, _, systems = texts
    lines = render(comparison_table(compare_systems({"same": references} | systems, references))).splitlines()
    assert (
        lines[0].split() == ["system", "BLEU", "chrF"] and lines[1].startswith("same") and "100.00 ± 0.00" in lines[1]
    )
    assert [line.startswith(name) for line, name in zip(lines[2:], systems, strict=True)] == [True] * len(systems)


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_perturbations_are_drawn_once_and_keep_addresses(name):
    pairs = [("Look at www.x.org {name} now.", "Sieh jetzt auf www.x.org {name} nach."), ("two dogs", "zwei Hunde")]
    perturbed = perturb_all(name, pairs * 20)
    assert perturbed == perturb_all(name, pairs * 20) and perturbed != pairs * 20
    assert all("www.x.org {name}" in source and "www.x.org {name}" in target for source, target in perturbed[::2])
    expected = {
        "upper": ("TWO DOGS", "ZWEI HUNDE"),
        "title": ("Two Dogs", "Zwei Hunde"),
        "end_punctuation": ("two dogs.", "zwei Hunde."),
        "merge": (f"two dogs {pairs[0][0]}", f"zwei Hunde {pairs[0][1]}"),
        "copy": ("zwei Hunde", "zwei Hunde"),
    }
    assert perturbed[1] == expected.get(name, perturbed[1])
    if name == "typos":
        assert {target for _, target in perturbed} == {target for _, target in pairs}
    if name == "noise":
        foreign = [set(source.split()) - {"two", "dogs"} for source, _ in perturbed[1::2]]
        assert all(
            set(target.split()) - {"zwei", "Hunde"} == words
            for words, (_, target) in zip(foreign, perturbed[1::2], strict=True)
        )
