"""The benchmark of training counts what it says it counts, and gives all engines the same to do; nobody here looks at
a time."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk

from hf_vanilla_transformer.benchmarks import training as benchmark
from hf_vanilla_transformer.benchmarks.training import Measurement, Setting, compare, prepare, setting
from hf_vanilla_transformer.benchmarks.training_report import plot, ratios, report, scaling
from hf_vanilla_transformer.errors import UserError

WORDS = ["a", "dog", "and", "two", "cats", "sleep", "in", "the", "snow", "while", "it", "is", "cold"]
PAIRS = [(" ".join(WORDS[: 1 + n % 11]), " ".join(reversed(WORDS[: 1 + n % 7]))) for n in range(60)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    folder = tmp_path_factory.mktemp("benchmark")
    for side, name in enumerate(("source", "target")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
    data = prepare(folder, folder / "source", folder / "target", "tiny", 300, 100, {})
    return folder, data


class Script:
    """Stands in for the pipe to the one that asks: the requests are known before, the answers are kept."""

    def __init__(self, *requests: tuple[str, tuple]):
        self.requests = list(requests)
        self.answers: list[Any] = []

    def recv(self) -> tuple[str, tuple]:
        if not self.requests:
            raise EOFError
        return self.requests.pop(0)

    def send(self, answer: Any) -> None:
        self.answers.append(answer)


def serve(folder: Path, engine: str, what: Setting, *requests: tuple[str, tuple]) -> list[Any]:
    pipe = Script(*requests)
    with pytest.raises(SystemExit):
        benchmark._serve(pipe, engine, str(folder), what)  # type: ignore[arg-type]
    return pipe.answers


@pytest.mark.parametrize("engine", ["ours_fp32", "marian_bf16", "marian_grouped_fp32"])
def test_an_epoch_has_the_tokens_of_the_data(prepared: tuple[Path, Dataset], engine: str) -> None:
    folder, data = prepared
    what = setting(data, 100, None, 1, "cpu")
    sizes = sorted(len(row) for row in data["input_ids"])
    updates = {
        "ours": len(benchmark.TokenBatchSampler(*benchmark.pair_lengths(data), 100)),
        "marian": -(-len(data) // what.sentences),
    }[engine.partition("_")[0]]
    ready, *turns, nothing, peak = serve(
        folder, engine, what, ("updates", (1,)), ("updates", (updates - 1,)), ("forget_peak", ()), ("peak_mib", ())
    )
    assert ready == "ready" and nothing is None and peak > 50 and len(turns) == 2
    labels = sum(len(row) for row in data["labels"])
    assert sum(turn.target_tokens for turn in turns) == labels
    assert sum(turn.tokens for turn in turns) == labels + sum(sizes)
    assert all(turn.seconds > 0 and turn.padded >= turn.tokens for turn in turns)


def test_all_engines_have_the_same_loss(tmp_path: Path) -> None:
    data = prepare(tmp_path, None, None, "tiny", 300, 64, {"dropout": 0.0})
    losses = []
    for engine in ("ours_fp32", "marian_fp32"):
        trainer = benchmark.make_trainer(engine, tmp_path, setting(data, 64, None, 1, "cpu"))
        batch = trainer.data_collator([{side: row[side] for side in ("input_ids", "labels")} for row in data])
        words = batch["labels"].numel()
        losses.append(trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=words).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_all_engines_have_the_same_dropout_and_optimizer(prepared: tuple[Path, Dataset]) -> None:
    folder, data = prepared
    what = setting(data, 100, None, 1, "cpu")
    ours, marian = (benchmark.make_trainer(engine, folder, what) for engine in ("ours_fp32", "marian_fp32"))
    assert ours.model.config.label_smoothing == marian.args.label_smoothing_factor == 0.1
    assert ours.model.config.dropout == marian.model.config.dropout == 0.3
    for name in ("optim", "learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta2", "max_grad_norm", "bf16"):
        assert getattr(ours.args, name) == getattr(marian.args, name), name
    assert benchmark.make_trainer("marian_grouped_bf16", folder, what).args.bf16


@pytest.mark.parametrize(("tokens_per_update", "processes"), [(None, 1), (None, 2), (400, 1), (400, 2)])
def test_updates_of_the_stock_trainer_have_as_many_pairs(
    prepared: tuple[Path, Dataset], tokens_per_update: int | None, processes: int
) -> None:
    what = setting(prepared[1], 50, tokens_per_update, processes, "cpu")
    pairs = what.sentences * what.accumulation * processes
    sampler = benchmark.TokenBatchSampler(
        *benchmark.pair_lengths(prepared[1]), 50, tokens_per_update=tokens_per_update, batches_per_update=processes
    )
    ours = sum(len(batch) for batch in sampler.update(0)), len(prepared[1]) / len(sampler)
    assert pairs == pytest.approx(ours[1], rel=0.35), ours


def test_pairs_without_text_have_no_padding(tmp_path: Path) -> None:
    data = prepare(tmp_path, None, None, "tiny", 500, 64, {"dropout": 0.0})
    assert {len(row) for side in ("input_ids", "labels") for row in data[side]} == {32}
    assert 300 < max(max(row) for row in data["labels"]) < 500
    assert len(load_from_disk(tmp_path / "data")) == 32
    _, turn = serve(tmp_path, "ours_fp32", setting(data, 64, None, 1, "cpu"), ("updates", (1,)))
    assert (turn.target_tokens, turn.tokens, turn.padded) == (64, 128, 128)


@pytest.mark.slow
def test_engines_have_processes_of_their_own() -> None:
    found = compare(
        ["ours_fp32", "marian_fp32"], preset="tiny", vocab_size=300, tokens=64, tokens_per_update=128, updates=1,
        rounds=2, processes=[1, 2],
    )  # fmt: skip
    assert [(one.engine, one.processes) for one in found] == [
        ("ours_fp32", 1), ("marian_fp32", 1), ("ours_fp32", 2), ("marian_fp32", 2),
    ]  # fmt: skip
    assert all(one.target_tokens == [128, 128] and len(one.seconds) == 2 for one in found)
    assert all(one.padding == 0 and one.peak_mib > 50 for one in found)
    assert [one.processes for one in scaling(found)] == [2, 2]


def measurement(engine: str, processes: int, rates: list[float], peak: float = 100.0) -> Measurement:
    words = [1000] * len(rates)
    return Measurement(engine, processes, 2, [1000 / rate for rate in rates], words, 0.05, peak, 40.0)


FOUND = [
    measurement("ours_fp32", 1, [300.0, 100.0, 200.0]),
    measurement("ours_bf16", 1, [600.0, 600.0, 600.0]),
    measurement("marian_fp32", 1, [50.0, 50.0, 80.0], peak=400.0),
    measurement("marian_grouped_fp32", 1, [100.0, 100.0, 100.0]),
    measurement("ours_fp32", 2, [380.0, 380.0, 380.0]),
]


def test_ratios_are_those_of_the_medians_in_the_same_precision() -> None:
    assert [(one.ours, one.peer, one.times, one.memory) for one in ratios(FOUND)] == [
        ("ours_fp32", "marian_fp32", pytest.approx(4.0), pytest.approx(0.25)),
        ("ours_fp32", "marian_grouped_fp32", pytest.approx(2.0), pytest.approx(1.0)),
    ]


def test_several_processes_are_held_against_one() -> None:
    assert [(one.engine, one.processes, one.times) for one in scaling(FOUND)] == [("ours_fp32", 2, pytest.approx(1.9))]


def test_report_has_a_row_for_each_measurement() -> None:
    lines = report(FOUND).splitlines()
    assert lines[2] == "| ours_fp32 | 1 | 200 | 100% | | 5.0% | 500 | 100 | 40 | |"
    assert lines[4] == "| marian_fp32 | 1 | 50 | 60% | 4.00 | 5.0% | 500 | 400 | 40 | 0.25 |"
    assert lines[-1] == "| ours_fp32 | 2 | 1.90 |"
    for table in "\n".join(lines).split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_picture_has_a_panel_for_each_number_of_processes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(FOUND, tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    assert text.count("<!-- 1 process -->") == 1 and text.count("<!-- 2 processes -->") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": ["ours_fp32", "fairseq"]}, "engines: fairseq is none of ours_fp32"),
        ({"preset": "huge"}, "preset: huge is none of tiny, base"),
        ({"device": "tpu"}, "device: tpu is none of cpu, cuda"),
        ({"source": "a"}, "source and target go together"),
        ({"source": "a", "target": "b"}, "a is not there"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        compare(**{"engines": ["ours_fp32"], **options})
