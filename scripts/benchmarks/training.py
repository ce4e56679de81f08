"""Training speed and memory: this package with token batches, and Marian with transformers' `Seq2SeqTrainer`.

All engines start from the same weights and train on the same pairs, with the same optimizer, dropout and label
smoothing. Between its turns a training waits inside a callback. Start-up and the first updates are not measured.
"""

import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging

from hf_vanilla_transformer.attention_vanilla_transformer import attention_kernels
from hf_vanilla_transformer.batches import encode_pairs
from hf_vanilla_transformer.batches.batching import TokenBatchSampler, pair_lengths
from hf_vanilla_transformer.configuration_vanilla_transformer import (
    PRESETS,
    VanillaTransformerConfig,
)
from hf_vanilla_transformer.corpora import load_pairs
from hf_vanilla_transformer.interop.marian import to_marian
from hf_vanilla_transformer.loss_vanilla_transformer import IGNORED
from hf_vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from hf_vanilla_transformer.training.run.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.trainer.trainer import VanillaTransformerTrainer
from hf_vanilla_transformer.utils.errors import UserError

from .harness import (
    Teams,
    Worker,
    check_choices,
    memory_mib,
    peak_memory_mib,
    requests,
    reset_peak_memory,
)
from .report import Measurement, family, precision

#: Transformer-tiny of Wu et al. 2021, the size of scripts/recipes/multi30k_en_de_tiny.yaml
TINY: dict[str, Any] = {
    "d_model": 128,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.3,
    "label_smoothing": 0.1,
}
SIZES = ("tiny", *PRESETS)
#: Arguments of each trainer. "ours" has the defaults: on a GPU packed rows, compiled.
SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours_graphs": {"torch_compile_mode": "reduce-overhead"},  # compiled, in CUDA graphs
    "ours_eager": {"torch_compile": False},
    "ours_padded": {"pack": False},
    "ours_padded_cudnn": {"pack": False},
    "marian": {"train_sampling_strategy": "random"},
    "marian_grouped": {"train_sampling_strategy": "group_by_length"},
    "marian_no_cudnn": {"train_sampling_strategy": "random"},
    "marian_grouped_no_cudnn": {"train_sampling_strategy": "group_by_length"},
}
ENGINES = tuple(f"{name}_{dtype}" for dtype in ("fp32", "bf16") for name in SETTINGS)

MAX_LENGTH = 256  # tokens per side, as in the recipes
RANDOM_LENGTH = 32  # tokens per side of a random pair
_ENDLESS = 1_000_000  # updates. The main process ends a training


class Turn(NamedTuple):
    """The turn of one process of an engine."""

    seconds: float
    target_tokens: int  # without padding
    tokens: int  # of both sides, without padding
    padded_tokens: int  # of both sides, with padding
    peak_mib: float | None
    # The peak above the memory before the first measured update: without weights and moments.
    step_mib: float | None


class BatchSizes(NamedTuple):
    """The batches and updates of every engine."""

    tokens: int  # `max_tokens_per_batch` of this package
    # Target tokens of an update, about. None: one batch in each process.
    tokens_per_update: int | None
    pairs: int  # per batch of transformers' trainer: this package's average
    accumulation: int  # batches per update of transformers' trainer


def compare(
    engines: Sequence[str],
    source: str | Path | None = None,
    target: str | Path | None = None,
    preset: Sequence[str] = ("base",),
    vocab_size: int = 16_000,
    tokens: int = 4096,
    tokens_per_update: int | None = None,
    updates: int = 2,
    rounds: int = 3,
    warm_up: int = 1,
    processes: Sequence[int] = (1,),
    threads: int = 1,
    device: str = "cpu",
) -> Iterator[Measurement]:
    """Train with every engine in turn, `updates` at a time, after a warm-up. An engine that fails is left out.

    Args:
        engines: names from `ENGINES`.
        source, target: raw parallel text. None trains on random pairs of 32 tokens per side, without padding, to
            compare memory.
        preset: names from `SIZES`.
        vocab_size: the model's vocabulary, and the limit of the tokenizer trained on the text.
        tokens, tokens_per_update: options of `VanillaTransformerTrainingArguments`. The batches and updates of
            transformers' trainer have the same number of pairs on average.
        updates, rounds: updates per turn, and turns of each engine.
        warm_up: updates before the first turn.
        processes: each engine is measured in each number of processes, with `threads` threads each.
        device: "cpu" or "cuda".

    Yields:
        Each measurement after its first round. Later rounds are added to it, as in `decoding.compare`.
    """
    check_choices(
        engines=(engines, ENGINES), preset=(preset, SIZES), device=([device], ["cpu", "cuda"])
    )
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: 'cuda' cannot be used here: torch sees no GPU")
    if (source is None) != (target is None):
        raise UserError("source and target go together; one of them is missing")
    with tempfile.TemporaryDirectory() as folder, Teams() as teams:
        data = prepare(Path(folder), source, target, preset, vocab_size, tokens)
        for size, count, engine in product(preset, dict.fromkeys(processes), engines):
            sizes = batch_sizes(data, tokens, tokens_per_update, count)
            args = engine, folder, size, sizes, device
            workers = [
                Worker(serve, *args, threads=threads, environment=each)
                for each in _environments(count)
            ]
            teams.add((engine, size, count), workers)
        for team in teams.engines():
            teams.receive(team)
        _warm_up(teams, warm_up)
        measured = {
            team: Measurement(team[0], {"preset": team[1], "processes": team[2]})
            for team in teams.engines()
        }
        for number, (team, one) in product(range(rounds), measured.items()):
            turns = teams.ask(team, "updates", updates)
            if turns:
                _add(one, turns)
            if turns and number == 0:
                yield one


