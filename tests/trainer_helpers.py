"""Random sentence pairs, settings and launchers that the tests of training share."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vanilla_transformer import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.run.recipes import parse_recipe
from hf_vanilla_transformer.training.run.run import run_training
from hf_vanilla_transformer.training.state.checkpoints import complete_checkpoints
from hf_vanilla_transformer.training.trainer.objectives import consistency
from tests.model_helpers import (
    PAD,
    SMALL_SIZES,
    SPECIAL_TOKENS,
    padded,
    sentences,
    tiny_model,
    word_tokenizer,
)
from tests.model_helpers import error_of as error_of

Rows = list[dict[str, list[int]]]

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
}
# Plain gradient descent: Adam would amplify rounding errors, because it normalises the gradients.
DESCENT = {
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}

# A whole run (`run_training`, `vanilla-transformer train`) whose steps take milliseconds.
TINY_RUN: dict[str, Any] = {
    **SMALL_SIZES,
    "vocab_size": 280,
    "logging_steps": 1,
    "generation_max_length": 5,
    "disable_tqdm": True,
    "use_cpu": True,
}

SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 1,
    "learning_rate": 0.01,
}

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def as_flags(fields: dict[str, Any]) -> list[str]:
    """Recipe fields as command-line flags."""
    flags = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *map(str, values)]
    return flags


def run_tiny(folder: Path, *first: Any, **fields: Any) -> dict[str, Any]:
    """Train a `TINY_RUN` with these fields and flags, without those that are None. Return its results."""
    chosen = TINY_RUN | fields | {"output_dir": folder}
    flags = as_flags({name: value for name, value in chosen.items() if value is not None})
    return run_training(*parse_recipe([*map(str, first), *flags]))


def write_pairs(folder: Path, pairs: list[tuple[str, str]], *splits: str) -> dict[str, list[Path]]:
    """Write the sides of these splits (`train` by default) into the folder. Return the fields that name the files."""
    folder.mkdir(exist_ok=True)
    fields = {}
    for split in splits or ("train",):
        files = [folder / f"{split}.source", folder / f"{split}.target"]
        for file, lines in zip(files, zip(*pairs, strict=True), strict=True):
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fields[split] = files
    return fields


def assert_same_model(first: Path, second: Path, rtol: float = 0, atol: float = 0) -> None:
    """The saved weights of two folders are equal, or within tolerances."""
    expected, actual = (load_file(folder / "model.safetensors") for folder in (first, second))
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def saved_steps(folder: Path) -> list[int]:
    """The updates of the complete checkpoints of a run."""
    return [int(path.name.removeprefix("checkpoint-")) for path in complete_checkpoints(folder)]


def change_json(file: Path, **fields: Any) -> None:
    """Change these fields of an object in a file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | fields), encoding="utf-8")


def random_pairs(count: int, seed: int = 0) -> Rows:
    """Random sentences of 1 to 12 tokens with random translations."""
    dice = random.Random(seed)

    def drawn(seed: int) -> list[list[int]]:
        lengths = [dice.randint(1, 12) for _ in range(count)]
        return sentences(lengths, seed=seed)

    pairs = zip(drawn(seed), drawn(seed + 1), strict=True)
    return [{"input_ids": source, "labels": target} for source, target in pairs]


def collate(rows: Rows) -> dict[str, Tensor]:
    source = padded([row["input_ids"] for row in rows])
    labels = padded([row["labels"] for row in rows], value=-100)
    return {
        "input_ids": source,
        "attention_mask": source.ne(PAD).long(),
        "labels": labels,
    }


def padding_collator(model: Any) -> DataCollatorForSeq2Seq:
    """transformers' own collator, with a tokenizer of forty tokens."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(4, 40))]
    return DataCollatorForSeq2Seq(word_tokenizer(words, **SPECIAL_TOKENS), model=model)


ARGUMENTS_OF_TRAINER = (
    "data_collator",
    "callbacks",
    "compute_loss_func",
    "compute_metrics",
    "eval_dataset",
    "preprocess_logits_for_metrics",
    "processing_class",
    "target_tokenizer",
)


def make_trainer(
    folder: Path,
    data: Any = None,
    model: Any = None,
    kind: Any = VanillaTransformerTrainer,
    **settings: Any,
) -> Any:
    """A quiet trainer, by default of a tiny model on 32 random pairs.

    Args:
        kind: its class.
        **settings: training arguments, and some arguments of the trainer.
    """
    others = {name: settings.pop(name) for name in ARGUMENTS_OF_TRAINER if name in settings}
    arguments = (
        Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else VanillaTransformerTrainingArguments
    )
    return kind(
        model=model or tiny_model(),
        args=arguments(output_dir=str(folder), **{**QUIET, **settings}),
        train_dataset=random_pairs(32) if data is None else data,
        **{"data_collator": collate, **others},
    )


def trained(*arguments: Any, resume: Any = None, **settings: Any) -> Any:
    """`make_trainer` after its training from a fixed seed, or from a checkpoint."""
    torch.manual_seed(7)
    trainer = make_trainer(*arguments, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class FailingBackward(torch.autograd.Function):
    """A graph whose backward pass cannot be compiled, which torch does when it runs."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no compiler\nis here")


