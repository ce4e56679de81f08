"""`Trainer.hyperparameter_search` of transformers with this model and this trainer."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_vanilla_transformer import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from tests.model_helpers import tiny_model
from tests.trainer_helpers import QUIET, collate, random_pairs


@pytest.fixture(autouse=True)
def quiet_optuna() -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def test_optuna_searches_learning_rate_and_dropout(tmp_path: Path) -> None:
    dropouts = []

    def make_model(trial: Any) -> Any:
        dropout = trial.suggest_categorical("dropout", [0.1, 0.3]) if trial is not None else 0.1
        dropouts.append(dropout)
        return tiny_model(encoder_layers=1, decoder_layers=1, dropout=dropout)

    settings = {
        **QUIET,
        "max_steps": 2,
        "max_tokens_per_batch": 60,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = VanillaTransformerTrainer(
        model_init=make_model,
        args=VanillaTransformerTrainingArguments(output_dir=str(tmp_path), **settings),
        train_dataset=Dataset.from_list(random_pairs(16)),
        eval_dataset=Dataset.from_list(random_pairs(4, seed=5)),
        data_collator=collate,
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
        },
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=3,
        backend="optuna",
        direction="minimize",
    )
    assert 1e-4 <= best.hyperparameters["learning_rate"] <= 1e-2 and 0 < best.objective < 10
    assert best.hyperparameters["dropout"] in dropouts


def trained_with(made: Any) -> tuple[list[float], Any]:
    """The losses of the last run, and an average of its weights."""
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, made.ema and made.ema.average["model.decoder.layers.0.fc1.weight"].tolist()


def small_trainer(folder: Path, width: Any, **settings: Any) -> VanillaTransformerTrainer:
    """A trainer whose models have a width for each trial."""

    def make_model(trial: Any) -> Any:
        return tiny_model(encoder_layers=1, decoder_layers=1, d_model=width(trial))

    return VanillaTransformerTrainer(
        model_init=make_model,
        args=VanillaTransformerTrainingArguments(
            output_dir=str(folder), **QUIET, max_steps=2, **settings
        ),
        train_dataset=Dataset.from_list(random_pairs(8)),
        eval_dataset=Dataset.from_list(random_pairs(4, seed=5)),
        data_collator=collate,
    )


WIDTHS = [16, 32, 32]
OBJECTIVES = {
    "simcut_alpha": [0.0, 3.0, 0.0],
    "teacher": [[], ["teacher"], []],
    "ema_decay": [0.9, 0.9, 0.0],
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_trials_have_the_objectives_of_their_arguments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So has each run of a trainer whose arguments are set."""
    monkeypatch.chdir(tmp_path)
    tiny_model(1, encoder_layers=1, decoder_layers=1).save_pretrained("teacher")
    values = OBJECTIVES[name]
    expected = []
    for value, width in zip(values, WIDTHS, strict=True):
        made = small_trainer(tmp_path, lambda _, width=width: width, **{name: value})
        made.train()
        expected.append(trained_with(made))
    assert expected[1] != expected[2]
    tried = []
    searching = small_trainer(tmp_path, lambda trial: WIDTHS[trial.number if trial else 0])

    def score(metrics: dict[str, float]) -> float:
        tried.append(trained_with(searching))
        return metrics["eval_loss"]

    searching.hyperparameter_search(
        hp_space=lambda trial: {name: values[trial.number]},
        compute_objective=score,
        n_trials=3,
        backend="optuna",
    )
    assert tried == expected
    again = small_trainer(tmp_path, lambda _: 32)
    for value, results in zip(values[1:], expected[1:], strict=True):
        setattr(again.args, name, value)
        again.train()
        assert trained_with(again) == results


def test_arguments_that_are_set_later_are_checked(tmp_path: Path) -> None:
    made = small_trainer(tmp_path, lambda _: 32, simcut_alpha=3.0)
    made.args.r_drop_alpha = 3.0
    with pytest.raises(ValueError, match="choose one"):
        made.train()
