"""The benchmark counts what it says it counts; nobody here looks at a time."""

from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch

from hf_vanilla_transformer.benchmarks import decoding as decoding_benchmark
from hf_vanilla_transformer.benchmarks.decoding import Measurement, cache_bytes, compare
from hf_vanilla_transformer.benchmarks.decoding_report import plot, ratios, report, scaling
from hf_vanilla_transformer.data import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.inference import workers
from hf_vanilla_transformer.inference.translator import Translator
from hf_vanilla_transformer.interop.marian import to_marian
from tests.model_helpers import tiny_model

SENTENCES = ["two hundred", "a dog sleeps .", "thirty-four cats and a dog run , two hundred sleep"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(vocab_size=300, tie_word_embeddings=False, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[2] += 2
    model.save_pretrained(folder)
    save_tokenizers(folder, train_tokenizer(SENTENCES * 3, vocab_size=300))
    return folder


# Engines in this process: what they are asked is what matters here, and starting processes takes seconds.


class InThisProcess:
    """Stands in for a process that holds an engine."""

    def __init__(self, serve: Any, engine: str, folder: str, work: str, device: str, threads: int):
        self.server = decoding_benchmark._Server(engine, folder, work, device)

    def ask(self, what: str, *args: Any) -> Any:
        return getattr(self.server, what)(*args)

    def stop(self) -> None:
        pass


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_benchmark, "Worker", InThisProcess)


@pytest.mark.parametrize("peer", ["marian_fp32", "ctranslate2_fp32", "ours_workers_fp32", "ctranslate2_workers_fp32"])
def test_engines_with_the_same_weights_write_the_same(
    folder: Path, one_process: None, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MIN_SENTENCES", 1)
    if peer.startswith("ctranslate2"):
        pytest.importorskip("ctranslate2")
    engines = ["ours_fp32", peer]
    settings = {"rounds": 2, "orders": ["sorted", "file"], "references": [*SENTENCES[1:], "x"], "tokenize": "none"}
    found = compare(folder, SENTENCES, engines, [1, 2], [1, 3], **settings)
    assert [(one.setting, one.engine) for one in found] == [
        ((order, size, beams), engine)
        for order, size in (("sorted", 1), ("sorted", 2), ("file", 2))
        for beams in (1, 3)
        for engine in engines
    ]
    expected = Translator.from_pretrained(folder, device="cpu")
    for one in found:
        assert (one.sentences, len(one.seconds), one.same_output) == (3, 2, 1.0)
        texts = list(expected.translate(SENTENCES, num_beams=one.num_beams, length_penalty=1.0, batch_size=1))
        assert one.bleu == pytest.approx(sacrebleu.corpus_bleu(texts, [settings["references"]], tokenize="none").score)
        assert one.peak_mib > 50
    assert len({one.target_tokens for one in found if one.num_beams == 3}) == 1


def test_bytes_of_the_caches_are_those_of_their_tensors(folder: Path, one_process: None) -> None:
    sizes = cache_bytes(folder, SENTENCES, ["ours_fp32", "marian_fp32"], beams=8)
    translator = Translator.from_pretrained(folder, device="cpu")
    source = translator.source_tokenizer(SENTENCES, padding=True, return_tensors="pt")
    longest = source["input_ids"].shape[1]
    cache = to_marian(translator.model).generate(
        **source, num_beams=8, length_penalty=1.0, max_new_tokens=longest + 50, return_dict_in_generate=True
    ).past_key_values  # fmt: skip
    layers = cache.self_attention_cache.layers + cache.cross_attention_cache.layers
    assert sizes["marian_fp32"] == sum(layer.keys.numel() + layer.values.numel() for layer in layers) * 4
    words = sum(layer.keys[0, :, 0].numel() * 2 for layer in cache.cross_attention_cache.layers) * 4
    written = cache.self_attention_cache.get_seq_length()
    # the source of each sentence once, and their pasts besides
    assert len(SENTENCES) * longest * words <= sizes["ours_fp32"] < sizes["marian_fp32"] / 2
    assert written > 1


def test_single_sentences_are_limited_and_have_no_score(folder: Path, one_process: None) -> None:
    found = compare(folder, SENTENCES, ["ours_fp32"], [1, 2], [1], rounds=1, limit_single=2, references=SENTENCES)
    assert [(one.sentences, one.bleu is None) for one in found] == [(2, True), (3, False)]


@pytest.mark.slow
def test_each_engine_has_a_process_of_its_own(folder: Path) -> None:
    found = compare(folder, SENTENCES, ["ours_fp32", "marian_fp32"], [2], [3], rounds=2)
    assert [one.same_output for one in found] == [1.0, 1.0]
    assert all(one.peak_mib > 50 for one in found)


def measurement(engine: str, size: int, beams: int, tokens: int, seconds: list[float], **more: Any) -> Measurement:
    return Measurement(engine, "sorted", size, beams, 64, tokens, seconds, 100.0, 1.0, **more)


FOUND = [
    measurement("ours_fp32", 16, 4, 900, [3.0, 1.0, 2.0], bleu=40.0),
    measurement("ours_bf16", 16, 4, 900, [1.0, 1.0, 1.0]),
    measurement("marian_fp32", 16, 4, 900, [6.0, 6.0, 6.0]),
    measurement("ctranslate2_int8", 16, 4, 1000, [2.0, 2.0, 2.0]),
    measurement("ours_fp32", 64, 4, 900, [1.5, 1.5, 1.5]),
    measurement("ours_fp32", 64, 1, 900, [0.5, 0.5, 0.5]),
]


def test_ratios_are_those_of_the_medians_in_the_same_precision() -> None:
    found = [(one.ours, one.peer, one.times) for one in ratios(FOUND)]
    assert found == [
        ("ours_fp32", "marian_fp32", pytest.approx(450 / 150)),
        ("ours_bf16", "ctranslate2_int8", pytest.approx(900 / 500)),
    ]


def test_growth_is_that_of_a_batch() -> None:
    found = {(one.engine, one.smaller, one.larger): one.times for one in scaling(FOUND)}
    # 64 sentences were four batches of 16: half a second each; one batch of 64: 1.5 seconds
    assert found == {
        ("ours_fp32", (16, 4), (64, 4)): pytest.approx(3.0),
        ("ours_fp32", (64, 1), (64, 4)): pytest.approx(3.0),
    }


def test_report_has_a_row_for_each_measurement() -> None:
    lines = report(FOUND, {"ours_fp32": 2**20, "marian_fp32": 4 * 2**20}, 8).splitlines()
    assert lines[2] == "| ours_fp32 | sorted | 16 | 4 | 450 | 100% | 31.2 | | 100 | 100.0% | 40.00 |"
    assert "| 3.00 (ours_fp32) |" in lines[4] and "| 1.80 (ours_bf16) |" in lines[5]
    assert "| ours_fp32 | sorted | 16 × 4 | 64 × 4 | 3.00 |" in lines
    assert lines[-1] == "| marian_fp32 | 4.0 | 0.25 |"
    for table in "\n".join(lines).split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_picture_has_a_panel_for_each_setting(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(FOUND, tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    assert text.count("<!-- 16 sentences, sorted -->") == 1 and text.count("<!-- 64 sentences, sorted -->") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["speed.svg"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": ["ours_fp32", "fairseq"]}, "engines: fairseq is none of ours_fp32"),
        ({"orders": ["random"]}, "order: random is none of sorted, file"),
        ({"references": ["one"]}, "references: 1 of them for 3 sentences"),
        ({"sentences": []}, "there are none"),
    ],
)
def test_mistakes_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(**{"folder": folder, "sentences": SENTENCES, "engines": ["ours_fp32"], **options})
