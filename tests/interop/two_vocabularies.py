"""A converted model of each toolkit, with different tokens on the two sides wherever the toolkit can have them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import MarianMTModel, MarianTokenizer

from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.vocabularies import TextSide, whitespace_tokenizer
from tests.interop.checkpoints import eole, fairseq, joeynmt, marian_npz, opennmt
from tests.interop.checkpoints.torch_transformer import (
    PYTORCH_TUTORIAL,
    TUTORIAL_OPTIONS,
    AroundTorch,
)
from tests.interop.foreign import (
    MERGES,
    SOURCES,
    TARGETS,
    learnt_codes,
    train_sentencepiece,
    write_fsmt_folder,
    write_m2m100_folder,
    write_opus_folder,
    write_two_tokenizers,
)
from tests.model_helpers import randomise

_SPM = {"eos_id": 0, "unk_id": 1, "bos_id": -1}


def write_separate_opus_folder(
    folder: Path, sizes: tuple[int, int] = (50, 50)
) -> tuple[MarianMTModel, MarianTokenizer]:
    """Like `write_opus_folder`, with `separate_vocabs`. `sizes` are without the three special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for spm, vocabulary, lines, size in (
        ("source.spm", "vocab.json", SOURCES, sizes[0]),
        ("target.spm", "target_vocab.json", TARGETS, sizes[1]),
    ):
        pieces = train_sentencepiece(folder / spm, lines, size + 10)
        rest = [piece for piece in pieces if piece not in ("<s>", "</s>", "<unk>")][:size]
        tokens = ["</s>", "<unk>", *rest, "<pad>"]
        (folder / vocabulary).write_text(
            json.dumps({token: number for number, token in enumerate(tokens)})
        )
    tokenizer = MarianTokenizer(
        source_spm=str(folder / "source.spm"),
        target_spm=str(folder / "target.spm"),
        vocab=str(folder / "vocab.json"),
        target_vocab_file=str(folder / "target_vocab.json"),
        separate_vocabs=True,
    )
    model = write_opus_folder(
        folder.parent / "model",  # elsewhere, because it writes a tokenizer too
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        vocab_size=sizes[0] + 3,
        decoder_vocab_size=sizes[1] + 3,
        pad_token_id=sizes[0] + 2,
        decoder_start_token_id=sizes[0] + 2,
        decoder_attention_heads=4,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def _opus(folder: Path) -> Path:
    write_separate_opus_folder(folder / "opus", (50, 57))
    return _converted("marian", folder / "opus", folder)


def _fsmt(folder: Path) -> Path:
    write_fsmt_folder(folder / "fsmt", decoder_attention_heads=4)
    return _converted("fsmt", folder / "fsmt", folder)


def _m2m100(folder: Path) -> Path:
    write_m2m100_folder(folder / "m2m", decoder_attention_heads=4)
    return _converted("m2m100", folder / "m2m", folder, source_language="en", target_language="de")


def _marian_npz(folder: Path) -> Path:
    names = ["vocab.en.spm", "vocab.de.spm"]
    source = train_sentencepiece(folder / names[0], SOURCES, 70, **_SPM)
    target = train_sentencepiece(folder / names[1], TARGETS, 75, **_SPM)
    arrays = marian_npz.weights((len(source), len(target)), "none")
    marian_npz.save(folder / "model.npz", arrays, vocabs=names)
    return _converted("marian-npz", folder / "model.npz", folder)


def _fairseq_spm(folder: Path) -> Path:
    sides = {}
    for side, size in (("en", 70), ("de", 75)):
        pieces = train_sentencepiece(folder / f"{side}.spm", _LINES[side], size)
        sides[side] = [piece for piece in pieces if piece not in ("<s>", "</s>", "<unk>")]
    return _fairseq_of(
        folder,
        sides,
        sentencepiece=folder / "en.spm",
        target_sentencepiece=folder / "de.spm",
    )


def _fairseq_codes(folder: Path) -> Path:
    merges = [merge for merge in MERGES if merge != "s </w>"]
    (folder / "codes").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    joined = {"en": ["the", "dog", "and", "in@@"], "de": ["in@@", "en", "und"]}
    sides = {}
    for side, lines in (("en", SOURCES), ("de", TARGETS)):
        letters = sorted(set("".join(lines)) - {" "})
        sides[side] = [*(f"{letter}@@" for letter in letters), *letters, *joined[side]]
    return _fairseq_of(folder, sides, codes=folder / "codes")


def _fairseq(folder: Path) -> Path:
    return _fairseq_of(folder, _WORDS)


def _fairseq_of(folder: Path, sides: dict[str, list[str]], **options: object) -> Path:
    fairseq.write_dictionaries(folder, sides)
    sizes = (len(tokens) + 4 for tokens in sides.values())
    fairseq.save(folder / "model.pt", fairseq.weights(*sizes))
    return _converted("fairseq", folder / "model.pt", folder, **options)


def _joeynmt(folder: Path) -> Path:
    sizes = (len(_WORDS["en"]) + 4, len(_WORDS["de"]) + 4)
    joeynmt.save(folder / "joey", joeynmt.weights(sizes), (_WORDS["en"], _WORDS["de"]))
    return _converted("joeynmt", folder / "joey", folder)


def _opennmt(folder: Path) -> Path:
    return _opennmt_of(folder, _WORDS)


def _opennmt_spm(folder: Path) -> Path:
    """A source does not end with a token."""
    pieces = {
        side: train_sentencepiece(folder / f"{side}.spm", lines, 75)
        for side, lines in _LINES.items()
    }
    tokens = {
        side: [piece for piece in parts if piece not in opennmt.SPECIAL]
        for side, parts in pieces.items()
    }
    return _opennmt_of(
        folder,
        tokens,
        sentencepiece=folder / "en.spm",
        target_sentencepiece=folder / "de.spm",
    )


def _opennmt_codes(folder: Path) -> Path:
    bpe = learnt_codes(folder / "codes", [*SOURCES, *TARGETS])
    tokens = {
        side: sorted({*bpe.process_line(" ".join(lines)).split()}) for side, lines in _LINES.items()
    }
    return _opennmt_of(folder, tokens, codes=folder / "codes")


def _opennmt_of(folder: Path, tokens: dict[str, list[str]], **options: object) -> Path:
    vocab = {
        "src": [*opennmt.SPECIAL, *tokens["en"]],
        "tgt": [*opennmt.SPECIAL, *tokens["de"]],
        "data_task": "seq2seq",
        "decoder_start_token": "<s>",
    }
    sizes = (len(vocab["src"]), len(vocab["tgt"]))
    opennmt.save(folder / "model.pt", *opennmt.weights(sizes), vocab)
    return _converted("opennmt", folder / "model.pt", folder, **options)


def _torch(folder: Path) -> Path:
    """A source starts with a token, and the rows after the tokens are unused."""
    model = randomise(AroundTorch(PYTORCH_TUTORIAL, norm_first=True))
    torch.save(model.state_dict(), folder / "model.pt")
    special = {
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }
    for side, words in _WORDS.items():
        tokenizer = whitespace_tokenizer(TextSide([*special.values(), *words], special))
        tokenizer.backend_tokenizer.save(str(folder / f"{side}.json"))
    return _converted(
        "torch",
        folder / "model.pt",
        folder,
        heads=4,
        norm_first=True,
        tokenizer=folder / "en.json",
        target_tokenizer=folder / "de.json",
        **TUTORIAL_OPTIONS,
    )


def _eole(folder: Path) -> Path:
    eole.save(folder / "eole", eole.weights())
    return _converted("eole", folder / "eole", folder)


def _own(folder: Path) -> Path:
    from tests.interop.exports import write_model

    write_model(
        folder / "ours",
        vocab_size=305,
        decoder_vocab_size=309,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
    )
    write_two_tokenizers(folder / "ours")
    return folder / "ours"


def _converted(source_format: str, source: Path, folder: Path, **options: object) -> Path:
    convert(source_format, source, folder / "ours", **options)
    return folder / "ours"


_LINES = {"en": SOURCES, "de": TARGETS}
_WORDS = {
    side: sorted({word for line in lines for word in line.split()})
    for side, lines in _LINES.items()
}

#: Functions that write a model into an empty folder, and return its model folder.
MODELS: dict[str, Callable[[Path], Path]] = {
    "own": _own,
    "marian": _opus,
    "fsmt": _fsmt,
    "m2m100": _m2m100,
    "marian-npz": _marian_npz,
    "fairseq-spm": _fairseq_spm,
    "fairseq-codes": _fairseq_codes,
    "fairseq": _fairseq,
    "joeynmt": _joeynmt,
    "opennmt": _opennmt,
    "opennmt-spm": _opennmt_spm,
    "opennmt-codes": _opennmt_codes,
    "torch": _torch,
    "eole": _eole,
}