def _warm_up(teams: Teams, updates: int) -> None:
    """Make the first updates. Those of this package, which compiles them on a GPU, at once: it takes a minute."""
    compiling = [team for team in teams.engines() if family(team[0]) == "ours"]
    for team in compiling:
        teams.send(team, "updates", updates)
    for team in teams.engines():
        if team not in compiling:
            teams.ask(team, "updates", updates)
    for team in compiling:
        teams.receive(team)
    for team in teams.engines():
        teams.ask(team, "reset_peak_memory")


def _add(measured: Measurement, turns: Sequence[Turn]) -> None:
    """Add a round, with the turn of each process. Its memory is the largest process's."""
    seconds, target_tokens, tokens, padded_tokens, peaks, steps = zip(*turns, strict=True)
    measured.add(max(seconds), sum(target_tokens), None if None in peaks else max(peaks))
    measured.more["padding"] = 1 - sum(tokens) / sum(padded_tokens)
    measured.more["peak MiB of the update"] = None if None in steps else max(steps)


# Shared by all engines: pairs, tokenizer, initial weights


def prepare(
    folder: Path,
    source: str | Path | None,
    target: str | Path | None,
    presets: Sequence[str],
    vocab_size: int,
    tokens: int,
    **fields: Any,
) -> Dataset:
    """Write the encoded pairs, the tokenizer and untrained models with these `fields` into a folder."""
    if source is not None:
        pairs, _ = load_pairs([source, str(target)], field="source and target")
        texts = (row[side] for side in ("source", "target") for row in pairs.select_columns([side]))
        tokenizer = train_tokenizer(texts, vocab_size)
        limits: dict[str, Any] = {"max_source_length": MAX_LENGTH, "max_target_length": MAX_LENGTH}
        data, _ = encode_pairs(pairs, tokenizer, **limits, drop_too_long=True)
    else:
        tokenizer = train_tokenizer(["no text"], min(vocab_size, 300))
        data = random_pairs(vocab_size, tokens)
    data.save_to_disk(folder / "data")
    save_tokenizers(folder / "tokenizer", tokenizer, tokenizer)
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("bos", "pad", "eos", "unk")
    }
    for preset in presets:
        set_seed(1)
        config = config_of(
            preset, vocab_size, **ids, decoder_start_token_id=tokenizer.bos_token_id, **fields
        )
        VanillaTransformerForConditionalGeneration(config).save_pretrained(folder / preset)
    return load_from_disk(folder / "data")


def config_of(preset: str, vocab_size: int, **fields: Any) -> VanillaTransformerConfig:
    """The configuration of one of `SIZES`."""
    if preset == "tiny":
        return VanillaTransformerConfig(**{**TINY, "vocab_size": vocab_size, **fields})
    return VanillaTransformerConfig.from_preset(preset, vocab_size=vocab_size, **fields)


