"""Every argument of transformers' trainer: with packed rows its effect is that with padded batches, or it is refused.

Arguments are read from the installed transformers. One that nobody has decided about fails a test.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainingArguments

from hf_vanilla_transformer.training.state.fingerprint import (
    COMPARED_AS,
    IRRELEVANT,
    OPTIMIZATION,
    SELECTION,
)
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import tiny_model
from tests.trainer_helpers import DESCENT, flat, padding_collator, random_pairs, trained

SIZES = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16}
PAIRS = random_pairs(14)
HELD_OUT = random_pairs(9, seed=3)
SOURCE_TOKENS = sum(len(pair["input_ids"]) for pair in PAIRS)
# An update has all pairs, in an order that differs with packed rows.
RUN = {
    **DESCENT,
    "max_tokens_per_batch": 64,
    "tokens_per_update": 10**6,
    "num_train_epochs": 2,
    "eval_strategy": "epoch",
    "learning_rate": 0.1,
}


def words(text: str) -> set[str]:
    return set(text.split())


# Values of the arguments that read a shape, a length or a count.
READ = {
    "auto_find_batch_size": [True],
    "average_tokens_across_devices": [False],
    "batch_eval_metrics": [True],
    "dataloader_drop_last": [True],
    "eval_accumulation_steps": [1],
    "eval_delay": [1],
    "eval_do_concat_batches": [False],
    "generation_max_length": [3],
    "gradient_accumulation_steps": [2],
    "gradient_checkpointing": [True],
    "include_for_metrics": [["loss"]],
    "include_num_input_tokens_seen": ["no", "non_padding", "all", True, False],
    "label_smoothing_factor": [0.3],
    "length_column_name": ["lengths"],
    "logging_first_step": [True],
    "logging_steps": [2],
    "max_grad_norm": [0.1],
    "max_steps": [3],
    "neftune_noise_alpha": [5.0],
    "num_train_epochs": [1.0],
    "per_device_eval_batch_size": [2],
    "per_device_train_batch_size": [3],
    "predict_with_generate": [True],
    "prediction_loss_only": [True],
    "train_sampling_strategy": ["group_by_length", "sequential", "random"],
    "warmup_steps": [2, 0.5],
}
# They read none: a precision, a device, a way to shard or compile, and what happens between updates.
ELSEWHERE = words(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs bf16_full_eval data_seed
    dataloader_in_order ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    ddp_static_graph debug deepspeed enable_jit_checkpoint eval_on_start eval_steps eval_strategy
    eval_use_gather_object fp16_full_eval fsdp fsdp_config full_determinism generation_config
    generation_num_beams gradient_checkpointing_kwargs label_names liger_kernel_config load_best_model_at_end
    parallelism_config remove_unused_columns save_on_each_node save_only_model save_steps save_strategy
    save_total_limit seed sortish_sampler tf32 torch_compile torch_compile_backend torch_compile_mode
    torch_empty_cache_steps use_cache use_cpu use_liger_kernel
    """
)
NAMES = {each.name for each in dataclasses.fields(Seq2SeqTrainingArguments)}


def test_every_argument_is_decided() -> None:
    decided = {*READ, *ELSEWHERE, *OPTIMIZATION, *SELECTION, *COMPARED_AS, *IRRELEVANT}
    assert decided >= NAMES, "decide what packed rows do with an argument that is new"
    assert not ELSEWHERE & {*READ, *OPTIMIZATION, *SELECTION, *COMPARED_AS, *IRRELEVANT}


# They measure time, memory and padding.
MEASURED = ("runtime", "_per_second", "padding", "minutes_left", "mem_", "total_flos")


def figures(folder: Path, pack: bool, **settings: Any) -> dict[str, Any] | str:
    """The weights and every number that a run logs, or the line that refuses it."""
    model = tiny_model(1, **SIZES)
    collator = padding_collator(model)
    try:
        trainer = trained(
            folder,
            PAIRS,
            model,
            data_collator=collator,
            eval_dataset=HELD_OUT,
            processing_class=collator.tokenizer,
            pack=pack,
            **{**RUN, **settings},
        )
    except (UserError, ValueError) as error:
        return str(error)
    logs = [
        {name: value for name, value in log.items() if not any(part in name for part in MEASURED)}
        for log in trainer.state.log_history
    ]
    batches = [batch for update in trainer.get_train_dataloader() for batch in update]
    return {
        "weights": flat(trainer.model),
        "logs": logs,
        "updates": trainer.state.global_step,
        "places": sum(batch["input_ids"].numel() for batch in batches),
        "flos": trainer.state.total_flos,
        "seen": trainer.state.num_input_tokens_seen,
    }


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in sorted(READ) for value in READ[name]]
)
def test_argument_has_the_effect_of_padded_batches_or_is_refused(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    settings = {name: value}
    if "metrics" in name or name == "batch_eval_metrics":
        settings["compute_metrics"] = lambda *_, **__: {"rows": 1.0}
    packed = figures(tmp_path, True, **settings)
    first_lines = capsys.readouterr().out
    if isinstance(packed, str):
        assert "\n" not in packed
        assert name in packed or "max_tokens_per_batch" in packed
        return
    padded = figures(tmp_path, False, **settings)
    assert not isinstance(padded, str)
    torch.testing.assert_close(packed["weights"], padded["weights"], rtol=1e-4, atol=2e-6)
    assert packed["updates"] == padded["updates"]
    kind = settings.get("include_num_input_tokens_seen")
    counts_places = kind in ("all", True)
    assert len(packed["logs"]) == len(padded["logs"])
    for mine, theirs in zip(packed["logs"], padded["logs"], strict=True):
        if counts_places:
            mine.pop("num_input_tokens_seen", None)
            theirs.pop("num_input_tokens_seen", None)
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    epochs = packed["updates"]
    parameters = tiny_model(1, **SIZES).num_parameters(exclude_embeddings=True)
    for run in (packed, padded):
        assert run["flos"] == pytest.approx(6 * parameters * run["places"] * epochs)
        if kind == "non_padding":
            assert run["seen"] == SOURCE_TOKENS * epochs
        elif counts_places:
            assert run["seen"] == run["places"] * epochs > SOURCE_TOKENS * epochs
        else:
            assert run["seen"] == 0
    assert ("num_input_tokens_seen counts free places" in first_lines) == counts_places
