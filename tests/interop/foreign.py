"""Shared by the tests of the converters: texts, small model folders of transformers, comparisons."""

import io
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from torch import Tensor, nn
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.text import load_tokenizers, save_tokenizers, train_tokenizer
from tests.model_helpers import assert_near, randomise

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

SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
}

# pytest's `record_property`, for tests/interop/imports_table.py
Record = Callable[[str, object], None]


def installed(package: str) -> str:
    """Its name and version."""
    return f"{package} {version(package)}"


def assert_fields(settings: object, **expected: Any) -> None:
    """Compare some fields of a configuration, or of the settings of a search."""
    found = {name: getattr(settings, name) for name in expected}
    assert found == expected, f"{found} is not {expected}"


def spelt(fields: dict[str, Any]) -> str:
    """Names and values."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def train_sentencepiece(
    path: Path, lines: list[str], vocab_size: int = 80, **settings: Any
) -> list[str]:
    """Write a SentencePiece model, and return its pieces."""
    model = io.BytesIO()
    settings = {"model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2} | settings
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5), model_writer=model, vocab_size=vocab_size, **settings
    )
    path.write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


def learnt_codes(path: Path, lines: list[str], count: int = 30) -> BPE:
    """Write codes of subword-nmt, and return their encoding."""
    with path.open("w", encoding="utf-8") as codes:
        learn_bpe([f"{line}\n" for line in lines], codes, count)
    with path.open(encoding="utf-8") as codes:
        return BPE(codes)


def write_opus_tokenizer(
    folder: Path,
    codes: Sequence[str] = ("de",),
    sources: list[str] = SOURCES,
    targets: list[str] = TARGETS,
) -> int:
    """source.spm, target.spm and vocab.json as of OPUS-MT, with the padding last. Returns the vocabulary size."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = train_sentencepiece(folder / "source.spm", sources) + train_sentencepiece(
        folder / "target.spm", targets
    )
    # one piece is left out, so that some text is unknown
    rest = sorted(set(pieces) - {"<s>", "</s>", "<unk>", "▁ball"})
    tokens = ["</s>", "<unk>", *(f">>{code}<<" for code in codes), *rest, "<pad>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
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
    """On a batch with padding on the right. Returns the largest difference."""
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
    """(B, S) token ids other than the padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), pad)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(vocab_size - 1, (length,), generator=generator)
    return torch.where(
        (ids == pad) & (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]), pad - 1, ids
    )


@torch.no_grad()
def write_opus_folder(folder: Path, codes: Sequence[str] = ("de",), **fields: Any) -> MarianMTModel:
    """Like an OPUS-MT model on the Hub, but small and with random weights."""
    size = write_opus_tokenizer(folder, codes)
    ids = {
        "pad_token_id": size - 1,
        "decoder_start_token_id": size - 1,
        "eos_token_id": 0,
        "vocab_size": size,
    }
    ids |= {name: fields.pop(name) for name in list(fields) if name in ids}
    settings = SIZES | ids | {"activation_function": "swish", "scale_embedding": True} | fields
    config = MarianConfig(**settings)
    model = randomise(MarianMTModel(config))
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_positions.weight.copy_(stack.embed_positions.create_weight())
    torch.nn.init.normal_(model.final_logits_bias)
    model.generation_config = GenerationConfig(
        **{name: value for name, value in ids.items() if name != "vocab_size"},
        num_beams=4,
        max_length=12,
        bad_words_ids=[[config.pad_token_id]],
        forced_eos_token_id=0,
        early_stopping=True,
    )
    model.save_pretrained(folder)
    MarianTokenizer.from_pretrained(folder).save_pretrained(folder)
    return model.eval()


# Not every result of a merge is a token of the vocabularies.
MERGES = ["t h", "th e</w>", "e n</w>", "i n", "d o", "do g", "s </w>", "n d</w>", "a nd</w>"]

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def write_fsmt_tokenizer(folder: Path) -> tuple[int, int]:
    """vocab-src.json, vocab-tgt.json and merges.txt as FSMT has them. Returns the vocabulary sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    joined = ["th", "the</w>", "in", "do", "dog", "nd</w>", "and</w>"]
    sizes = []
    for name, lines in (("vocab-src.json", SOURCES), ("vocab-tgt.json", TARGETS)):
        letters = sorted(set("".join(lines)) - {" "})
        tokens = (
            SPECIAL
            + letters
            + [letter + "</w>" for letter in letters]
            + joined * (name == "vocab-src.json")
        )
        (folder / name).write_text(
            json.dumps({token: number for number, token in enumerate(tokens)})
        )
        sizes.append(len(tokens))
    (folder / "merges.txt").write_text("".join(f"{merge} 1\n" for merge in MERGES))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"langs": ["en", "de"], "model_max_length": 1024})
    )
    return sizes[0], sizes[1]


