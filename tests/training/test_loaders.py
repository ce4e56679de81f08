"""The loaders of packed rows: read ahead in a thread, or in worker processes if the pairs change."""

import threading
from pathlib import Path

import pytest
import torch
from accelerate import skip_first_batches
from datasets import Dataset
from safetensors.torch import load_file
from torch.testing import assert_close
from torch.utils.data import DataLoader

from hf_vanilla_transformer import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.batches import encode_pairs, with_augmentation
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.training.trainer import loaders
from hf_vanilla_transformer.training.trainer.loaders import ReadAheadLoader
from tests.model_helpers import tiny_model
from tests.trainer_helpers import make_trainer, padding_collator, random_pairs, trained

PACKED = {
    "max_tokens_per_batch": 60,
    "tokens_per_update": 60,
    "pack": True,
    "data_collator": padding_collator(None),
}


class Numbers(torch.utils.data.Dataset):
    """The numbers 0 to 5. `made` has those that were asked for, and `broken` raises an error."""

    def __init__(self, broken: int | None = None):
        self.broken = broken
        self.made = []
        self.second = threading.Event()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        self.made.append(number)
        if number == 1:
            self.second.set()
        if number == self.broken:
            raise ArithmeticError(f"number {number}")
        return number


def reading_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("read_ahead")]


def test_next_item_is_made_while_the_caller_works() -> None:
    data = Numbers()
    items = iter(ReadAheadLoader(data, batch_size=None))
    assert next(items) == 0
    assert data.second.wait(60), "the second is made before it is asked for"
    assert data.made == [0, 1], "and no further one"
    assert list(items) == [1, 2, 3, 4, 5]
    assert not reading_threads()


def test_thread_ends_with_an_iteration_that_is_left_early() -> None:
    items = iter(ReadAheadLoader(Numbers(), batch_size=None))
    next(items)
    assert len(reading_threads()) == 1
    del items
    assert not reading_threads()


def test_error_in_the_thread_is_raised_in_its_place() -> None:
    items = iter(ReadAheadLoader(Numbers(broken=2), batch_size=None))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ArithmeticError, match="number 2"):
        next(items)
    assert not reading_threads()


def test_updates_read_ahead_are_those_of_a_plain_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, random_pairs(64), **PACKED)
    plain = trainer.get_train_dataloader()
    monkeypatch.setattr(VanillaTransformerTrainingArguments, "device", torch.device("cuda"))
    ahead = trainer.get_train_dataloader()
    assert type(plain) is DataLoader
    assert type(ahead) is ReadAheadLoader
    for epoch in range(2):
        plain.batch_sampler.set_epoch(epoch)
        ahead.batch_sampler.set_epoch(epoch)
        expected = list(plain)
        assert len(expected) > 3
        assert_close(list(ahead), expected, rtol=0, atol=0)
        assert_close(
            list(skip_first_batches(ahead, 2)),
            expected[2:],
            rtol=0,
            atol=0,
        )


def test_run_that_reads_ahead_resumes_to_the_bytes_of_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, resume: Path | None = None) -> dict[str, torch.Tensor]:
        trained(
            tmp_path / name,
            random_pairs(64),
            tiny_model(dropout=0.3),
            resume=resume,
            save_strategy="steps",
            save_steps=2,
            max_steps=5,
            learning_rate=0.01,
            **PACKED,
        )
        return load_file(tmp_path / name / "checkpoint-5" / "model.safetensors")

    plain = run("plain")
    monkeypatch.setattr(loaders, "DataLoader", ReadAheadLoader)
    for weights in (run("ahead"), run("resumed", tmp_path / "ahead" / "checkpoint-2")):
        assert_close(weights, plain, rtol=0, atol=0)
    assert not reading_threads()


def test_workers_pack_pairs_that_change(tmp_path: Path) -> None:
    pairs = [
        {"source": f"{one} dog {two}", "target": f"{two} Hund {one}"}
        for one in "abcdef"
        for two in "ghij"
    ]
    tokenizer = train_tokenizer([text for pair in pairs for text in pair.values()], 270)
    encoded, _ = encode_pairs(Dataset.from_list(pairs), tokenizer, drop_too_long=True)
    data = with_augmentation(encoded, tokenizer, augment={"merge": 0.5}, seed=1)
    updates = []
    for workers in (0, 1):
        trainer = make_trainer(
            tmp_path,
            data,
            tiny_model(vocab_size=len(tokenizer)),
            dataloader_num_workers=workers,
            **PACKED,
        )
        loader = trainer.get_train_dataloader()
        assert loader.num_workers == workers
        updates.append(list(loader))
    assert_close(updates[1], updates[0], rtol=0, atol=0)
    unchanged = make_trainer(tmp_path, random_pairs(64), dataloader_num_workers=1, **PACKED)
    assert unchanged.get_train_dataloader().num_workers == 0
