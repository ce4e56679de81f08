"""Scripts of users, each for any sequence-to-sequence model of transformers, and the two models that they run on."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests import model_helpers
from tests.model_helpers import SPECIAL_TOKENS, randomise, tiny_model
from tests.trainer_helpers import QUIET, collate, random_pairs

VOCABULARY = 40


def marian(seed: int = 0, d_model: int = 32) -> MarianMTModel:
    fields: dict[str, Any] = {"d_model": d_model, "dropout": 0.0, "max_position_embeddings": 64}
    for stack in ("encoder", "decoder"):
        fields |= {f"{stack}_layers": 1, f"{stack}_ffn_dim": 64, f"{stack}_attention_heads": 4}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return randomise(
        MarianMTModel(
            MarianConfig(vocab_size=VOCABULARY, forced_eos_token_id=None, **special, **fields)
        ),
        seed,
    ).eval()


def ours(seed: int = 0, d_model: int = 32) -> VanillaTransformerForConditionalGeneration:
    return tiny_model(
        seed,
        d_model=d_model,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )


MODELS: dict[str, Any] = {"marian": marian, "ours": ours}


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 4))]
    return model_helpers.word_tokenizer(
        tokens, pre_tokenizers.WhitespaceSplit(), ends=True, **SPECIAL_TOKENS
    )


def text_pairs(count: int) -> list[dict[str, str]]:
    rows = random_pairs(count)
    words = (
        {side: " ".join(f"w{i - 4}" for i in row[side] if i > 3) for side in row} for row in rows
    )
    return [{"source": row["input_ids"] or "w0", "target": row["labels"] or "w1"} for row in words]


def stock_trainer(model: Any, folder: Path, base: type = Seq2SeqTrainer, **settings: Any) -> Any:
    """A trainer as users make it, with eight pairs to train and to evaluate on."""
    callbacks, metrics = settings.pop("callbacks", None), settings.pop("compute_metrics", None)
    model_init = settings.pop("model_init", None)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), **{**QUIET, "max_steps": 3, "learning_rate": 1e-2, **settings}
    )
    return base(
        model=model,
        args=arguments,
        train_dataset=random_pairs(8),
        eval_dataset=random_pairs(8),
        data_collator=collate,
        callbacks=callbacks,
        compute_metrics=metrics,
        model_init=model_init,
        processing_class=word_tokenizer(),
    )


def loss_of(model: Any) -> float:
    with torch.no_grad():
        return model.eval()(**collate(random_pairs(8))).loss.item()