@torch.no_grad()
def write_fsmt_folder(folder: Path, **fields: Any) -> FSMTForConditionalGeneration:
    """Like facebook/wmt19-en-de, but small and with random weights."""
    source_size, target_size = write_fsmt_tokenizer(folder)
    settings = {
        **SIZES,
        "src_vocab_size": source_size,
        "tgt_vocab_size": target_size,
        "num_beams": 3,
        "length_penalty": 1.2,
        "max_length": 15,
    }
    config = FSMTConfig(**settings | fields)
    model = FSMTForConditionalGeneration(config)
    tables = {
        name: table.clone()
        for name, table in model.state_dict().items()
        if "embed_positions" in name
    }
    randomise(model).load_state_dict(tables, strict=False)
    model.save_pretrained(folder)
    FSMTTokenizer.from_pretrained(folder).save_pretrained(folder)
    return model.eval()


def write_m2m100_folder(
    folder: Path, tokenizer: bool = True, **fields: Any
) -> M2M100ForConditionalGeneration:
    """Like facebook/m2m100_418M, but small and with random weights."""
    folder.mkdir(parents=True)
    pieces = train_sentencepiece(folder / "sentencepiece.bpe.model", SOURCES + TARGETS)
    tokens = [*SPECIAL, *(piece for piece in pieces if piece not in SPECIAL)]
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
    files = str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model")
    theirs = M2M100Tokenizer(*files, src_lang="en", tgt_lang="de")
    size = max(theirs.lang_code_to_id.values()) + 9
    config = M2M100Config(**SIZES | fields, vocab_size=size)
    model = randomise(M2M100ForConditionalGeneration(config))
    model.generation_config = GenerationConfig(
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        num_beams=5,
        max_length=14,
        early_stopping=True,
    )
    model.save_pretrained(folder)
    if tokenizer:
        theirs.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def write_folder_of_languages(folder: Path, kind: str) -> M2M100ForConditionalGeneration:
    """Like M2M-100 ("m2m100") or NLLB-200 ("nllb", "nllb legacy"), whose translations end at different lengths."""
    sizes = {"scale_embedding": False, "decoder_attention_heads": 4}
    model = write_m2m100_folder(folder, tokenizer=kind == "m2m100", **sizes)
    if kind != "m2m100":
        (folder / "vocab.json").unlink()
        train_sentencepiece(folder / "sentencepiece.bpe.model", SOURCES + TARGETS, model_type="bpe")
        codes = {"mask_token": None, "extra_special_tokens": [*FAIRSEQ_LANGUAGE_CODES, "<mask>"]}
        tokenizer = NllbTokenizer.from_pretrained(
            folder, legacy_behaviour="legacy" in kind, **codes
        )
        tokenizer.save_pretrained(folder)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        randomise(model)
    bias = model.model.decoder.layer_norm.bias  # a constant part of every logit
    model.model.shared.weight[2] += 3.2 * bias / bias.norm() ** 2
    model.save_pretrained(folder)
    return model


ENGLISH = ["two hundred and thirty-four", "a dog runs , a cat sleeps ."] * 9

GERMAN = ["zweihundertvierunddreißig", "ein Hund läuft , eine Katze schläft ."] * 9


def write_two_tokenizers(folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    source, target = (train_tokenizer(texts, vocab_size=300) for texts in (ENGLISH, GERMAN))
    save_tokenizers(folder, source, target)
    return source, target
