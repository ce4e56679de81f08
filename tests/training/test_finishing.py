"""The end of a run: what is scored and saved, what the card says, and what a missing plot costs."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

from hf_vanilla_transformer.corpora.corpus import Corpus
from hf_vanilla_transformer.corpora.mixtures import PART
from hf_vanilla_transformer.training.run import finishing
from hf_vanilla_transformer.training.state.callbacks import StopWithCheckpoint
from hf_vanilla_transformer.utils.errors import DiskFull, Interrupted, UserError
from tests.model_helpers import SPECIAL_TOKENS, tiny_model, word_tokenizer


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let functions that the end of a run calls return these values, or be these functions."""

    def replace(**values: Any) -> None:
        for name, value in values.items():
            function = value if callable(value) else lambda *_, value=value: value
            monkeypatch.setattr(finishing, name, function)

    return replace


def finished(
    patch: Any,
    folder: Path,
    stop: StopWithCheckpoint,
    beams: tuple[int | None, int | None] | None = None,
    groups: str | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """The results of a run with 1,001 validation pairs, if its functions return what they were given."""
    values = {
        "score_options": lambda data_args, tokenizer: {"metrics": tokenizer},
        "choose_weights": lambda trainer, folder, args, metrics: {"metrics": metrics},
        "set_decoding": None,
        "save_model_folder": None,
        "save_results": None,
        "signatures_of": lambda texts, options, groups: {"texts": len(texts), "groups": groups},
        "score_test_split": lambda trainer, data, pairs, split, *_: {split: (data, pairs)},
    }
    patch(**values | changed)
    pairs = {"test": "pairs", "validation": {"target": ["a"] * 1001}}
    run = SimpleNamespace(
        args=SimpleNamespace(output_dir=folder, device=torch.device("cpu")),
        data_args=None,
        tokenizers=("source", "target"),
        corpus=SimpleNamespace(pairs=pairs),
        encoded={"train": 1, "test": 2},
        groups=lambda split: groups,
    )
    chosen, saved = beams or (None, None)
    trainer = SimpleNamespace(
        args=SimpleNamespace(generation_num_beams=chosen),
        model=SimpleNamespace(generation_config=SimpleNamespace(num_beams=saved)),
        eval_dataset="abc" if beams else None,
    )
    return finishing.score_and_save(trainer, stop, run, {"before": 0})


@pytest.mark.parametrize(
    ("beams", "groups", "used", "texts"),
    [((3, 4), None, 3, 1000), ((None, 4), "both", 4, 1001), ((None, None), None, 1, 1000)],
)
def test_results_say_how_the_validation_split_was_scored(
    patch: Any,
    tmp_path: Path,
    beams: tuple[int | None, int | None],
    groups: str | None,
    used: int,
    texts: int,
) -> None:
    results = finished(patch, tmp_path, StopWithCheckpoint(), beams, groups)
    assert results == {
        "before": 0,
        "metrics": "target",
        "eval_sentences": 3,
        "eval_num_beams": used,
        "eval_texts": texts,
        "eval_groups": groups,
        "test": (2, "pairs"),
    }


@pytest.mark.parametrize("only_for_scoring", [True, False])
def test_checkpoint_that_was_saved_for_scoring_goes(
    patch: Any, tmp_path: Path, only_for_scoring: bool
) -> None:
    stop = StopWithCheckpoint()
    stop.saved_for_scoring, stop.saved_step = only_for_scoring, 2
    (tmp_path / "checkpoint-2").mkdir()
    results = finished(patch, tmp_path, stop)
    assert results == {"before": 0, "metrics": "target", "test": (2, "pairs")}
    assert (tmp_path / "checkpoint-2").exists() is not only_for_scoring


@pytest.mark.parametrize(
    ("received", "status"), [(None, 130), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_signal_ends_the_scores(
    patch: Any, tmp_path: Path, received: int | None, status: int
) -> None:
    """Another rank may have received it."""

    def interrupt(*_: Any) -> None:
        stop.signals.agreed, stop.signals.received = signal.SIGINT, received
        raise Interrupted("in a batch")

    stop = StopWithCheckpoint()
    with pytest.raises(Interrupted, match="before the test split was scored") as raised:
        finished(patch, tmp_path, stop, score_test_split=interrupt)
    assert raised.value.status == status


def test_results_of_other_weights_are_removed(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(["<s>", "<pad>", "</s>", "<unk>"], **SPECIAL_TOKENS)

    def results_after(seed: int) -> list[str]:
        model = tiny_model(seed)
        model.config.use_cache = False  # as in training
        trainer = SimpleNamespace(model=model, is_fsdp_enabled=False)
        finishing.save_model_folder(trainer, (tokenizer, tokenizer), tmp_path)
        assert json.loads((tmp_path / "config.json").read_text()).get("use_cache", True)
        return [name for name in finishing.RESULTS if (tmp_path / name).exists()]

    assert results_after(1) == []
    for name in finishing.RESULTS:
        (tmp_path / name).touch()
    assert results_after(1) == list(finishing.RESULTS)
    assert results_after(2) == []


def test_results_are_sorted_and_indented(tmp_path: Path) -> None:
    trainer = SimpleNamespace(state=TrainerState(global_step=3))
    finishing.save_results(trainer, tmp_path, {"b": 1, "a": 2})
    assert (tmp_path / "all_results.json").read_text() == '{\n  "a": 2,\n  "b": 1\n}\n'
    assert TrainerState.load_from_json(str(tmp_path / "trainer_state.json")).global_step == 3


def test_missing_plot_does_not_end_a_run_but_a_full_disk_does(
    capsys: pytest.CaptureFixture,
) -> None:
    with finishing.report_missing_plot("curve"):
        raise UserError("no matplotlib")
    assert capsys.readouterr().err == "no curve: no matplotlib\n"
    with pytest.raises(DiskFull, match="^full$"), finishing.report_missing_plot("curve"):
        raise DiskFull("full")


@pytest.mark.parametrize(
    ("directions", "direction"),
    [({}, (None, None)), ({"test": ["en de", "de en"]}, ("d", "e", " ", "e", "n"))],
)
def test_attention_of_the_first_short_pair_is_drawn(
    patch: Any, tmp_path: Path, directions: dict[str, list[str]], direction: tuple
) -> None:
    drawn: list[Any] = []
    patch(
        cross_attention=lambda model, first, second, *pair: (first, second, pair),
        plot_attention=lambda *facts: drawn.append(facts),
    )
    lengths = [(151, 1), (1, 151), (150, 150), (1, 1)]
    pairs = [{"source": "s" * first, "target": "t" * last, PART: 1} for first, last in lengths]
    for rows in (pairs, pairs[:2]):
        run = SimpleNamespace(
            args=SimpleNamespace(output_dir=tmp_path),
            corpus=Corpus(pairs={"test": rows}, directions=directions),
            tokenizers=("first", "second"),
        )
        finishing.draw_attention(None, run)
    shown = ("s" * 150, "t" * 150, *direction)
    assert drawn == [("first", "second", shown, tmp_path / "attention.png")]


@pytest.mark.parametrize(
    ("base", "named", "on_hub"),
    [(None, None, False), ("a/b", "a/b", True), (".", Path.cwd().name, False)],
)
@pytest.mark.parametrize("has_test", [True, False])
def test_card_has_the_facts_of_the_run(
    patch: Any, tmp_path: Path, base: str | None, named: str | None, on_hub: bool, has_test: bool
) -> None:
    """A run with a test split reads its text, and one without is on prepared data and sharded."""
    patch(
        split_inputs=lambda _, split: [SimpleNamespace(name=split, on_hub=split != "test")],
        tokenizer_task="language" if has_test else "sequence",
        run_languages=("en", "de"),
        chosen_values={},
        describe_hardware="",
        versions={},
        plot_curve=lambda history, file: file.touch(),
        draw_attention=lambda *_: drawn.append(True),
        write_model_card=lambda folder, facts: cards.append(facts),
    )
    cards: list[Any] = []
    drawn: list[bool] = []
    rows = [{"source": name, "target": ""} for name in ("first", "other", "last")]
    corpus = SimpleNamespace(
        directions={},
        pairs={"test" if has_test else "train": rows},
        summary=str.upper,
        fingerprint=lambda split: None if split == "train" else "digest",
    )
    config = SimpleNamespace(to_dict=lambda: {"size": 1})
    trainer = SimpleNamespace(
        model=SimpleNamespace(num_parameters=int, config=config, generation_config=config),
        is_fsdp_enabled=not has_test,
        state=SimpleNamespace(log_history=[]),
    )
    run = SimpleNamespace(
        args=SimpleNamespace(output_dir=tmp_path, model_name_or_path=base),
        data_args=SimpleNamespace(data=None if has_test else "prepared"),
        model_args=None,
        corpus=corpus,
        tokenizers=(),
    )
    results = {"train_seconds": 1.0} | ({"test_exact_match": 0.0} if has_test else {})
    finishing.write_card(trainer, run, results)
    (facts,) = cards
    assert (facts.base_model, facts.base_model_on_hub) == (named, on_hub)
    assert (tmp_path / "curve.png").exists()
    assert drawn == [True] * has_test
    assert facts.languages == (("en", "de") if has_test else None)
    assert facts.generation_config == ({"size": 1} if has_test else {})
    assert facts.example == ("first" if has_test else None)
    assert facts.data_fingerprints == ({"test": "digest"} if has_test else {})
    hub = ("train", "validation", "base_test")
    assert facts.datasets == ({**{name: [name] for name in hub}, "test": []} if has_test else {})
