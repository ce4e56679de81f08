"""The decoding benchmark: same output of all engines, cache sizes, and the rows that an interrupt keeps. No times."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.inference import workers
from hf_vanilla_transformer.interop.marian import to_marian
from hf_vanilla_transformer.text import load_tokenizers
from scripts.benchmarks import decoding as decoding_benchmark
from scripts.benchmarks.decoding import compare
from scripts.benchmarks.harness import Teams, Worker
from tests.benchmarks.conftest import SENTENCES
from tests.model_helpers import error_of


class InProcessWorker:
    """Runs an engine in this process, because starting a worker process takes seconds."""

    def __init__(self, serve: Any, engine: str, *made_from: Any, threads: int):
        self.engine = decoding_benchmark.ENGINES[engine](*made_from)
        self.answers: list[Any] = ["ready"]

    def end(self) -> None:
        pass

    def send(self, request: str, *args: Any) -> None:
        self.answers.append(decoding_benchmark.answer(self.engine, False, request, *args))

    def receive(self) -> Any:
        return self.answers.pop(0)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_benchmark, "Worker", InProcessWorker)


@pytest.mark.parametrize(
    "peer", ["marian_fp32", "ctranslate2_fp32", "ours_workers_fp32", "ctranslate2_workers_fp32"]
)
@pytest.mark.slow
def test_engines_with_the_same_weights_translate_alike(folder, one_process, peer, monkeypatch):
    monkeypatch.setattr(workers, "MIN_SENTENCES", 1)
    if peer.startswith("ctranslate2"):
        pytest.importorskip("ctranslate2")
    engines = ["ours_fp32", peer]
    settings = {"rounds": 2, "references": [*SENTENCES[1:], "x"], "tokenize": "none"}
    found = list(compare(folder, SENTENCES, engines, [1, 2], [1, 3], **settings))
    settings_of = [(*one.setting.values(), one.engine) for one in found]
    assert settings_of == [
        (size, beams, engine) for size in (1, 2) for beams in (1, 3) for engine in engines
    ]
    expected = Translator.from_pretrained(folder, device="cpu")
    for one in found:
        assert (one.more["sentences"], len(one.seconds), one.more["same output"]) == (3, 2, 1.0)
        texts = list(
            expected.translate(
                SENTENCES, num_beams=one.setting["beams"], length_penalty=1.0, batch_size=1
            )
        )
        assert one.more["BLEU"] == pytest.approx(
            sacrebleu.corpus_bleu(texts, [settings["references"]], tokenize="none").score
        )
        assert one.peak_mib > 50
    assert (
        len({tokens for one in found if one.setting["beams"] == 3 for tokens in one.target_tokens})
        == 1
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_engines_take_a_shortlist(folder, tmp_path, monkeypatch, beams):
    """Of tokens that no translation has without it."""
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(workers, "MIN_SENTENCES", 1)
    source, target = load_tokenizers(folder)
    ids, path, translations = source(SENTENCES)["input_ids"], tmp_path / "shortlist", []
    for name in ("ours_fp32", "ours_workers_fp32", "ctranslate2_fp32"):
        usual = {
            token
            for row in make_engine(name, folder, tmp_path).translate(ids, 2, beams)
            for token in row
        }
        others = set(range(20, len(target))) - usual
        path.write_text(
            f"\t{' '.join(target.convert_ids_to_tokens(sorted(others)))}\n", encoding="utf-8"
        )
        translations.append(make_engine(name, folder, tmp_path, str(path)).translate(ids, 2, beams))
        assert {token for row in translations[-1] for token in row} <= others | {
            target.eos_token_id
        }
    assert any(map(len, translations[0])) and translations[0] == translations[1] == translations[2]
    assert error_of(lambda: make_engine("marian_fp32", folder, tmp_path, str(path))).startswith(
        "shortlist: "
    )


def make_engine(name: str, folder: Path, work: Path, shortlist: str | None = None) -> Any:
    parts = work / f"{name}_{shortlist is None}"
    parts.mkdir()
    return decoding_benchmark.ENGINES[name](str(folder), str(parts), "cpu", shortlist)


def test_cache_bytes_are_those_of_the_tensors(folder: Path, one_process: None) -> None:
    measured = list(compare(folder, SENTENCES, ["ours_fp32", "marian_fp32"], [3], [8], 1))
    sizes = {one.engine: one.more["KV caches, MiB"] * 2**20 for one in measured}
    translator = Translator.from_pretrained(folder, device="cpu")
    source = translator.source_tokenizer(SENTENCES, padding=True, return_tensors="pt")
    longest = source["input_ids"].shape[1]
    cache = (
        to_marian(translator.model)
        .generate(
            **source,
            num_beams=8,
            length_penalty=1.0,
            max_new_tokens=longest + 50,
            return_dict_in_generate=True,
        )
        .past_key_values
    )
    layers = cache.self_attention_cache.layers + cache.cross_attention_cache.layers
    assert (
        sizes["marian_fp32"]
        == sum(layer.keys.numel() + layer.values.numel() for layer in layers) * 4
    )
    bytes_per_token = (
        sum(layer.keys[0, :, 0].numel() * 2 for layer in cache.cross_attention_cache.layers) * 4
    )
    written = cache.self_attention_cache.get_seq_length()
    # keys and values of each source once, not once per beam, and those of the targets
    assert (
        len(SENTENCES) * longest * bytes_per_token <= sizes["ours_fp32"] < sizes["marian_fp32"] / 2
    )
    assert written > 1


def test_batches_of_one_get_fewer_sentences_and_no_bleu(folder: Path, one_process: None) -> None:
    found = list(
        compare(
            folder, SENTENCES, ["ours_fp32"], [1, 2], [1], 1, limit_single=2, references=SENTENCES
        )
    )
    assert [(one.more["sentences"], "BLEU" not in one.more) for one in found] == [
        (2, True),
        (3, False),
    ]


def test_worker_that_died_while_it_waited_is_reported() -> None:
    """A BrokenPipeError would end the command without a word, as if its reader had gone."""
    teams = Teams()
    teams.add("ours_fp32", [dead_worker()])
    assert error_of(teams.ask, "ours_fp32", "translate").startswith(
        "engines: ours_fp32: its process died"
    )


def dead_worker() -> Worker:
    worker = object.__new__(Worker)
    worker.pipe, end = multiprocessing.Pipe()
    end.close()
    worker.process = SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False)  # type: ignore[assignment]
    return worker


def test_engine_that_fails_is_left_out(folder, one_process, monkeypatch, capsys):
    """CTranslate2 without its libraries, or the trainer of a peer on a full GPU."""
    started = decoding_benchmark.Worker

    def start(serve: Any, engine: str, *made_from: Any, threads: int) -> Any:
        return (
            dead_worker()
            if engine == "marian_fp32"
            else started(serve, engine, *made_from, threads=threads)
        )

    monkeypatch.setattr(decoding_benchmark, "Worker", start)
    found = list(compare(folder, SENTENCES, ["marian_fp32", "ours_fp32"], [2], [1, 3], 1))
    assert [(one.engine, one.more["same output"]) for one in found] == [("ours_fp32", 1.0)] * 2
    assert capsys.readouterr().err.endswith(
        "left out: marian_fp32: its process died; its message is above\n"
    )
