"""The declared tensor-parallel and FSDP plans: a model over two processes equals the model in one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, distributed, multiprocessing
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from tests.model_helpers import (
    TYING_MODES,
    assert_near,
    assert_same_gradients,
    gradients,
    tiny_model,
    translation_batch,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.23")
        or Version(torch.__version__) < Version("2.9"),
        reason="older versions of transformers and torch distribute models differently",
    ),
]

PROCESSES = 2


def load(folder: Path, **sizes: int) -> PreTrainedModel:
    options = {"distributed_config": sizes} if sizes else {}
    return AutoModelForSeq2SeqLM.from_pretrained(folder, **options)


def full(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The full tensors of those that are a `DTensor`."""
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in tensors.items()
    }


def local_size(model: PreTrainedModel) -> int:
    """The number of parameters on this rank."""
    local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return sum(tensor.numel() for tensor in local)


def check_tensor_parallel(rank: int, folder: Path) -> None:
    """Tensor parallelism: every rank reads every sentence."""
    alone = load(folder)
    distributed_model = load(folder, tp_size=PROCESSES)
    assert local_size(distributed_model) < 0.6 * local_size(alone)
    batch = translation_batch([7, 4, 6], [5, 6, 3])
    with torch.no_grad():
        assert_near(distributed_model(**batch).logits, alone(**batch).logits, what="logits")
        for beams in (1, 4):
            settings = {
                "inputs": batch["input_ids"],
                "attention_mask": batch["attention_mask"],
                "num_beams": beams,
                "max_new_tokens": 9,
            }
            written = distributed_model.generate(**settings)
            assert written.tolist() == alone.generate(**settings).tolist()
    loss, found = gradients(distributed_model.train(), **batch)
    expected_loss, expected = gradients(alone.train(), **batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_same_gradients(full(found), expected)


def check_fsdp(rank: int, folder: Path) -> None:
    """Fully sharded data parallelism: each rank reads different sentences and stores a part of every matrix."""
    alone = load(folder)
    distributed_model = load(folder, fsdp_size=PROCESSES)
    assert local_size(distributed_model) < 0.6 * local_size(alone)
    batch = translation_batch([7, 4, 6], [5, 6, 3])
    rows = slice(1) if rank == 0 else slice(1, None)
    own = {name: tensor[rows] for name, tensor in batch.items()}
    with torch.no_grad():
        assert_near(distributed_model(**own).logits, alone(**own).logits, what="logits")
    target_tokens = int(batch["labels"].ne(-100).sum())
    expected_loss, expected = gradients(alone.train(), **batch)
    loss = distributed_model.train()(**own, num_items_in_batch=target_tokens).loss
    (loss * PROCESSES).backward()  # FSDP averages the gradients over ranks
    total = loss.detach()
    distributed.all_reduce(total)
    assert total.item() == pytest.approx(expected_loss, rel=1e-5)
    found = {name: parameter.grad for name, parameter in distributed_model.named_parameters()}
    assert_same_gradients(full(found), expected)
    # The ranks save one unsharded checkpoint.
    distributed_model.save_pretrained(folder / "again", is_main_process=rank == 0)
    distributed.barrier()
    again = load(folder / "again").state_dict()
    assert all(tensor.equal(again[name]) for name, tensor in alone.state_dict().items())


def run_rank(rank: int, check: Callable[[int, Path], None], folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=PROCESSES,
    )
    try:
        for model_folder in sorted(path for path in folder.iterdir() if path.is_dir()):
            check(rank, model_folder)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    "check", [check_tensor_parallel, check_fsdp], ids=["tensor_parallel", "fsdp"]
)
def test_distributed_model_equals_the_local_one(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two processes on one GPU would deadlock
    for share, tie in TYING_MODES:
        model = tiny_model(
            share_encoder_decoder_embeddings=share,
            tie_word_embeddings=tie,
            vocab_size=41,
            lm_head_bias=True,
            final_layer_norm=True,
            label_smoothing=0.1,
        )
        model.save_pretrained(tmp_path / f"share_{share}_tie_{tie}")
    multiprocessing.spawn(run_rank, (check, tmp_path), nprocs=PROCESSES)