def random_pairs(vocab_size: int, tokens: int) -> Dataset:
    """Pairs of `RANDOM_LENGTH` random tokens per side, enough for 16 batches."""
    generator = np.random.default_rng(1)
    shape = 16 * -(-tokens // RANDOM_LENGTH), RANDOM_LENGTH
    sides = {
        side: generator.integers(4, vocab_size, shape).tolist() for side in ("input_ids", "labels")
    }
    return Dataset.from_dict({**sides, "length": [RANDOM_LENGTH] * shape[0]})


def batch_sizes(
    data: Dataset, tokens: int, tokens_per_update: int | None, processes: int
) -> BatchSizes:
    """The sizes of batches. transformers' trainer gets this package's average number of pairs."""
    sampler = TokenBatchSampler(
        *pair_lengths(data),
        tokens,
        tokens_per_update=tokens_per_update,
        batches_per_update=processes,
    )
    batches = len(sampler.tokens)
    accumulation = max(1, round(batches / len(sampler) / processes))
    return BatchSizes(tokens, tokens_per_update, max(1, round(len(data) / batches)), accumulation)


# Worker processes


def _environments(processes: int) -> list[dict[str, str]]:
    """The environment variables that a launcher sets for each of several processes."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def serve(
    pipe: Connection, engine: str, folder: str, preset: str, sizes: BatchSizes, device: str
) -> None:
    """Train an engine in a worker process."""
    logging.set_verbosity_error()
    trainer = make_trainer(engine, Path(folder), preset, sizes, device)
    trainer.add_callback(TurnCallback(pipe, trainer, on_gpu=device == "cuda"))
    # torch lets cuDNN compute attention, and the trainer of this package leaves it out
    without = "auto" if engine.rpartition("_")[0].endswith("_no_cudnn") else "torch"
    with attention_kernels(without, torch.device(device)):
        trainer.train()


class TurnCallback(TrainerCallback):
    """Counts tokens, and pauses a training between updates until the main process requests more or closes the pipe.

    In a pause the memory that torch keeps on a GPU is for the other engines: two trainings of the big size by stock
    trainers do not fit into 80 GB. The first update of a turn, which allocates it again, is not measured there.
    """

    def __init__(self, pipe: Connection, trainer: Any, on_gpu: bool):
        self.pipe = pipe
        self.on_gpu = on_gpu
        self.allocates = False
        self.updates_left = 0
        self.start = 0.0
        self.before_mib: float | None = None
        self.counts: Any = 0  # a tensor, so that counting does not synchronise the device
        self.step = trainer.training_step
        trainer.training_step = self._counted_step

    def _counted_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for batch in inputs if isinstance(inputs, list) else [inputs]:
            labels = batch["labels"]
            # Packed rows have numbers of segments, 0 for free places.
            mask = batch["segment_ids"].ne(0) if "segment_ids" in batch else batch["attention_mask"]
            target_tokens = labels.ne(IGNORED).sum()
            padded_tokens = torch.full_like(target_tokens, labels.numel() + mask.numel())
            self.counts = self.counts + torch.stack(
                [target_tokens, target_tokens + mask.sum(), padded_tokens]
            )
        return self.step(model, inputs, *args, **kwargs)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.pipe.send("ready")
        self._wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.allocates:
            self.allocates = False
            self._start()
            return
        self.updates_left -= 1
        if self.updates_left:
            return
        self._synchronize()
        seconds = time.perf_counter() - self.start
        peak = peak_memory_mib(self.on_gpu)
        step = None if peak is None or self.before_mib is None else peak - self.before_mib
        target_tokens, tokens, padded_tokens = self.counts.tolist()
        if self.on_gpu:
            torch.cuda.empty_cache()
        self.pipe.send(Turn(seconds, target_tokens, tokens, padded_tokens, peak, step))
        self._wait()

    def _wait(self) -> None:
        for request, args in requests(self.pipe):
            if request == "updates":
                (self.updates_left,) = args
                self.allocates = self.on_gpu
                self._start()
                return
            reset_peak_memory(self.on_gpu)
            self.before_mib = memory_mib(self.on_gpu)
            self.pipe.send(None)
        sys.exit()

    def _start(self) -> None:
        self.counts = 0
        self._synchronize()
        self.start = time.perf_counter()

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def make_trainer(
    engine: str, folder: Path, preset: str, sizes: BatchSizes, device: str
) -> Seq2SeqTrainer:
    """The trainer of an engine, with the files of `prepare`."""
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder / preset)
    smoothing = model.config.label_smoothing
    ours = family(engine) == "ours"
    name = engine.rpartition("_")[0]
    if not ours:
        model = to_marian(model)
    elif name.endswith("_cudnn"):
        model.config.attention_kernels = "torch"
    common = {
        "output_dir": str(folder / "none"),
        "max_steps": _ENDLESS,
        "bf16": precision(engine) == "bf16",
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": device != "cpu",
        "learning_rate": 4000**-0.5 * model.config.d_model**-0.5,
        "lr_scheduler_type": "inverse_sqrt",
        "warmup_steps": 4000,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 1,
        "ddp_find_unused_parameters": False,
    }
    args: Seq2SeqTrainingArguments
    if ours:
        args = VanillaTransformerTrainingArguments(
            **common,
            **SETTINGS[name],
            max_tokens_per_batch=sizes.tokens,
            tokens_per_update=sizes.tokens_per_update,
        )
    else:
        args = Seq2SeqTrainingArguments(
            **common,
            per_device_train_batch_size=sizes.pairs,
            gradient_accumulation_steps=sizes.accumulation,
            **SETTINGS[name],
            label_smoothing_factor=smoothing,
        )
    tokenizer, _ = load_tokenizers(folder / "tokenizer")
    return (VanillaTransformerTrainer if ours else Seq2SeqTrainer)(
        model=model,
        args=args,
        train_dataset=load_from_disk(folder / "data"),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )
