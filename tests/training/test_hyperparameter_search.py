"""`Trainer.hyperparameter_search` of transformers with this model and this trainer."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_vanilla_transformer import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from tests.model_helpers import tiny_model
from tests.trainer_helpers import QUIET, collate, random_pairs


def test_optuna_searches_learning_rate_and_dropout(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
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
