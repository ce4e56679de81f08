"""Tokenizers for the vocabularies of other programs, of classes that transformers has: they need no code of ours.

Three kinds of text come in: text in pieces already, one space between them; raw text for SentencePiece; and raw text
for Moses and a byte-pair encoding of subword-nmt or fastBPE.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import UserError

JOINER = "@@"  # of subword-nmt and fastBPE: at the end of a piece after which the word goes on


def by_number(words: Sequence[str], origin: str) -> dict[str, int]:
    """The number of each word; a UserError where one comes twice."""
    numbers = {word: number for number, word in enumerate(words)}
    if len(numbers) != len(words):
        twice = next(word for number, word in enumerate(words) if numbers[word] != number)
        raise UserError(f"{origin}: {twice!r} is there twice")
    return numbers


def pieces_tokenizer(
    words: Sequence[str], special: Mapping[str, str], origin: str, lowercase: bool = False
) -> PreTrainedTokenizerFast:
    """For text that is in words or pieces already; decoding joins what `JOINER` divides.

    Args:
        words: in the order of their numbers. special: `unk_token`, `eos_token`, `pad_token`, perhaps `bos_token`.
        origin: the file that the words are from, for messages. lowercase: lower-case all text.
    """
    numbers = by_number(words, origin)
    backend = Tokenizer(models.WordLevel(numbers, unk_token=special["unk_token"]))
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    eos = special["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B:0 {eos}:0", special_tokens=[(eos, numbers[eos])]
    )
    spaced = [decoders.Replace(Regex("$"), " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*spaced, decoders.Replace(f"{JOINER} ", ""), decoders.Replace(Regex(" $"), "")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **special,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        # a special token that a user writes into a sentence stays an ordinary word
        split_special_tokens=True,
    )


def sentencepiece_tokenizer(
    source_model: Path,
    target_model: Path,
    words: Sequence[str],
    target_words: Sequence[str],
    special: Mapping[str, str],
    origin: str,
) -> PreTrainedTokenizerBase:
    """For raw text: a `MarianTokenizer`, whose pieces have the numbers of another program.

    Args:
        source_model, target_model: of SentencePiece. words, target_words: in the order of their numbers.
        special: as in `pieces_tokenizer`. origin: for messages.
    """
    separate = list(words) != list(target_words)
    with TemporaryDirectory() as folder:
        vocabularies = {}
        for name, side in (("vocab", words), ("target_vocab_file", target_words)):
            vocabularies[name] = str(Path(folder) / f"{name}.json")
            Path(vocabularies[name]).write_text(json.dumps(by_number(side, origin)), encoding="utf-8")
        if not separate:
            del vocabularies["target_vocab_file"]
        for model in (source_model, target_model):
            if not model.is_file():
                raise UserError(f"{model}: no such file")
        try:
            return transformers.MarianTokenizer(
                source_spm=str(source_model),
                target_spm=str(target_model),
                separate_vocabs=separate,
                model_max_length=int(1e9),
                **vocabularies,
                **special,
            )
        except ImportError as error:
            raise UserError("SentencePiece models need sentencepiece: pip install sentencepiece") from error
        except (RuntimeError, OSError) as error:
            raise UserError(f"{source_model}, {target_model}: no SentencePiece model ({error})") from None


def sentencepiece_pieces(path: Path) -> list[str]:
    """The pieces of a SentencePiece model, in the order of their numbers."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except ImportError as error:
        raise UserError("SentencePiece models need sentencepiece: pip install sentencepiece") from error
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path}: no SentencePiece model ({error})") from None
    return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


def bpe_tokenizer(
    codes: Path, words: Sequence[str], target_words: Sequence[str], languages: tuple[str, str], origin: str
) -> PreTrainedTokenizerBase:
    """For raw text: an `FSMTTokenizer`, which is Moses and then a byte-pair encoding.

    It ends a word with "</w>" where the words here go on with `JOINER`.

    Args:
        codes: learnt by subword-nmt 0.2 or newer, or by fastBPE. words, target_words: in the order of their numbers,
            the first four of them "<s>", "<pad>", "</s>" and "<unk>". languages: of Moses. origin: for messages.
    """
    with TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / name) for name in ("src_vocab_file", "tgt_vocab_file", "merges_file")}
        for name, side in (("src_vocab_file", words), ("tgt_vocab_file", target_words)):
            numbers = by_number([*side[:4], *map(_with_end, side[4:])], origin)
            Path(files[name]).write_text(json.dumps(numbers), encoding="utf-8")
        Path(files["merges_file"]).write_text("".join(f"{merge}\n" for merge in _merges(codes)), encoding="utf-8")
        try:
            return transformers.FSMTTokenizer(langs=list(languages), model_max_length=int(1e9), **files)
        except ImportError as error:
            raise UserError("byte-pair codes need sacremoses: pip install sacremoses") from error


def _with_end(piece: str) -> str:
    return piece.removesuffix(JOINER) if piece.endswith(JOINER) else f"{piece}</w>"


def _merges(codes: Path) -> list[str]:
    """The pairs of a file of codes; fastBPE adds a count to each."""
    lines = read_lines(codes)
    if lines and lines[0].startswith("#version:"):
        version, lines = lines[0].split(":", 1)[1].strip(), lines[1:]
    else:
        # subword-nmt said nothing then; fastBPE never does
        version = "0.2" if all(len(line.split()) == 3 for line in lines) else "0.1"
    if not re.match(r"0\.[2-9]", version):
        raise UserError(
            f"{codes}: codes of subword-nmt {version} end words in another way; learn them with 0.2 or newer"
        )
    wrong = next((number for number, line in enumerate(lines, 1) if len(line.split()) not in (2, 3)), None)
    if wrong is not None:
        raise UserError(f"{codes}: line {wrong} of the merges is no pair of pieces")
    return [" ".join(line.split()[:2]) for line in lines]


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text; a UserError where it is none."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 text ({error})") from None
