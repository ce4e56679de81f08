"""The training benchmark: token counts, and the same work for all engines. No times."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk

from scripts.benchmarks import training as benchmark
from scripts.benchmarks.training import BatchSizes, batch_sizes, prepare

WORDS = [
    "a",
    "dog",
    "and",
    "two",
    "cats",
    "sleep",
    "in",
    "the",
    "snow",
    "while",
    "it",
    "is",
    "cold",
]
PAIRS = [(" ".join(WORDS[: 1 + n % 11]), " ".join(reversed(WORDS[: 1 + n % 7]))) for n in range(60)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    folder = tmp_path_factory.mktemp("benchmark")
    for side, name in enumerate(("source", "target")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
    data = prepare(folder, folder / "source", folder / "target", ["tiny"], 300, 100)
    return folder, data


class ScriptedPipe:
    """A pipe with prepared requests that collects the answers."""

    def __init__(self, *requests: tuple[str, tuple]):
        self.requests = list(requests)
        self.answers: list[Any] = []

    def recv(self) -> tuple[str, tuple]:
        if not self.requests:
            raise EOFError
        return self.requests.pop(0)

    def send(self, answer: Any) -> None:
        self.answers.append(answer)


def serve(folder: Path, engine: str, sizes: BatchSizes, *requests: tuple[str, tuple]) -> list[Any]:
    pipe = ScriptedPipe(*requests)
    with pytest.raises(SystemExit):
        benchmark.serve(pipe, engine, str(folder), "tiny", sizes, "cpu")  # type: ignore[arg-type]
    return pipe.answers


@pytest.mark.parametrize("engine", ["ours_fp32", "marian_bf16", "marian_grouped_fp32"])
def test_turns_of_an_epoch_count_all_tokens(prepared: tuple[Path, Dataset], engine: str) -> None:
    folder, data = prepared
    sizes = batch_sizes(data, 100, None, 1)
    updates = {
        "ours": len(benchmark.TokenBatchSampler(*benchmark.pair_lengths(data), 100)),
        "marian": -(-len(data) // sizes.pairs),
    }[engine.partition("_")[0]]
    ready, first, nothing, last = serve(
        folder,
        engine,
        sizes,
        ("updates", (1,)),
        ("reset_peak_memory", ()),
        ("updates", (updates - 1,)),
    )
    assert ready == "ready" and nothing is None
    labels, sources = (sum(len(row) for row in data[side]) for side in ("labels", "input_ids"))
    assert first.target_tokens + last.target_tokens == labels
    assert first.tokens + last.tokens == labels + sources
    assert all(turn.seconds > 0 and turn.padded_tokens >= turn.tokens for turn in (first, last))
    assert first.step_mib is None and last.peak_mib > 50 and last.step_mib < last.peak_mib


def test_engines_have_the_same_loss(tmp_path: Path) -> None:
    data = prepare(tmp_path, None, None, ["tiny"], 300, 64, dropout=0.0)
    losses = []
    for engine in ("ours_fp32", "marian_fp32"):
        trainer = benchmark.make_trainer(
            engine, tmp_path, "tiny", batch_sizes(data, 64, None, 1), "cpu"
        )
        batch = trainer.data_collator(
            [{side: row[side] for side in ("input_ids", "labels")} for row in data]
        )
        tokens = batch["labels"].numel()
        losses.append(
            trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=tokens).item()
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_engines_have_the_same_dropout_and_optimizer(prepared: tuple[Path, Dataset]) -> None:
    folder, data = prepared
    sizes = batch_sizes(data, 100, None, 1)
    ours, marian, grouped = (
        benchmark.make_trainer(engine, folder, "tiny", sizes, "cpu")
        for engine in ("ours_fp32", "marian_fp32", "marian_grouped_bf16")
    )
    assert ours.model.config.label_smoothing == marian.args.label_smoothing_factor == 0.1
    assert ours.model.config.dropout == marian.model.config.dropout == 0.3
    for name in (
        "optim",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "adam_beta2",
        "max_grad_norm",
        "bf16",
    ):
        assert getattr(ours.args, name) == getattr(marian.args, name), name
    assert grouped.args.bf16


@pytest.mark.parametrize(
    ("tokens_per_update", "processes"), [(None, 1), (None, 2), (400, 1), (400, 2)]
)
def test_updates_of_transformers_trainer_have_as_many_pairs(prepared, tokens_per_update, processes):
    sizes = batch_sizes(prepared[1], 50, tokens_per_update, processes)
    pairs = sizes.pairs * sizes.accumulation * processes
    sampler = benchmark.TokenBatchSampler(
        *benchmark.pair_lengths(prepared[1]),
        50,
        tokens_per_update=tokens_per_update,
        batches_per_update=processes,
    )
    ours = sum(len(batch) for batch in sampler.update(0)), len(prepared[1]) / len(sampler)
    assert pairs == pytest.approx(ours[1], rel=0.35), ours


def test_random_pairs_have_no_padding(tmp_path: Path) -> None:
    data = prepare(tmp_path, None, None, ["tiny"], 500, 64, dropout=0.0)
    assert {len(row) for side in ("input_ids", "labels") for row in data[side]} == {32}
    assert 300 < max(max(row) for row in data["labels"]) < 500
    assert len(load_from_disk(tmp_path / "data")) == 32
    _, turn = serve(tmp_path, "ours_fp32", batch_sizes(data, 64, None, 1), ("updates", (1,)))
    assert (turn.target_tokens, turn.tokens, turn.padded_tokens) == (64, 128, 128)