class EntropyLoss(VanillaTransformerTrainer):
    """Adds to the loss what a user computes from the logits, as a mean over the target tokens of the update."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        p = outputs.logits.softmax(-1)
        entropy = (p * p.log()).sum(-1)[inputs["labels"] != -100]
        mean = entropy.sum() / num_items_in_batch
        loss = loss + 0.1 * mean * self.accelerator.num_processes  # DDP divides by it
        return (loss, outputs) if return_outputs else loss


class BadGradient(VanillaTransformerTrainer):
    """A finite loss whose derivative is `number`, for the pairs that start with a certain token, in one update."""

    number = float("nan")
    update: int | None = 3  # from 0
    token: int | None = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        due = self.update is None or self.state.global_step == self.update
        if due and (self.token is None or bool((inputs["input_ids"] == self.token).any())):
            loss.register_hook(lambda gradient: gradient * self.number)
        return (loss, outputs) if return_outputs else loss


def with_one_token(count: int, pair: int = 17, token: int = 39) -> Rows:
    """`random_pairs`, of which one starts with a token that no other has."""
    rows = random_pairs(count)
    for row in rows:
        row["input_ids"] = [min(each, token - 1) for each in row["input_ids"]]
    rows[pair]["input_ids"].insert(0, token)
    return rows


def everything_on(folder: Path, resume: Any = None, dropout: float = 0.0, **settings: Any) -> Any:
    """A trained run with a user's loss, an adapter, two tokenizers with different special tokens, and an average."""
    peft = pytest.importorskip("peft", reason="needs PEFT")
    torch.manual_seed(3)
    lora = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "fc1"],
        lora_dropout=dropout,
        init_lora_weights=False,
    )
    model = tiny_model(
        decoder_vocab_size=44,
        share_encoder_decoder_embeddings=False,
        label_smoothing=0.1,
    )
    return trained(
        folder,
        model=peft.get_peft_model(model, lora),
        kind=EntropyLoss,
        resume=resume,
        processing_class=word_tokenizer(["<s>", "<pad>", "</s>", "<unk>"], **SPECIAL_TOKENS),
        target_tokenizer=word_tokenizer(["<unk>", "a", "</s>", "<s>", "<pad>"], **SPECIAL_TOKENS),
        ema_decay=0.5,
        **settings,
    )


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@contextmanager
def fixed_second_pass(model: Any, method: str) -> Iterator[None]:
    """Make the second pass of SimCut or R-Drop differ from the first one by no random number, so that updates can be
    compared however a batch is split: SimCut zeroes certain tokens, and in place of dropout R-Drop's is scaled."""

    def scale(module: Any, ids: Any, embeddings: Tensor) -> Tensor:
        first, second = embeddings.chunk(2)
        return torch.cat([first, 0.8 * second])

    with pytest.MonkeyPatch.context() as patch, ExitStack() as hooks:
        if method == "simcut":
            patch.setattr(consistency, "random_mask", lambda ids, probability: ids % 7 != 3)
        else:
            hooks.enter_context(model.model.encoder.embed_tokens.register_forward_hook(scale))
        yield


def consistency_update(method: str, size: int, steps: int, folder: Path, **settings: Any) -> Tensor:
    """The change of the weights in two updates of gradient descent with SimCut or R-Drop, from 32 pairs each."""
    model = tiny_model(label_smoothing=0.1)
    before = flat(model)
    settings = {
        **DESCENT,
        "learning_rate": 0.2,
        "max_steps": 2,
        **settings,
        f"{method}_alpha": 3.0,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
    }
    with fixed_second_pass(model, method):
        trained(folder, None, model, **settings)
    return flat(model) - before


def uninitialised(kind: type, **attributes: Any) -> Any:
    """An object of a class whose `__init__` has not run, with these attributes."""
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def numpy_log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def launch(repository: Path, *command: str, succeeds: bool = True) -> subprocess.CompletedProcess:
    """Run a command on CPUs, with the package and the tests on its path."""
    run = subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (run.returncode == 0) is succeeds, run.stdout[-2000:] + run.stderr[-6000:]
    return run
