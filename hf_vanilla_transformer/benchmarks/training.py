"""How fast models are trained: this package with batches of tokens, and Marian with the stock `Seq2SeqTrainer`.

All engines start from the same weights and train on the same pairs, with the same optimizer, dropout and label
smoothing, in turn, each in a process of its own (`side_by_side`) that waits in the middle of its training while
others train. Start-up and the first updates are left out.
"""

import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback, set_seed
from transformers.utils import logging

from ..configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from ..data import encode_pairs, load_pairs, load_tokenizers, save_tokenizers, train_tokenizer
from ..data.batching import TokenBatchSampler, pair_lengths
from ..errors import UserError
from ..interop.marian import to_marian
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..training.arguments import VanillaTransformerTrainingArguments
from ..training.progress import IGNORED
from ..training.trainer import VanillaTransformerTrainer
from .harness import Worker, family, forget_peak, held_mib, peak_mib, precision, requests, spread

#: Transformer-tiny of Wu et al. 2021, the size of scripts/recipes/multi30k_en_de_tiny.yaml
TINY: dict[str, int] = {
    **{"d_model": 128, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
SIZES = ("tiny", *PRESETS)
#: engine → how the stock trainer draws its batches; None for this package
ORDERS: dict[str, str | None] = {"ours": None, "marian": "random", "marian_grouped": "group_by_length"}
ENGINES = tuple(f"{name}_{dtype}" for dtype in ("fp32", "bf16") for name in ORDERS)

LIMIT = 256  # tokens of a side, as in the recipes
INVENTED_LENGTH = 32  # tokens of each side of a pair without text
_ENDLESS = 1_000_000  # updates: the one that asks decides when a training is over


@dataclass(frozen=True)
class Setting:
    """What every engine is to do.

    Attributes:
        tokens: `max_tokens_per_batch` of this package.
        tokens_per_update: target tokens of an update, about; None for one batch in each process.
        device: "cpu" or "cuda".
        sentences, accumulation: batches of the stock trainer: as many pairs in a batch and in an update as this
            package has on average, so that an update means as much to all.
    """

    tokens: int
    tokens_per_update: int | None
    device: str
    sentences: int = 0
    accumulation: int = 1


@dataclass
class Turn:
    """What an engine did while it was its turn, in one process."""

    seconds: float
    target_tokens: int  # without padding
    tokens: int  # of both sides, without padding
    padded: int  # the same with padding


@dataclass
class Measurement:
    """One engine in so many processes; a figure a round."""

    engine: str
    processes: int
    updates: int  # a round
    seconds: list[float]
    target_tokens: list[int]
    padding: float  # share of the tokens of both sides
    peak_mib: float | None  # of the largest process, the model and all else included; or on the GPU
    step_mib: float | None  # the same less what it held before the update: weights and the optimizer's state
    rates: list[float] = field(init=False)  # target tokens per second, without padding

    def __post_init__(self) -> None:
        self.rates = [words / taken for words, taken in zip(self.target_tokens, self.seconds, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Of the median round."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """The fastest round less the slowest, over the median."""
        return spread(self.rates)


def compare(
    engines: Sequence[str],
    source: str | Path | None = None,
    target: str | Path | None = None,
    preset: str = "base",
    vocab_size: int = 16_000,
    tokens: int = 4096,
    tokens_per_update: int | None = None,
    updates: int = 2,
    rounds: int = 3,
    warm_up: int = 1,
    processes: Sequence[int] = (1,),
    threads: int = 1,
    device: str = "cpu",
    dropout: float | None = None,
    label_smoothing: float | None = None,
) -> list[Measurement]:
    """Train with every engine, `updates` at a time in turn, after some that do not count.

    Args:
        engines: of `ENGINES`.
        source, target: parallel text, raw; without, invented pairs of 32 tokens a side, so that nothing is padded:
            for memory.
        preset: of `SIZES`. vocab_size: words of the model, and at most so many of the tokenizer trained on the text.
        tokens, tokens_per_update: of this package (`VanillaTransformerTrainingArguments`); the stock trainer's
            batches and updates have as many pairs on average.
        updates: of one turn. rounds: turns of each engine. warm_up: updates before the first.
        processes: each engine is measured in each number of processes, of `threads` threads each.
        device: "cpu" or "cuda".
        dropout, label_smoothing: None for the preset's.

    Raises:
        UserError: no such engine, preset or device, or text that cannot be read.
    """
    _check(engines, preset, device, source, target)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {"dropout": dropout, "label_smoothing": label_smoothing}
        given = {name: value for name, value in chosen.items() if value is not None}
        data = prepare(Path(folder), source, target, preset, vocab_size, tokens, given)
        settings = {
            count: setting(data, tokens, tokens_per_update, count, device) for count in dict.fromkeys(processes)
        }
        with _teams(engines, folder, settings, threads) as teams:
            for team in teams.values():
                _ask(team, "updates", warm_up)
                _ask(team, "forget_peak")
            turns: dict[tuple[str, int], list[list[Turn]]] = {key: [] for key in teams}
            for _ in range(rounds):
                for key, team in teams.items():
                    turns[key].append(_ask(team, "updates", updates))
            return [
                _measurement(*key, updates, turns[key], _ask(team, "peak_mib"), _ask(team, "before_mib"))
                for key, team in teams.items()
            ]


def _check(engines: Sequence[str], preset: str, device: str, source: Any, target: Any) -> None:
    for name, given, known in (
        ("engines", engines, ENGINES),
        ("preset", [preset], SIZES),
        ("device", [device], ["cpu", "cuda"]),
    ):
        if unknown := set(given) - set(known):
            raise UserError(f"{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: 'cuda' cannot be used here: torch sees no GPU")
    if (source is None) != (target is None):
        raise UserError("source and target go together; one of them is missing")


def _measurement(
    engine: str, processes: int, updates: int, rounds: list[list[Turn]], peaks: list, before: list
) -> Measurement:
    padded, real = (sum(getattr(turn, name) for team in rounds for turn in team) for name in ("padded", "tokens"))
    known = [(peak, held) for peak, held in zip(peaks, before, strict=True) if peak is not None]
    return Measurement(
        engine=engine,
        processes=processes,
        updates=updates,
        seconds=[max(turn.seconds for turn in team) for team in rounds],
        target_tokens=[sum(turn.target_tokens for turn in team) for team in rounds],
        padding=1 - real / padded,
        peak_mib=max((peak for peak, _ in known), default=None),
        step_mib=max((peak - held for peak, held in known if held is not None), default=None),
    )


# What all engines share: pairs, tokenizer, weights


def prepare(
    folder: Path,
    source: str | Path | None,
    target: str | Path | None,
    preset: str,
    vocab_size: int,
    tokens: int,
    chosen: Mapping[str, Any],
) -> Dataset:
    """Write the encoded pairs, the tokenizer and a fresh model where the engines find them."""
    if source is not None:
        pairs, _ = load_pairs(source_file=source, target_file=target)
        texts = (row[side] for side in ("source", "target") for row in pairs.select_columns([side]))
        tokenizer = train_tokenizer(texts, vocab_size)
        limits = {"max_source_length": LIMIT, "max_target_length": LIMIT}
        data, _ = encode_pairs(pairs, tokenizer, **limits, drop_too_long=True)
    else:
        tokenizer = train_tokenizer(["no text"], min(vocab_size, 300))
        data = invented_pairs(vocab_size, tokens)
    data.save_to_disk(folder / "data")
    save_tokenizers(folder / "tokenizer", tokenizer, tokenizer)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "eos", "unk")}
    set_seed(1)
    fields = {"vocab_size": vocab_size, **ids, "decoder_start_token_id": tokenizer.bos_token_id, **chosen}
    try:
        if preset == "tiny":
            config = VanillaTransformerConfig(**{"dropout": 0.3, "label_smoothing": 0.1, **TINY, **fields})
        else:
            config = VanillaTransformerConfig.from_preset(preset, **fields)
    except ValueError as error:
        raise UserError(str(error)) from None
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder / "model")
    return load_from_disk(folder / "data")


def invented_pairs(vocab_size: int, tokens: int, batches: int = 16) -> Dataset:
    """Pairs of `INVENTED_LENGTH` random tokens a side, enough for so many batches."""
    dice = np.random.default_rng(1)
    shape = batches * -(-tokens // INVENTED_LENGTH), INVENTED_LENGTH
    sides = {side: dice.integers(4, vocab_size, shape).tolist() for side in ("input_ids", "labels")}
    return Dataset.from_dict({**sides, "length": [INVENTED_LENGTH] * shape[0]})


def setting(data: Dataset, tokens: int, tokens_per_update: int | None, processes: int, device: str) -> Setting:
    """What to do in so many processes, with batches of the stock trainer that are like ours."""
    sampler = TokenBatchSampler(
        *pair_lengths(data), tokens, tokens_per_update=tokens_per_update, batches_per_update=processes
    )
    batches = len(sampler.tokens)
    sentences = max(1, round(len(data) / batches))
    accumulation = max(1, round(batches / len(sampler) / processes))
    return Setting(tokens, tokens_per_update, device, sentences, accumulation)


# Engines in turn

Team = list[Worker]  # the processes of one engine


@contextmanager
def _teams(
    engines: Sequence[str], folder: str, settings: Mapping[int, Setting], threads: int
) -> Iterator[dict[tuple[str, int], Team]]:
    teams: dict[tuple[str, int], Team] = {}
    try:
        for count, what in settings.items():
            for engine in engines:
                team = teams[engine, count] = []
                for environment in _environments(count):
                    team.append(
                        Worker(_serve, engine, folder, what, threads=threads, environment=environment, wait=False)
                    )
                for worker in team:  # they wait for each other first
                    worker.receive()
        yield teams
    finally:
        for worker in (each for team in teams.values() for each in team):
            worker.stop()


def _environments(processes: int) -> list[dict[str, str]]:
    """What a launcher would tell each of several processes."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    return [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _ask(team: Team, what: str, *args: Any) -> list[Any]:
    for worker in team:
        worker.send(what, *args)
    return [worker.receive() for worker in team]


def _serve(pipe: Connection, engine: str, folder: str, what: Setting) -> None:
    logging.set_verbosity_error()
    trainer = make_trainer(engine, Path(folder), what)
    counter = Counter(trainer)
    trainer.add_callback(Turns(pipe, counter, on_gpu=what.device == "cuda"))
    trainer.train()


class Counter:
    """Counts the tokens that a trainer trains on."""

    def __init__(self, trainer: Any):
        self._step = trainer.training_step
        trainer.training_step = self._counted
        self.forget()

    def forget(self) -> None:
        """Begin at nothing."""
        self.target_tokens: Any = 0  # tensors, so that no device is waited for
        self.tokens: Any = 0
        self.padded = 0

    def _counted(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for batch in inputs if isinstance(inputs, list) else [inputs]:
            labels, mask = batch["labels"], batch["attention_mask"]
            words = labels.ne(IGNORED).sum()
            self.target_tokens = self.target_tokens + words
            self.tokens = self.tokens + words + mask.sum()
            self.padded += labels.numel() + mask.numel()
        return self._step(model, inputs, *args, **kwargs)


class Turns(TrainerCallback):
    """Lets a training wait, between two updates, until it is asked for more; ends it when nobody is there to ask."""

    def __init__(self, pipe: Connection, counter: Counter, on_gpu: bool):
        self.pipe, self.counter, self.on_gpu = pipe, counter, on_gpu
        self.left, self.start = 0, 0.0
        self.held: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.pipe.send("ready")
        self._wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left:
            return
        self._synchronize()
        seconds, counter = time.perf_counter() - self.start, self.counter
        self.pipe.send(Turn(seconds, int(counter.target_tokens), int(counter.tokens), counter.padded))
        self._wait()

    def _wait(self) -> None:
        for what, args in requests(self.pipe):
            if what == "updates":
                (self.left,) = args
                self.counter.forget()
                self._synchronize()
                self.start = time.perf_counter()
                return
            self.pipe.send(self._answer(what))
        sys.exit()

    def _answer(self, what: str) -> float | None:
        if what == "peak_mib":
            return peak_mib(self.on_gpu)
        if what == "before_mib":
            return self.held
        forget_peak(self.on_gpu)
        self.held = held_mib(self.on_gpu)
        return None

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


# Engines


def make_trainer(engine: str, folder: Path, what: Setting) -> Seq2SeqTrainer:
    """The trainer of an engine, with what `prepare` wrote."""
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder / "model")
    smoothing = model.config.label_smoothing
    ours = family(engine) == "ours"
    if not ours:
        model = to_marian(model)
    common = {
        "output_dir": str(folder / "none"),
        "max_steps": _ENDLESS,
        "bf16": precision(engine) == "bf16",
        "use_cpu": what.device == "cpu",
        "dataloader_pin_memory": what.device != "cpu",
        "learning_rate": 4000**-0.5 * model.config.d_model**-0.5,
        **{"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 4000, "adam_beta2": 0.98, "adam_epsilon": 1e-9},
        **{"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 1},
        "ddp_find_unused_parameters": False,
    }
    args: Seq2SeqTrainingArguments
    if ours:
        args = VanillaTransformerTrainingArguments(
            **common, max_tokens_per_batch=what.tokens, tokens_per_update=what.tokens_per_update
        )
    else:
        args = Seq2SeqTrainingArguments(
            **common,
            per_device_train_batch_size=what.sentences,
            gradient_accumulation_steps=what.accumulation,
            train_sampling_strategy=ORDERS[engine.rpartition("_")[0]],
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
