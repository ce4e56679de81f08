"""Shared by the tests of the converters: texts, SentencePiece models of them, comparisons."""

import io
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor, nn

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data.tokenizer_training import load_tokenizers
from hf_vanilla_transformer.interop.converting import convert
from tests.model_helpers import assert_near

SOURCES = [
    "a dog runs in the snow .",
    "two hundred and thirty-four cats sleep , and one doesn't !",
    "The children play with a red ball ; “nice”, says Ms. O’Neil (42 %).",
]
TARGETS = [
    "ein Hund läuft im Schnee .",
    "zweihundertvierunddreißig Katzen schlafen , und eine nicht !",
    "Die Kinder spielen mit einem roten Ball ; „schön“, sagt Frau O’Neil (42 %).",
]
UNSEEN = ["", "  Ünknown žluťoučký 漢字 <unk> </s> words …", "dogs  and\tcats"]

# pytest's `record_property`, for tests/interop/imports_table.py
Record = Callable[[str, object], None]


def installed(package: str) -> str:
    """Its name and version."""
    return f"{package} {version(package)}"


def spelt(fields: dict[str, Any]) -> str:
    """Names and values."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def train_sentencepiece(path: Path, lines: list[str], vocab_size: int = 80, **settings: Any) -> list[str]:
    """Write a SentencePiece model, and return its pieces."""
    model = io.BytesIO()
    settings = {"model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2} | settings
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5), model_writer=model, vocab_size=vocab_size, **settings
    )
    path.write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


def write_opus_tokenizer(folder: Path) -> int:
    """source.spm, target.spm and vocab.json as of OPUS-MT, with the padding last; returns the vocabulary size."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = train_sentencepiece(folder / "source.spm", SOURCES) + train_sentencepiece(folder / "target.spm", TARGETS)
    # one piece is left out, so that some text is unknown
    rest = sorted(set(pieces) - {"<s>", "</s>", "<unk>", "▁ball"})
    tokens = ["</s>", "<unk>", ">>de<<", *rest, "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    return len(tokens)


def converted(source_format: str, source: Path, output: Path, **options: Any) -> tuple:
    """The model and the two tokenizers of the folder that a conversion wrote, loaded by the Auto classes."""
    from transformers import AutoModelForSeq2SeqLM

    convert(source_format, source, output, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    has_tokenizer = (output / "tokenizer_config.json").is_file()
    return (model.eval(), *(load_tokenizers(output) if has_tokenizer else (None, None)))


@torch.no_grad()
def assert_same_logits(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> float:
    """On a batch with padding on the right; returns the largest difference."""
    config = ours.config
    source = random_ids([7, 3, 9], config.vocab_size, config.pad_token_id)
    target = random_ids([4, 8, 5], config.target_vocab_size, config.pad_token_id, seed=1)
    batch = {"input_ids": source, "attention_mask": source.ne(config.pad_token_id).long()}
    # with a cache, FSMT applies no causal mask
    expected = theirs(**batch, decoder_input_ids=target, use_cache=False).logits
    actual = ours(**batch, decoder_input_ids=target).logits
    written = target.ne(config.pad_token_id)
    assert_near(actual[written], expected[written], tolerance)
    return (actual - expected)[written].abs().max().item()


def random_ids(lengths: list[int], vocab_size: int, pad: int, seed: int = 0) -> Tensor:
    """(B, S) token ids other than the padding, which is on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), pad)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(vocab_size - 1, (length,), generator=generator)
    return torch.where((ids == pad) & (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]), pad - 1, ids)
